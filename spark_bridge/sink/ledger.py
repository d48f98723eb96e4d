"""The ledger of one writer: a small channel that says which batch is done, and which one is decided.

A batch of a write into topics is staged by tasks, decided by the driver, copied to the topics, and done. The decision
names the attempts whose rows count, and where the topics ended before; whoever finds it goes on with it, whatever
other attempts have staged meanwhile. What is done is never done again. Two records are kept at most.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import msgpack
import xxhash

from ...runtime.errors import BadRecord, ChannelNotFound, CorruptLog
from ...runtime.names import DEFAULT_PREFIX
from ...runtime.record import DECODE_ERRORS, Record, RecordType, decode, encode
from ...runtime.wal import ChannelPolicy, Entry, From, FromId, Start, Wal

VERSION: Final = 1
POLICY: Final = ChannelPolicy()  # with its retention: what a query that is gone has left must not hold the log for ever


class Attempt(NamedTuple):
    """One task's staged rows: `chunks` entries from `first` to `last` with its `token`."""

    partition: int
    token: str
    chunks: int
    first: bytes
    last: bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """The rows that count for `batch`, and where the topics that they go to ended before any was copied."""

    batch: int
    attempts: Sequence[Attempt]
    ends: Mapping[str, bytes | None]


class State(NamedTuple):
    """The last batch that is done (-1: none), and the one that is decided and not done."""

    done: int
    decision: Decision | None


def ledger_name(writer: str, prefix: str = DEFAULT_PREFIX) -> str:
    """The ledger's channel. `writer` is a query's or a job's id."""
    return f"{prefix}-spark-{writer}"


def application(app: str, target: str) -> str:
    """The id of what an application (option `txnAppId`) writes to one target."""
    return xxhash.xxh3_128_hexdigest(f"{app}\0{target}".encode())


class Ledger:
    """The ledger in `channel`. One driver at a time writes it, as Spark's checkpoints demand."""

    def __init__(self, wal: Wal, channel: str) -> None:
        self._wal = wal
        self._channel = channel

    async def create(self) -> None:
        """Make the channel, if it is not there."""
        await self._wal.create_channel(self._channel, POLICY)

    async def state(self) -> State:
        """What the ledger says now. Of two decisions on one batch the first counts. Raises `CorruptLog`."""
        done = -1
        decision: Decision | None = None
        try:
            latest = await self._wal.latest_id(self._channel)
            if latest is None:
                return State(done, None)
            async with aclosing(upto(self._wal, self._channel, From.EARLIEST, latest)) as pieces:
                async for entries in pieces:
                    for entry in entries:
                        found = self._read(entry)
                        if isinstance(found, int):
                            done = max(done, found)
                        elif decision is None or decision.batch < found.batch:
                            decision = found
        except ChannelNotFound:
            return State(done, None)
        return State(done, decision if decision is not None and decision.batch > done else None)

    def _read(self, entry: Entry) -> int | Decision:
        try:
            body = cast("dict[str, Any]", msgpack.unpackb(decode(entry.payload).body))
            if body["v"] != VERSION:
                raise ValueError(f"version {body['v']}")
            if "done" in body:
                return int(body["done"])
            return Decision(body["batch"], [Attempt(*each) for each in body["attempts"]], dict(body["ends"]))
        except (*DECODE_ERRORS, LookupError, BadRecord) as error:
            raise CorruptLog(
                f"the ledger {self._channel} cannot be read ({error}): nothing is written, for that might double rows. "
                "If a newer Tidewal wrote it, upgrade",
                path=self._channel,
            ) from error

    async def decide(self, decision: Decision) -> None:
        """Note a decision; whether it counts `state` tells."""
        await self._append(
            {"batch": decision.batch, "attempts": list(map(list, decision.attempts)), "ends": dict(decision.ends)}
        )

    async def finish(self, batch: int) -> None:
        """Note that `batch` is done; everything before it is not needed any more."""
        id = await self._append({"done": batch})
        if self._wal.capabilities.truncate:
            await self._wal.truncate(self._channel, id)

    async def _append(self, body: Mapping[str, object]) -> bytes:
        packed = cast(bytes, msgpack.packb({"v": VERSION, **body}))
        return await self._wal.append(self._channel, encode(Record(RecordType.LEDGER, body=packed)))


async def upto(wal: Wal, channel: str, start: Start, last: bytes) -> AsyncGenerator[Sequence[Entry]]:
    """The entries from `start` up to and including `last`, which is there. Close it with `aclose`."""
    if isinstance(start, FromId) and (start.id > last or (start.id == last and not start.inclusive)):
        return
    entries = cast("AsyncGenerator[Sequence[Entry]]", wal.read(channel, start))
    async with aclosing(entries):
        async for batch in entries:
            wanted = [entry for entry in batch if entry.id <= last]
            if wanted:
                yield wanted
            if batch[-1].id >= last:
                return
