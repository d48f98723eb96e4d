"""The checker: decides from histories and from what is in the log whether a promise was broken.

Acknowledged means present once, refused means absent, unknown means either. Each function returns the violations that
it found, as sentences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.torture.history import Operation

SHOWN = 5  # of many violations of one kind
Content = Sequence[tuple[str, str]]  # the entries of a channel in order: id (hexadecimal) and payload


def errors(operations: Iterable[Operation]) -> list[str]:
    """Errors that are not Tidewal's own must not reach a user."""
    return [
        f"{operation.client}: {operation.kind} {operation.about} ended with {operation.result['error']}"
        for operation in operations
        if operation.result.get("foreign")
    ][:SHOWN]


# ---- channels -------------------------------------------------------------------------------------------------------


def appends(operations: Iterable[Operation], contents: Mapping[str, Content]) -> list[str]:
    """Each payload is in its channel as often as its outcome says, under the id that was told, and those of one
    producer are in the order in which they were sent."""
    asked = {
        (entry["channel"], entry["payload"]): (operation, index)
        for operation in operations
        if operation.kind == "append"
        for index, entry in enumerate(operation.about["entries"])
    }
    found: list[str] = []
    for channel, content in contents.items():
        ids: dict[str, list[str]] = defaultdict(list)
        for id, payload in content:
            ids[payload].append(id)
        found += _order(channel, content)
        found += [f"{channel}: {payload} was never sent" for payload in ids if (channel, payload) not in asked]
        for (there, payload), (operation, index) in asked.items():
            if there == channel:
                found += _presence(f"{channel}: {payload}", operation, index, ids.get(payload, []))
    return found


def _presence(what: str, operation: Operation, index: int, ids: list[str]) -> list[str]:
    if len(ids) > 1:
        return [f"{what} is there {len(ids)} times ({operation.outcome})"]
    if operation.outcome == "ok" and not ids:
        return [f"{what} was acknowledged and is lost"]
    if operation.outcome == "ok" and operation.result["ids"][index] != ids[0]:
        return [f"{what} was acknowledged as {operation.result['ids'][index]} and is at {ids[0]}"]
    if operation.outcome == "refused" and ids:
        return [f"{what} was refused ({operation.result}) and is there"]
    return []


def _order(channel: str, content: Content) -> list[str]:
    """Payloads are PRODUCER:NUMBER."""
    last: dict[str, int] = {}
    found: list[str] = []
    for _, payload in content:
        producer, _, number = payload.rpartition(":")
        if not number.isdecimal():
            continue
        if int(number) < last.get(producer, -1):
            found.append(f"{channel}: {payload} stands behind number {last[producer]}")
        last[producer] = int(number)
    return found


def copies(name: str, inputs: Content, outputs: Content, *, exactly_once: bool) -> list[str]:
    """A group's outputs: the inputs in their order, each once; or with at least once, each at least once."""
    given, made = [payload for _, payload in inputs], [payload for _, payload in outputs]
    lost, more = Counter(given) - Counter(made), Counter(made) - Counter(given)
    found = [f"{name}: {payload} is lost" for payload in list(lost)[:SHOWN]]
    if exactly_once or set(more) - set(given):
        found += [
            f"{name}: {payload} is there {count} times too often" for payload, count in list(more.items())[:SHOWN]
        ]
    if exactly_once and not found and given != made:
        found.append(f"{name}: the outputs are in another order than the inputs")
    return found


def watched(operations: Iterable[Operation], contents: Mapping[str, Content]) -> list[str]:
    """What live readers delivered, from the first entry on, over all their reopenings, is how the channel begins."""
    found: list[str] = []
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for operation in operations:
        if operation.kind == "saw":
            seen[operation.client, operation.about["channel"]] += operation.about["ids"]
    for (client, channel), ids in seen.items():
        there = [id for id, _ in contents[channel]]
        if ids != there[: len(ids)]:
            at = next((i for i, (a, b) in enumerate(zip(ids, there, strict=False)) if a != b), len(there))
            found.append(
                f"{client}: its reader of {channel} delivered {ids[at : at + 3]} where {there[at : at + 3]} is"
            )
    return found


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows(operations: Iterable[Operation], where: str, ids: Iterable[int]) -> list[str]:
    """Inserted rows, each with an id of its own, are present as often as their outcome says."""
    counts = Counter(ids)
    found: list[str] = []
    for operation in operations:
        if operation.kind != "insert":
            continue
        for id in range(operation.about["first"], operation.about["first"] + operation.about["count"]):
            count = counts.pop(id, 0)
            if count > 1:
                found.append(f"{where}: row {id} is there {count} times ({operation.outcome})")
            elif operation.outcome == "ok" and not count:
                found.append(f"{where}: row {id} was acknowledged and is lost")
            elif operation.outcome == "refused" and count:
                found.append(f"{where}: row {id} was refused ({operation.result}) and is there")
    return found + [f"{where}: row {id} was never written" for id in list(counts)[:SHOWN]]


def same(where: str, ids: Iterable[int], than: str, others: Iterable[int]) -> list[str]:
    """Two views of the same rows agree, unknown outcomes included."""
    differing = set(ids) ^ set(others)
    return [f"{where} and {than} disagree about row {id}" for id in sorted(differing)[:SHOWN]]


# ---- keys that are written again and again --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Write:
    """One version of a key (None: deleted), by the one process that writes this key, one after another."""

    value: int | None
    began: int
    ended: int | None
    outcome: str


def keys(operations: Sequence[Operation]) -> list[str]:
    """Strong reads: never older than what was acknowledged before they began, nor than what an earlier read saw, and
    nothing that was refused or that nobody had asked for yet."""
    writes: dict[str, list[_Write]] = defaultdict(list)
    for operation in operations:
        if operation.kind == "set":
            for key, value in operation.about["values"].items():
                writes[key].append(_Write(value, operation.began, operation.ended, operation.outcome))
    reads = [operation for operation in operations if operation.kind == "read" and operation.outcome == "ok"]
    by_owner: dict[str, list[str]] = defaultdict(list)
    for key in writes:
        by_owner[key.partition("/")[0]].append(key)
    found: list[str] = []
    for owner, names in by_owner.items():
        of_owner = [read for read in reads if read.about["owner"] == owner]
        for key in names:
            found += _reads_of(key, writes[key], of_owner)
    return found


def _reads_of(key: str, writes: list[_Write], reads: list[Operation]) -> list[str]:
    seen: list[tuple[int, int]] = []  # when a read ended, and the index of the write that it saw
    found: list[str] = []
    for read in reads:
        assert read.ended is not None
        value = read.result["rows"].get(key)
        acked = [i for i, w in enumerate(writes) if w.outcome == "ok" and w.ended is not None and w.ended <= read.began]
        floor = max([-1, *acked[-1:], *(index for ended, index in seen if ended < read.began)])
        allowed = {floor} | {
            i for i, w in enumerate(writes) if i > floor and w.outcome != "refused" and w.began < read.ended
        }
        match = [i for i in allowed if (writes[i].value if i >= 0 else None) == value]
        if not match:
            found.append(_stale(key, value, writes, floor, read))
            continue
        seen.append((read.ended, min(match)))
    return found[:SHOWN]


def _stale(key: str, value: Any, writes: list[_Write], floor: int, read: Operation) -> str:
    expected = writes[floor] if floor >= 0 else None
    return (
        f"{read.client}: a {read.about['consistency']} read that began at {read.began} says {key} is {value}; "
        f"before it {expected} was acknowledged or read"
    )
