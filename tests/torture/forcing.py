"""A log that goes on without its source: what a replica had up to its line, and what calls of before mean there."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tests.brokers.producers import everything
from tidewal.cli.open_log import opened
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.testing.histories import history_checks as checks
from tidewal.runtime.testing.histories.client_history import ClientCall

FORCE = "force"  # the way in which such a log takes the place of another one
NO_LINE = -1  # below all times
SENT_BY = ("send", "transaction")  # calls that have messages


async def line_time(replica: str) -> int:
    """The time of the line of the replica with this URL, `NO_LINE` where it has none. Raises errors of the log."""
    async with opened(replica) as wal:
        return (await replication_state(wal)).line.get("time", NO_LINE)


def is_of_line(call: ClientCall, time: float) -> bool:
    """Whether the call has written, by its own timestamp up to `time`."""
    return call.outcome == "ok" and call.result.get("ts", time + 1) <= time


def as_of(calls: Iterable[ClientCall], time: float) -> list[ClientCall]:
    """The calls as the log knows them that has of the nodes' channels what was written up to `time`: of what was
    acknowledged with a later timestamp it has nothing. Appends to programs' own channels have no timestamp, and
    cancellations neither: they are there or not. What was read before is left out, as it may be gone."""
    found: list[ClientCall] = []
    for call in (each for each in calls if each.kind not in ("read", "saw")):
        if call.outcome != "ok":
            found.append(call)
        elif "ts" in call.result:
            found.append(call if is_of_line(call, time) else replace(call, outcome="refused"))
        elif call.kind == "append" or call.result.get("cancelled"):
            found.append(replace(call, outcome="unknown", result={}))
        else:
            found.append(call)
    return found


def without_undone(made: checks.Content, given: checks.Content, calls: Iterable[ClientCall]) -> list[tuple[str, str]]:
    """The outputs of a group, without those that it made of inputs that were asked for and are not `given` any more."""
    asked = {entry["payload"] for call in calls for entry in call.about.get("entries", ())}
    undone = asked - {payload for _, payload in given}
    return [(id, payload) for id, payload in made if payload not in undone]


async def contents(wal: Wal, channels: Sequence[str]) -> dict[str, list[bytes]]:
    """What programs' own channels have; one that is not there has nothing, and is created."""
    found: dict[str, list[bytes]] = {}
    for channel in channels:
        await wal.create_channel(channel, ChannelPolicy())
        found[channel] = [bytes(entry.payload) for entry in await everything(wal, channel)]
    return found


def cut_short(
    before: Mapping[str, Sequence[bytes]], after: Mapping[str, Sequence[bytes]], salvaged: Mapping[str, Sequence[bytes]]
) -> list[str]:
    """What is wrong with programs' own channels: each has, in order, what it had in the source up to some entry;
    the rest was salvaged."""
    return [
        f"{name}: {len(after[name])} entries, and {len(rest)} salvaged, are not the {len(before[name])} of the source"
        for name in after
        if [*after[name], *(rest := salvaged.get(name, ()))] != [*before[name]]
    ]


def not_salvaged(calls: Iterable[ClientCall], time: float, salvaged: Mapping[str, Sequence[bytes]]) -> list[str]:
    """Which acknowledged messages are above the line, and were not salvaged."""
    there: set[bytes] = set()
    for payload in chain(*salvaged.values()):
        with suppress(BadRecord):  # what programs have written themselves, and garbage
            there.add(bytes(decode(payload).body))
    above = [call for call in calls if call.outcome == "ok" and not is_of_line(call, time)]
    sent = [entry["payload"] for call in above if call.kind in SENT_BY for entry in call.about["entries"]]
    return [
        f"{payload} was acknowledged above the line, and is lost" for payload in sent if payload.encode() not in there
    ]


def read_salvaged(file: Path) -> dict[str, list[bytes]]:
    """What was salvaged into a file, by channel."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for line in map(json.loads, file.read_text().splitlines()):
        found[line["channel"]].append(base64.b64decode(line["payload"]))
    return found
