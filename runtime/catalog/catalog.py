"""The catalog: the collections and the owners of the pchannels, folded from the records of the `collection_schema`
channel.

All readers that have read that channel to its end have the same state. A record is a msgpack map with a version `v`, a
`kind` and the fields below; the record header's term is the leader's, and what a superseded leader still writes does
not count. The header's cseq numbers the events of a term: one that lands behind a later one, after an outcome that was
unknown, does not count either. Every reader skips what cannot be read. An event of a later version or of an unknown
kind, or with a schema of a later version, stops every reader: `FormatTooNew`.

    leader    node, previous            a claim of leadership: it wins only if `previous` is the id of the last winning
                                        claim
    create    collection                a collection begins to exist (its channels may not have the record yet)
    ready     id                        every channel of the collection has the record
    drop      id                        the collection stops to exist
    dropped   id                        every channel has the record, its tables may be removed
    grant     node, channels, limit     pchannels (name -> term) belong to a node; it may stamp up to `limit`
    fenced    channels                  the fences (name -> message id) of the last grants are in the log
    lease     node, limit, checkpoints  a longer limit; where the next owner must read from (name -> message id);
                                        with `released` the node owns nothing any more, and used none above `limit`
    snapshot  state                     the whole state, so that the records before it may be removed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgpack

from ..errors import BadRecord, CollectionNotFound, FormatTooNew, InvalidSchema, check_version
from ..log.record import DECODE_ERRORS, Record, RecordType, decode
from ..log.wal import Entry
from ..rows.schema import CollectionSchema
from ..streams.channel_reader import Granted

VERSION = 1
CREATING, READY, DROPPING = "creating", "ready", "dropping"

Event = Mapping[str, Any]
Typed = TypeVar("Typed")


@dataclass(frozen=True, slots=True)
class Collection:
    """One collection. `vchannels` in the order of the shards; `created_ts` is when it began to exist."""

    id: int
    schema: CollectionSchema
    vchannels: tuple[str, ...]
    created_ts: int
    state: str = CREATING

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def shards(self) -> int:
        return len(self.vchannels)

    def to_wire(self) -> dict[str, Any]:
        """The wire form: a map that msgpack can encode."""
        return {
            "id": self.id,
            "schema": self.schema.to_wire(),
            "vchannels": list(self.vchannels),
            "created_ts": self.created_ts,
            "state": self.state,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Collection:
        """The collection of a wire form that `to_wire` returned. Raises `ValueError`, `LookupError`, `BadRecord` or
        `InvalidSchema` for a malformed one, `FormatTooNew` where its schema is a newer Tidewal's."""
        if wire["state"] not in (CREATING, READY, DROPPING):
            raise ValueError(f"a collection that is {wire['state']!r}")
        return cls(
            _typed(wire["id"], int),
            CollectionSchema.from_wire(wire["schema"]),
            tuple(_typed(name, str) for name in wire["vchannels"]),
            _typed(wire["created_ts"], int),
            wire["state"],
        )


@dataclass(slots=True)
class PChannelState:
    """The ownership of a pchannel. Timestamps above `limit` were never given out in it; `previous_limit` is the limit
    of the terms before."""

    owner: str = ""
    term: int = 0
    limit: int = 0
    previous_limit: int = 0
    checkpoint: bytes = b""
    fences: dict[int, bytes] = field(default_factory=dict[int, bytes])


class Catalog:
    """The state after the records applied so far. `leader_id` names the record of the last winning claim."""

    def __init__(self) -> None:
        self.term = 0
        self.cseq = 0  # of the term's last event
        self.leader = ""
        self.leader_id = b""
        self.next_id = 1
        self.collections: dict[str, Collection] = {}
        self.channels: dict[str, PChannelState] = {}

    def fold(self, entry: Entry, on_bad: Callable[[BadRecord], None] | None = None) -> Record | None:
        """Fold in an entry of the channel. Returns its record if that counts. The error of an entry that cannot be read
        is given to `on_bad`, and the entry is skipped. Raises `FormatTooNew`, as `apply` does."""
        try:
            record = decode(entry.payload, entry.id)
            if record.type is not RecordType.CATALOG:
                raise BadRecord(f"a record of type {record.type.name} in the catalog", reason="type")
            return record if self.apply(record) else None
        except BadRecord as error:
            if on_bad is not None:
                on_bad(error)
            return None

    def apply(self, record: Record) -> bool:
        """Fold one record in; False when it does not count. Raises `BadRecord` for one that cannot be read, and
        `FormatTooNew` for an event that counts, or may count, and that only a newer Tidewal knows (its version, its
        kind or the version of its schema); nothing has changed then."""
        if record.type is not RecordType.CATALOG:
            return False
        event = decode_event(record)
        kind = event["kind"]
        if not self._may_count(record, kind):
            return False
        check_version(f"the catalog has an event {kind!r}", event["v"], VERSION)
        if kind == "leader":
            return self._claim(record, event)
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None:
            raise FormatTooNew(
                f"the catalog has an event {kind!r}, which this Tidewal does not know: upgrade", supported=VERSION
            )
        try:
            handler(event)
        except (*DECODE_ERRORS, LookupError, AttributeError, InvalidSchema) as error:
            raise BadRecord(f"malformed catalog record {kind!r}: {error!r}", reason="body") from error
        self.term, self.cseq = record.term, record.cseq
        return True

    def _may_count(self, record: Record, kind: str) -> bool:
        if kind == "leader":
            return record.term > self.term
        if kind == "snapshot" and self.term == 0:  # the log before it was removed, the claim included
            return True
        return record.term == self.term and record.cseq > self.cseq

    def collection(self, name: str) -> Collection:
        """The collection of that name, if it is ready. Raises `CollectionNotFound`."""
        found = self.collections.get(name)
        if found is None or found.state != READY:
            raise CollectionNotFound(f"no collection {name!r}; create it first, or check the name", collection=name)
        return found

    def by_id(self, id: int) -> Collection | None:
        """The collection of that id, in whatever state."""
        return next((found for found in self.collections.values() if found.id == id), None)

    def fences(self, pchannels: list[str]) -> dict[str, dict[int, bytes]]:
        """The known fences of `pchannels`, by term, for readers."""
        return {name: dict(self.channels[name].fences) for name in pchannels if name in self.channels}

    def granted(self, pchannel: str) -> Granted:
        """The grants of `pchannel` so far."""
        state = self.channels.get(pchannel)
        return (
            Granted(0, 0)
            if state is None
            else Granted(state.term, max(state.limit, state.previous_limit), state.fences)
        )

    def snapshot(self) -> dict[str, Any]:
        """The event that holds all of this state."""
        channels = {
            name: (state.owner, state.term, state.limit, state.previous_limit, state.checkpoint, state.fences)
            for name, state in self.channels.items()
        }
        state = {
            "leader": self.leader,
            "leader_id": self.leader_id,
            "next_id": self.next_id,
            "collections": [collection.to_wire() for collection in self.collections.values()],
            "channels": channels,
        }
        return {"kind": "snapshot", "state": state}

    # ---- one method per kind ----------------------------------------------------------------------------------------

    def _claim(self, record: Record, event: Event) -> bool:
        node = event.get("node")
        if event.get("previous") != self.leader_id or record.term != self.term + 1 or not isinstance(node, str):
            return False
        self.leader, self.leader_id, self.term, self.cseq = node, record.id, record.term, record.cseq
        return True

    def _on_create(self, event: Event) -> None:
        collection = Collection.from_wire(event["collection"])
        self.collections[collection.name] = collection
        self.next_id = max(self.next_id, collection.id + 1)

    def _on_ready(self, event: Event) -> None:
        self._set_state(event, READY)

    def _on_drop(self, event: Event) -> None:
        self._set_state(event, DROPPING)

    def _on_dropped(self, event: Event) -> None:
        found = self.by_id(event["id"])
        if found is not None:
            del self.collections[found.name]

    def _set_state(self, event: Event, state: str) -> None:
        found = self.by_id(event["id"])
        if found is not None:
            self.collections[found.name] = replace(found, state=state)

    def _on_grant(self, event: Event) -> None:
        node, limit = _typed(event["node"], str), _typed(event["limit"], int)
        for name, term in _mapping(event["channels"], int).items():
            channel = self.channels.setdefault(name, PChannelState())
            channel.previous_limit = max(channel.previous_limit, channel.limit)
            channel.owner, channel.term, channel.limit = node, term, limit

    def _on_fenced(self, event: Event) -> None:
        fences = _mapping(event["channels"], bytes)
        for channel, id in [(self.channels[name], id) for name, id in fences.items()]:
            channel.fences[channel.term] = id

    def _on_lease(self, event: Event) -> None:
        node, limit = _typed(event["node"], str), _typed(event["limit"], int)
        checkpoints = _mapping(event["checkpoints"], bytes)
        for name, channel in self.channels.items():
            if channel.owner == node:
                channel.limit = limit
                channel.checkpoint = checkpoints.get(name) or channel.checkpoint
                if event.get("released"):
                    channel.owner = ""

    def _on_snapshot(self, event: Event) -> None:
        state = event["state"]
        leader, leader_id, next_id = (
            _typed(state["leader"], str),
            _typed(state["leader_id"], bytes),
            _typed(state["next_id"], int),
        )
        collections = [Collection.from_wire(wire) for wire in state["collections"]]
        channels = {
            name: PChannelState(
                owner, _typed(term, int), _typed(limit, int), _typed(previous, int), checkpoint, dict(fences)
            )
            for name, (owner, term, limit, previous, checkpoint, fences) in state["channels"].items()
        }
        self.leader, self.leader_id, self.next_id, self.channels = leader, leader_id, next_id, channels
        self.collections = {collection.name: collection for collection in collections}


def _typed(value: object, kind: type[Typed]) -> Typed:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return cast(Typed, value)


def _mapping(value: object, kind: type[Typed]) -> dict[str, Typed]:
    entries = cast("dict[object, object]", _typed(value, dict))
    return {_typed(name, str): _typed(each, kind) for name, each in entries.items()}


def encode_event(term: int, event: Event) -> Record:
    """The record of one event, to be stamped with the leader's `term`."""
    return Record(RecordType.CATALOG, term=term, body=cast(bytes, msgpack.packb({"v": VERSION, **event})))


def decode_event(record: Record) -> Event:
    """The event in a catalog record, of any version. Raises `BadRecord`."""
    try:
        event = cast("dict[str, Any]", _typed(cast(object, msgpack.unpackb(record.body, strict_map_key=False)), dict))
        _typed(event["v"], int)
        if not _typed(event["kind"], str):
            raise ValueError("an event without a kind")
    except (*DECODE_ERRORS, LookupError) as error:
        raise BadRecord(f"unreadable catalog record: {error}", reason="body") from error
    return event
