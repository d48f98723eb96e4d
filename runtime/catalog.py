"""The catalog: what exists, and who owns what, folded from the records of the `collection_schema` channel.

Whoever reads that channel to its end knows the same state. A record is a msgpack map with a version `v`, a `kind` and
the fields below; the record header's term is the leader's, and what a deposed leader still writes does not count.

    leader    node, previous            a claim: it wins only if `previous` is the id of the last winning claim
    create    collection                a collection begins to exist (its channels may not know yet)
    ready     id                        every channel of the collection knows
    drop      id                        the collection stops to exist
    dropped   id                        every channel knows, its tables may be removed
    grant     node, channels, limit     pchannels (name -> term) belong to a node; it may stamp up to `limit`
    fenced    channels                  the fences (name -> message id) of the last grants stand in the log
    lease     node, limit, checkpoints  a longer limit; where the next owner must read from (name -> message id);
                                        with `released` the node owns nothing any more, and used none above `limit`
    snapshot  state                     everything, so that what lies before may be removed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgpack

from .errors import BadRecord, CollectionNotFound, InvalidSchema
from .record import DECODE_ERRORS, Record, RecordType
from .schema import CollectionSchema

VERSION = 1
CREATING, READY, DROPPING = "creating", "ready", "dropping"

Event = Mapping[str, Any]


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
        """A msgpack-able picture."""
        return {
            "id": self.id,
            "schema": self.schema.to_wire(),
            "vchannels": list(self.vchannels),
            "created_ts": self.created_ts,
            "state": self.state,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Collection:
        """The collection that `to_wire` pictured."""
        schema = CollectionSchema.from_wire(wire["schema"])
        return cls(wire["id"], schema, tuple(wire["vchannels"]), wire["created_ts"], wire["state"])


@dataclass(slots=True)
class ChannelState:
    """Who owns a pchannel. Timestamps above `limit` were never given out in it; `previous_limit` is that of the terms
    before."""

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
        self.leader = ""
        self.leader_id = b""
        self.next_id = 1
        self.collections: dict[str, Collection] = {}
        self.channels: dict[str, ChannelState] = {}

    def apply(self, record: Record) -> bool:
        """Fold one record in; False when it does not count. Raises `BadRecord` for one that cannot be read."""
        if record.type is not RecordType.CATALOG:
            return False
        event = decode_event(record)
        kind = event["kind"]
        if kind == "leader":
            return self._claim(record, event)
        if kind == "snapshot" and self.term == 0:
            self.term = record.term  # the log before it is gone, the claim included
        if record.term != self.term:
            return False
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None:
            raise BadRecord(f"unknown catalog record {kind!r}: a newer Tidewal wrote it", reason="kind")
        try:
            handler(event)
        except (*DECODE_ERRORS, LookupError, AttributeError, InvalidSchema) as error:
            raise BadRecord(f"malformed catalog record {kind!r}: {error!r}", reason="body") from error
        return True

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
        """The known fences of `pchannels`, for readers."""
        return {name: dict(self.channels[name].fences) for name in pchannels if name in self.channels}

    def snapshot(self) -> dict[str, Any]:
        """The event that tells all of this state."""
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
        if event.get("previous") != self.leader_id or record.term <= self.term:
            return False
        self.leader, self.leader_id, self.term = event["node"], record.id, record.term
        return True

    def _on_create(self, event: Event) -> None:
        collection = Collection.from_wire(event["collection"])
        self.collections[collection.name] = collection
        self.next_id = max(self.next_id, collection.id + 1)

    def _on_ready(self, event: Event) -> None:
        self._become(event, READY)

    def _on_drop(self, event: Event) -> None:
        self._become(event, DROPPING)

    def _on_dropped(self, event: Event) -> None:
        found = self.by_id(event["id"])
        if found is not None:
            del self.collections[found.name]

    def _become(self, event: Event, state: str) -> None:
        found = self.by_id(event["id"])
        if found is not None:
            self.collections[found.name] = replace(found, state=state)

    def _on_grant(self, event: Event) -> None:
        for name, term in event["channels"].items():
            channel = self.channels.setdefault(name, ChannelState())
            channel.previous_limit = max(channel.previous_limit, channel.limit)
            channel.owner, channel.term, channel.limit = event["node"], term, event["limit"]

    def _on_fenced(self, event: Event) -> None:
        for name, id in event["channels"].items():
            channel = self.channels[name]
            channel.fences[channel.term] = id

    def _on_lease(self, event: Event) -> None:
        for name, channel in self.channels.items():
            if channel.owner == event["node"]:
                channel.limit = event["limit"]
                channel.checkpoint = event["checkpoints"].get(name) or channel.checkpoint
                if event.get("released"):
                    channel.owner = ""

    def _on_snapshot(self, event: Event) -> None:
        state = event["state"]
        self.leader, self.leader_id, self.next_id = state["leader"], state["leader_id"], state["next_id"]
        self.collections = {wire["schema"]["name"]: Collection.from_wire(wire) for wire in state["collections"]}
        self.channels = {
            name: ChannelState(owner, term, limit, previous, checkpoint, dict(fences))
            for name, (owner, term, limit, previous, checkpoint, fences) in state["channels"].items()
        }


def encode_event(term: int, event: Event) -> Record:
    """The record of one event, to be stamped with the leader's `term`."""
    return Record(RecordType.CATALOG, term=term, body=cast(bytes, msgpack.packb({"v": VERSION, **event})))


def decode_event(record: Record) -> Event:
    """The event in a catalog record. Raises `BadRecord`."""
    try:
        event = cast("dict[str, Any]", msgpack.unpackb(record.body, strict_map_key=False))
        if event["v"] != VERSION or not event["kind"]:
            raise ValueError(f"version {event['v']}, this Tidewal reads {VERSION}")
    except (*DECODE_ERRORS, LookupError) as error:
        raise BadRecord(f"unreadable catalog record: {error}", reason="body") from error
    return event
