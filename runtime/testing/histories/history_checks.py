"""Whether a promise was broken: decided from the histories of clients, and from what is in the log and the tables.

Acknowledged means present once, refused means absent, unknown means either. Each function returns the violations that
it found, as sentences. The calls that they know:

    kind      about                              result             checked by
    append    entries: [{channel, payload}]      ids                appends
    send      entries: [{channel, payload}]      ts                 appends (the channel is a topic)
    later     payload, due_ms: a message         ids, ts            delayed
    cancel    payload: of such a message         cancelled          delayed
    saw       channel, ids                                          watched
    insert    first, count: rows of these ids    ts                 rows
    transaction: first, count, entries           ts                 rows, appends, transactions, transaction_times
    set       values: {key: version or null}     ts                 keys, versions
    read      owner, consistency                 rows: {key: n}     keys (several n of a key are a list)
    create_collection, drop_collection: collection                  collections

Payloads are PRODUCER:NUMBER, keys OWNER/NAME; an owner's versions rise, and null deletes a key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from ...clock import physical_ms
from .client_history import ClientCall

SHOWN = 5  # of many violations of one kind
Content = Sequence[tuple[str, str]]  # the entries of a channel in order: id (hexadecimal) and payload


def errors(calls: Iterable[ClientCall]) -> list[str]:
    """Errors that are not Tidewal's own must not reach a user."""
    return [
        f"{call.client}: {call.kind} {call.about} ended with {call.result['error']}"
        for call in calls
        if call.result.get("foreign")
    ][:SHOWN]


# ---- channels -------------------------------------------------------------------------------------------------------


def appends(calls: Iterable[ClientCall], contents: Mapping[str, Content]) -> list[str]:
    """Each payload is in its channel as often as its outcome says, under the id that was told if one was, and those of
    one producer are in the order in which they were sent."""
    asked = {
        (entry["channel"], entry["payload"]): (call, index)
        for call in calls
        if call.kind in ("append", "send", "transaction")
        for index, entry in enumerate(call.about["entries"])
    }
    found: list[str] = []
    for channel, content in contents.items():
        ids: dict[str, list[str]] = defaultdict(list)
        for id, payload in content:
            ids[payload].append(id)
        found += _order(channel, content)
        found += [f"{channel}: {payload} was never sent" for payload in ids if (channel, payload) not in asked]
        for (there, payload), (call, index) in asked.items():
            if there == channel:
                found += _presence(f"{channel}: {payload}", call, index, ids.get(payload, []))
    return found


def _presence(what: str, call: ClientCall, index: int, ids: list[str]) -> list[str]:
    if len(ids) > 1:
        return [f"{what} is there {len(ids)} times ({call.outcome})"]
    if call.outcome == "ok" and not ids:
        return [f"{what} was acknowledged and is lost"]
    told = call.result.get("ids")
    if call.outcome == "ok" and told and told[index] != ids[0]:
        return [f"{what} was acknowledged as {told[index]} and is at {ids[0]}"]
    if call.outcome == "refused" and ids:
        return [f"{what} was refused ({call.result}) and is there"]
    return []


def _order(channel: str, content: Content) -> list[str]:
    """Payloads are PRODUCER:NUMBER."""
    split = (payload.rpartition(":") for _, payload in content)
    return rising(channel, ((producer, int(number)) for producer, _, number in split if number.isdecimal()))


def rising(where: str, numbered: Iterable[tuple[str, int]]) -> list[str]:
    """What clients wrote one after another lies in this order: `numbered` has, in the order of the log, the line to
    which each write belongs (a producer, a key) and its number there."""
    last: dict[str, int] = {}
    found: list[str] = []
    for line, number in numbered:
        if number < last.get(line, -1):
            found.append(f"{where}: {line}:{number} stands behind number {last[line]}")
        last[line] = number
    return found[:SHOWN]


def copies(name: str, inputs: Content, outputs: Content, *, exactly_once: bool, ordered: bool = True) -> list[str]:
    """A group's outputs: the inputs in their order (unless it is not kept), each once; or with at least once, each at
    least once."""
    given, made = [payload for _, payload in inputs], [payload for _, payload in outputs]
    lost, more = Counter(given) - Counter(made), Counter(made) - Counter(given)
    found = [f"{name}: {payload} is lost" for payload in list(lost)[:SHOWN]]
    if exactly_once or set(more) - set(given):
        found += [
            f"{name}: {payload} is there {count} times too often" for payload, count in list(more.items())[:SHOWN]
        ]
    if exactly_once and ordered and not found and given != made:
        found.append(f"{name}: the outputs are in another order than the inputs")
    return found


def watched(calls: Iterable[ClientCall], contents: Mapping[str, Content]) -> list[str]:
    """What live readers delivered, from the first entry on, over all their reopenings, is how the channel begins."""
    found: list[str] = []
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for call in calls:
        if call.kind == "saw":
            seen[call.client, call.about["channel"]] += call.about["ids"]
    for (client, channel), ids in seen.items():
        there = [id for id, _ in contents[channel]]
        if ids != there[: len(ids)]:
            at = next((i for i, (a, b) in enumerate(zip(ids, there, strict=False)) if a != b), len(there))
            found.append(
                f"{client}: its reader of {channel} delivered {ids[at : at + 3]} where {there[at : at + 3]} is"
            )
    return found


# ---- messages that are due later ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleasedMessage:
    """A message that was due later, as it lies in its partition: its payload, the timestamp at which it was due, and
    that of its release."""

    payload: str
    due_ts: int
    ts: int


def delayed(calls: Sequence[ClientCall], partitions: Iterable[Sequence[ReleasedMessage]]) -> list[str]:
    """Once all are due: each message is there once, never early, in each partition in the order of due times, unless it
    was cancelled in time; then it is not there. Of a partition that messages of several epochs come into, each of these
    has an order of its own, and is given by itself."""
    cancels: dict[str, list[bool | None]] = defaultdict(list)  # by payload the answers; None: of unknown outcome
    for call in calls:
        if call.kind == "cancel" and call.outcome != "refused":
            cancels[call.about["payload"]].append(call.result.get("cancelled") if call.outcome == "ok" else None)
    there: dict[str, list[ReleasedMessage]] = defaultdict(list)
    found: list[str] = []
    for partition in partitions:
        for before, each in pairwise(partition):
            if each.due_ts < before.due_ts:
                found.append(f"{each.payload} was due before {before.payload}, and stands behind it")
        for each in partition:
            there[each.payload].append(each)
    for call in calls:
        if call.kind == "later":
            found += _release(call, cancels[call.about["payload"]], there.pop(call.about["payload"], []))
    return found[:SHOWN] + [f"{payload} was never sent to be due later" for payload in list(there)[:SHOWN]]


def _release(call: ClientCall, cancels: Sequence[bool | None], there: Sequence[ReleasedMessage]) -> list[str]:
    payload = call.about["payload"]
    if len(there) > 1:
        return [f"{payload} is there {len(there)} times ({call.outcome})"]
    if there and True in cancels:
        return [f"{payload} was cancelled in time, and is there"]
    if there and call.outcome == "refused":
        return [f"{payload} was refused ({call.result}) and is there"]
    if there and physical_ms(there[0].ts) < call.about["due_ms"]:
        return [f"{payload} came at {physical_ms(there[0].ts)}, and was due at {call.about['due_ms']}"]
    if not there and call.outcome == "ok" and not {True, None} & set(cancels):
        return [f"{payload} was acknowledged and is lost"]
    return []


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows(calls: Iterable[ClientCall], where: str, ids: Iterable[int]) -> list[str]:
    """Inserted rows, each with an id of its own, are present as often as their outcome says."""
    counts = Counter(ids)
    found: list[str] = []
    for call in calls:
        if call.kind not in ("insert", "transaction"):
            continue
        for id in range(call.about["first"], call.about["first"] + call.about["count"]):
            count = counts.pop(id, 0)
            if count > 1:
                found.append(f"{where}: row {id} is there {count} times ({call.outcome})")
            elif call.outcome == "ok" and not count:
                found.append(f"{where}: row {id} was acknowledged and is lost")
            elif call.outcome == "refused" and count:
                found.append(f"{where}: row {id} was refused ({call.result}) and is there")
    return found + [f"{where}: row {id} was never written" for id in list(counts)[:SHOWN]]


def transactions(calls: Iterable[ClientCall], ids: Iterable[int], messages: Mapping[str, Content]) -> list[str]:
    """Of each transaction all rows and messages are there, or nothing."""
    rows, payloads = set(ids), {payload for content in messages.values() for _, payload in content}
    found: list[str] = []
    for call in calls:
        if call.kind == "transaction":
            parts = {id in rows for id in range(call.about["first"], call.about["first"] + call.about["count"])}
            parts |= {entry["payload"] in payloads for entry in call.about["entries"]}
            if len(parts) > 1:
                found.append(f"half of the transaction of row {call.about['first']} is there ({call.outcome})")
    return found[:SHOWN]


def transaction_times(calls: Iterable[ClientCall], rows: Mapping[int, int], messages: Mapping[str, int]) -> list[str]:
    """All of a transaction that is there has one timestamp, which is that of its result if there was one. `rows` has
    the timestamps by row, `messages` by payload; what else they have is passed over."""
    found: list[str] = []
    for call in calls:
        if call.kind == "transaction":
            ids = range(call.about["first"], call.about["first"] + call.about["count"])
            times = {rows[id] for id in ids if id in rows}
            times |= {messages[each["payload"]] for each in call.about["entries"] if each["payload"] in messages}
            told = {call.result["ts"]} if call.outcome == "ok" and times else set[int]()
            if len(times | told) > 1:
                found.append(
                    f"the transaction of row {call.about['first']} has the timestamps {sorted(times)} ({call.outcome}"
                    f"{', '.join(['', *map(str, told)])})"
                )
    return found[:SHOWN]


def same(where: str, ids: Iterable[int], than: str, others: Iterable[int]) -> list[str]:
    """Two views of the same rows agree, unknown outcomes included."""
    differing = set(ids) ^ set(others)
    return [f"{where} and {than} disagree about row {id}" for id in sorted(differing)[:SHOWN]]


def collections(calls: Iterable[ClientCall], listed: Iterable[str]) -> list[str]:
    """Collections are there as the last call for each said; names are used once."""
    there, found = set(listed), list[str]()
    state: dict[str, bool | None] = {}
    for call in calls:
        if call.kind in ("create_collection", "drop_collection") and call.outcome != "refused":
            is_there = call.kind == "create_collection"
            state[call.about["collection"]] = is_there if call.outcome == "ok" else None
    for name, is_there in state.items():
        if is_there is not None and is_there != (name in there):
            found.append(f"the collection {name} was {'created' if is_there else 'dropped, and is there'}")
    return found[:SHOWN]


# ---- keys that are written again and again --------------------------------------------------------------------------


def versions(calls: Iterable[ClientCall], where: str, stored: Iterable[tuple[str, int]]) -> list[str]:
    """Each version of each key that was set is stored as often as its outcome says; `stored` are key and version."""
    counts = Counter(stored)
    found: list[str] = []
    for call in calls:
        if call.kind != "set":
            continue
        for key, version in call.about["values"].items():
            count = counts.pop((key, version), 0) if version is not None else 0
            if count > 1:
                found.append(f"{where}: version {version} of {key} is there {count} times ({call.outcome})")
            elif call.outcome == "ok" and version is not None and not count:
                found.append(f"{where}: version {version} of {key} was acknowledged and is lost")
            elif call.outcome == "refused" and count:
                found.append(f"{where}: version {version} of {key} was refused ({call.result}) and is there")
    return (found + [f"{where}: version {version} of {key} was never written" for key, version in counts])[:SHOWN]


@dataclass(frozen=True, slots=True)
class _Write:
    """One version of a key (None: deleted), by the one process that writes this key, one after another."""

    value: int | None
    began: int
    ended: int | None
    outcome: str


def keys(calls: Sequence[ClientCall]) -> list[str]:
    """Strong reads: never older than what was acknowledged before they began, nor than what an earlier read saw, and
    nothing that was refused or that nobody had asked for yet."""
    writes: dict[str, list[_Write]] = defaultdict(list)
    for call in calls:
        if call.kind == "set":
            for key, value in call.about["values"].items():
                writes[key].append(_Write(value, call.began, call.ended, call.outcome))
    reads = [call for call in calls if call.kind == "read" and call.outcome == "ok"]
    by_owner: dict[str, list[str]] = defaultdict(list)
    for key in writes:
        by_owner[key.partition("/")[0]].append(key)
    found: list[str] = []
    for owner, names in by_owner.items():
        of_owner = [read for read in reads if read.about["owner"] == owner]
        for key in names:
            found += _reads_of(key, writes[key], of_owner)
    return found


def _reads_of(key: str, writes: list[_Write], reads: list[ClientCall]) -> list[str]:
    """The reads of one key, in the order in which they began."""
    began = [write.began for write in writes]
    # When a call ended, and the index of the write that every read which begins behind that end must know.
    known = [(w.ended, i) for i, w in enumerate(writes) if w.outcome == "ok" and w.ended is not None]
    heapify(known)
    floor, found = -1, list[str]()
    for read in reads:
        assert read.ended is not None
        while known and known[0][0] < read.began:
            floor = max(floor, heappop(known)[1])
        value = read.result["rows"].get(key)
        allowed = range(floor, bisect_left(began, read.ended))
        match = next((i for i in allowed if _may_show(writes, i, floor) and _value(writes, i) == value), None)
        if match is None:
            found.append(_stale(key, value, writes, floor, read))
        else:
            heappush(known, (read.ended, match))
    return found[:SHOWN]


def _may_show(writes: list[_Write], index: int, floor: int) -> bool:
    return index == floor or writes[index].outcome != "refused"


def _value(writes: list[_Write], index: int) -> int | None:
    """What a write has made of its key, which was not there before the first one."""
    return writes[index].value if index >= 0 else None


def _stale(key: str, value: Any, writes: list[_Write], floor: int, read: ClientCall) -> str:
    expected = writes[floor] if floor >= 0 else None
    return (
        f"{read.client}: a {read.about['consistency']} read that began at {read.began} says {key} is {value}; "
        f"before it {expected} was acknowledged or read"
    )
