"""The records of a replicated state: proposals of its writers, and what the mechanism itself writes.

The record's header names the author of a record (`producer`) and its number among the author's records (`pseq`); where
the state has a leader, also the number of the leader's claim (`term`). The body is a msgpack map with `v`, the feature
level from which the record counts, `kind`, where the state has a leader the id of the claim that the record stands on
(`claim`; without it, and with `term` 0, it is an author's own record), and the fields of the kind. The mechanism's own
kinds are these, all others are the state machine's:

    leader  node, previous,     a claim of leadership: it wins only if `previous` is the id of the last winning one
            level
    begin   level               the log of a state without leader begins here
    noop                        nothing; what its author sent before is in the log by now, or never counts
    level   level               from here on the log may hold records of this feature level
    page    as_of, page, of,    a part of a snapshot: the state after the record with the id `as_of`, in the form of the
            digest, data        level `v`

The record that a log begins with may say at which level; without that it is the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgpack
import xxhash

from ..errors import BadRecord, InvalidSchema
from ..log.record import DECODE_ERRORS, Record, RecordType, decode
from ..log.wal import Entry

LEADER, BEGIN, NOOP, LEVEL, PAGE = "leader", "begin", "noop", "level", "page"
FIRST_LEVEL = 1  # of a log that says nothing of its level
PAGE_BYTES = 512 * 1024  # below what any backend takes in one message

Event: TypeAlias = Mapping[str, Any]
Typed = TypeVar("Typed")


class FeatureLevels(NamedTuple):
    """The feature levels that a version of Tidewal can work at: it reads the logs of these, and writes at each what the
    others of that level read."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}" if self.lowest < self.highest else str(self.lowest)


LEVELS = FeatureLevels(1, 2)  # of this Tidewal; 2: topics in the catalog


class Claim(NamedTuple):
    """The last winning claim of leadership: its record's id, its number and its node. The first one has number 1."""

    id: bytes = b""
    term: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A record of the log whose frame is intact. `event` is the body."""

    entry: Entry
    record: Record
    event: Event

    @property
    def id(self) -> bytes:
        return self.entry.id

    @property
    def kind(self) -> str:
        return self.event["kind"]

    @property
    def on_no_claim(self) -> bool:
        return self.record.term == 0 and "claim" not in self.event

    @property
    def begins(self) -> bool:
        """Whether a log begins with this record: it names nothing before it."""
        return self.kind == BEGIN or (self.kind == LEADER and self.event.get("previous") == b"")


def encode_event(type: RecordType, event: Event, author: str, number: int, claim: Claim | None) -> Record:
    """The record of an event, to be stamped with its time. `claim` is None where the state has no leader, and for an
    author's own record."""
    standing = {} if claim is None else {"claim": claim.id}
    body = cast(bytes, msgpack.packb({"v": FIRST_LEVEL, **event, **standing}))
    return Record(type, term=0 if claim is None else claim.term, producer=author, pseq=number, body=body)


def claim_event(node: str, previous: Claim, levels: FeatureLevels = LEVELS) -> Event:
    """The event by which a node of these levels claims leadership after `previous`."""
    beginning: Event = {} if previous.id else beginning_level(levels)
    return {"kind": LEADER, "node": node, "previous": previous.id, **beginning}


def beginning_level(levels: FeatureLevels) -> Event:
    """The field by which the record that begins a log says at which level that is: the lowest that its author knows."""
    return {} if levels.lowest == FIRST_LEVEL else {"level": levels.lowest}


def decode_event(record: Record) -> Event:
    """The event in a record, of any feature level. Raises `BadRecord`."""
    try:
        event = cast("dict[str, Any]", typed(cast(object, msgpack.unpackb(record.body, strict_map_key=False)), dict))
        typed(event["v"], int)
        typed(event.get("claim", b""), bytes)
        if not typed(event["kind"], str):
            raise ValueError("an event without a kind")
    except (*DECODE_ERRORS, LookupError) as error:
        raise BadRecord(f"unreadable record of a replicated state: {error}", reason="body") from error
    return event


def decode_entry(entry: Entry, type: RecordType) -> Proposed:
    """The record in an entry. Raises `BadRecord` for what is none of `type`."""
    record = decode(entry.payload, entry.id)
    if record.type is not type:
        raise BadRecord(f"a record of type {record.type.name} in a log of type {type.name}", reason="type")
    return Proposed(entry, record, decode_event(record))


def typed(value: object, kind: type[Typed]) -> Typed:
    """`value`, which must be of that very type. Raises `ValueError`."""
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return cast(Typed, value)


def apply_by_kind(state: object, event: Event, name: str) -> None:
    """Call the method of `state` for the kind of `event`, `_on_KIND`; `name` is that of the state. Raises `BadRecord`
    for a kind without a method and for a malformed event, and what the method raises."""
    kind = event["kind"]
    handler = getattr(state, f"_on_{kind}", None)
    if handler is None:
        raise unknown_kind(name, kind)
    try:
        handler(event)
    except (*DECODE_ERRORS, LookupError, AttributeError, InvalidSchema) as error:
        raise BadRecord(f"malformed {name} record {kind!r}: {error!r}", reason="body") from error


def unknown_kind(name: str, kind: str) -> BadRecord:
    """The error of a record whose kind no version has at the level of the log; `name` is that of the state."""
    return BadRecord(f"the {name} has a record {kind!r}, which is none of its feature level", reason="kind")


# ---- pages of snapshots ---------------------------------------------------------------------------------------------


def pages_of(snapshot: bytes, as_of: bytes, level: int) -> Sequence[Event]:
    """The events that hold a snapshot, each small enough for one message."""
    parts = [snapshot[at : at + PAGE_BYTES] for at in range(0, len(snapshot), PAGE_BYTES)]
    common = {"v": level, "kind": PAGE, "as_of": as_of, "of": len(parts), "digest": _digest(snapshot)}
    return [{**common, "page": number, "data": part} for number, part in enumerate(parts)]


class PageCollector:
    """Puts the pages of snapshots together; one without all its pages is none. Of several snapshots it keeps the one
    as of the latest record."""

    def __init__(self) -> None:
        self.as_of: bytes = b""
        self.level: int = FIRST_LEVEL  # of the snapshot
        self.snapshot: bytes | None = None
        self._parts: dict[tuple[bytes, int, bytes, int], dict[int, bytes]] = {}

    def add(self, event: Event) -> None:
        """Take a page. Raises `BadRecord` for a malformed one."""
        try:
            as_of, of, digest = typed(event["as_of"], bytes), typed(event["of"], int), typed(event["digest"], bytes)
            number, data = typed(event["page"], int), typed(event["data"], bytes)
            if not 0 <= number < of:
                raise ValueError(f"page {number} of {of}")
        except (ValueError, LookupError) as error:
            raise BadRecord(f"malformed page of a snapshot: {error!r}", reason="body") from error
        key = as_of, of, digest, event["v"]
        parts = self._parts.setdefault(key, {})
        parts[number] = data
        if as_of < self.as_of or len(parts) < of:
            return
        del self._parts[key]
        snapshot = b"".join(parts[number] for number in range(of))
        if _digest(snapshot) == digest:
            self.as_of, self.level, self.snapshot = as_of, event["v"], snapshot


def _digest(snapshot: bytes) -> bytes:
    return xxhash.xxh3_64_digest(snapshot)
