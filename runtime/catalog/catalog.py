"""The catalog: the collections, the topics and the owners of the pchannels, folded from the records of the
`collection_schema` channel.

All readers that have read that channel to its end have the same state. Its records are those of a replicated state with
a leader (`runtime/replicated/records.py`), of these kinds. Each names what it rests on; where that does not hold any
more it is refused, and changes nothing. So is one of an unknown kind, or above the log's feature level. A schema of a
later version, which should have waited for a level, stops every reader: `FormatTooNew`.

    create    collection                a collection begins to exist (its channels may not have the record yet): none
                                        has its name, and no earlier one had its id
    ready     id, beginning             every channel of the collection has the record; `beginning`: a time and, by
                                        pchannel, the term, the cseq and the id of the last record at or before it. All
                                        rows lie behind these. (An earlier Tidewal did not say it.)
    load      id, replicas              so many QueryNodes are to have each of its vchannels from now on; 0 for none
    drop      id                        the collection stops to exist
    dropped   id                        every channel has the record, its tables may be removed
    grant     node, channels, limit     pchannels (name -> term and the one before) belong to a node; it may stamp up to
                                        `limit`
    fenced    channels                  the fences (name -> term and message id) of the present grants are in the log
    move      channels, at_ms           the owners of pchannels are to give them up for other nodes (name -> term and
                                        node; "" takes that back); decided at this wall-clock time of the leader
    released  channels, rising          their owner gives pchannels (name -> its term, limit and checkpoint) up: it used
                                        no timestamp above the limit; the next owner must read from the checkpoint, or,
                                        where that is empty, from the last one. With `rising` the leader gives them up
                                        for an owner that has ended, whose limit had risen so far
    renewed   channels, rising          a longer limit for pchannels, and where the next owner must read from (as
                                        above). With `rising`, a `RisingLimit`, their owner does not use it at once
    place     wishes                    what operators want of the assignment from now on (`PlacementWishes`)
    lease     node, limit, checkpoints  a longer limit; where the next owner must read from (name -> message id);
                                        with `released` the node owns nothing any more, and used none above `limit`

and from feature level 2 on those of topics (`topics.py`).

`fenced`, `released`, `renewed`, `partition_ended` and `partition_begun` a node may write itself (`NODE_KINDS`), without
the leader. Then `node` names it, and it must own the channels: what such a record rests on is its grant, and that is in
this log. Every grant has another term, so a record of one that has passed is refused wherever it lands, whichever
leaders have come meanwhile.

A term that has no fence here never took appends: its owner waits to read its own `fenced`. So the next owner need not
pass its limit, and owners that fail one after another carry no clock ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..errors import BadRecord, CollectionNotFound, PreconditionFailed
from ..log.names import pchannel_of
from ..log.record import RecordType
from ..log.wal import Entry
from ..nearest import nearest
from ..replicated.fold import Fold
from ..replicated.records import Event, apply_by_kind, typed
from ..rows.schema import CollectionSchema
from ..streams.channel_reader import Granted
from .placement_wishes import PlacementWishes
from .rising_limit import RisingLimit
from .topic_epochs import PartitionEnd
from .topics import DROPPING as TOPIC_DROPPING
from .topics import READY as TOPIC_READY
from .topics import TOPICS_LEVEL, Topic, Topics

CREATING, READY, DROPPING = "creating", "ready", "dropping"
DEFAULT_REPLICAS = 2
PARTITION_KINDS = frozenset({"partition_ended", "partition_begun", "delays_drained"})
NODE_KINDS = frozenset({"fenced", "released", "renewed"}) | PARTITION_KINDS
TOPIC_KINDS = (
    *("create_topic", "topic_ready", "delay_topic", "drop_topic", "topic_dropped"),
    *("alter_topic", "epoch_ready", "retire_epoch", "epoch_retired"),
    *PARTITION_KINDS,
)


class CollectionBeginning(NamedTuple):
    """Where a collection begins: at `time`, and behind (term, cseq, message id) in each pchannel. All that is its own
    and lies at or before that are the records that it begins to exist."""

    time: int
    ends: Mapping[str, tuple[int, int, bytes]]

    @classmethod
    def from_wire(cls, wire: Any) -> CollectionBeginning | None:
        """The beginning in a wire form, if any. Raises `ValueError` for a malformed one."""
        if wire is None:
            return None
        time, ends = wire
        return cls(
            typed(time, int),
            {
                typed(name, str): (typed(term, int), typed(cseq, int), typed(id, bytes))
                for name, (term, cseq, id) in ends.items()
            },
        )


@dataclass(frozen=True, slots=True)
class Collection:
    """One collection. `vchannels` in the order of the shards; `created_ts` is when it began to exist. Where it is ready
    `beginning` says where its readers begin, unless an earlier Tidewal has created it. So many QueryNodes as `replicas`
    are to have each vchannel in memory, as far as there are as many; 0 where the collection is released."""

    id: int
    schema: CollectionSchema
    vchannels: tuple[str, ...]
    created_ts: int
    state: str = CREATING
    beginning: CollectionBeginning | None = None
    replicas: int = DEFAULT_REPLICAS

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def shards(self) -> int:
        return len(self.vchannels)

    @property
    def holder(self) -> str:
        """The name of the hold on the log for the rows that are not in the collection's table yet. MixCoord sets the
        hold before the first row, each flush moves it on, and the DataNode releases it when the collection is
        dropped."""
        return f"datanode-{self.id}"

    def to_wire(self) -> dict[str, Any]:
        """The wire form: a map that msgpack can encode."""
        return {
            "id": self.id,
            "schema": self.schema.to_wire(),
            "vchannels": list(self.vchannels),
            "created_ts": self.created_ts,
            "state": self.state,
            "beginning": self.beginning,
            "replicas": self.replicas,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Collection:
        """The collection of a wire form that `to_wire` returned. Raises `ValueError`, `LookupError`, `BadRecord` or
        `InvalidSchema` for a malformed one, `FormatTooNew` where its schema is a newer Tidewal's."""
        if wire["state"] not in (CREATING, READY, DROPPING):
            raise ValueError(f"a collection that is {wire['state']!r}")
        return cls(
            typed(wire["id"], int),
            CollectionSchema.from_wire(wire["schema"]),
            tuple(typed(name, str) for name in wire["vchannels"]),
            typed(wire["created_ts"], int),
            wire["state"],
            CollectionBeginning.from_wire(wire.get("beginning")),
            typed(wire.get("replicas", DEFAULT_REPLICAS), int),
        )


@dataclass(slots=True)
class PChannelState:
    """The ownership of a pchannel. Timestamps above `limit` were never given out in it; `previous_limit` is the limit
    of the terms before that took appends. `target` is the node that is to have it next, "" for none: its owner gives it
    up for that one. `moved_ms` is when the last move was decided, 0 for never. `failed_on` is the node that gave the
    channel up last, where it had not got so far that it was open."""

    owner: str = ""
    term: int = 0
    limit: int = 0
    previous_limit: int = 0
    checkpoint: bytes = b""
    fences: dict[int, bytes] = field(default_factory=dict[int, bytes])
    target: str = ""
    moved_ms: int = 0
    failed_on: str = ""

    @property
    def used_limit(self) -> int:
        """What the next owner must pass: no timestamp above it was given out for an append, or promised."""
        return max(self.previous_limit, self.limit if self.term in self.fences else 0)


class Catalog:
    """What collections and topics there are, and who owns which pchannel: a `StateMachine`. `rising` says by pchannel
    how far its owner uses its limit, where it does not at once."""

    own_kinds: ClassVar[Set[str]] = NODE_KINDS
    kind_levels: ClassVar[Mapping[str, int]] = dict.fromkeys(TOPIC_KINDS, TOPICS_LEVEL)

    def __init__(self) -> None:
        self.next_id: int = 1
        self.collections: dict[str, Collection] = {}
        self.collection_changes: int = 0  # how often they have changed
        self.topics: Topics = Topics()
        self.channels: dict[str, PChannelState] = {}
        self.rising: dict[str, RisingLimit] = {}
        self.wishes: PlacementWishes = PlacementWishes()
        self._names: dict[int, str] = {}  # of the collections, by id
        self._shards: Counter[str] = Counter()  # of all collections, by pchannel

    def apply(self, event: Event) -> None:
        """`StateMachine.apply`."""
        apply_by_kind(self, event, "catalog")

    def collection(self, name: str) -> Collection:
        """The collection of that name, if it is ready. Raises `CollectionNotFound`."""
        found = self.collections.get(name)
        if found is None or found.state != READY:
            near = nearest(name, (each.name for each in self.collections.values() if each.state == READY))
            raise CollectionNotFound(f"no collection {name!r}{near or '; create it first'}", collection=name)
        return found

    def by_id(self, id: int) -> Collection | None:
        """The collection of that id, in whatever state."""
        name = self._names.get(id)
        return None if name is None else self.collections[name]

    @property
    def pchannels(self) -> Set[str]:
        """The pchannels that are to have an owner: those that collections have shards on, and those of topics."""
        return frozenset(self._shards) | self.topics.to_be_owned

    @property
    def collection_channels(self) -> Sequence[str]:
        """The pchannels that were ever granted and are no topic's, which cuts are about."""
        return [name for name in self.channels if self.topics.of_channel(name) is None]

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
        """`StateMachine.snapshot`."""
        channels = {name: astuple(state) for name, state in self.channels.items()}
        collections = [collection.to_wire() for collection in self.collections.values()]
        wishes = self.wishes.to_wire()
        return {
            "next_id": self.next_id,
            "collections": collections,
            "channels": channels,
            "rising": dict(self.rising),
            "wishes": wishes,
            **({"topics": self.topics.to_wire()} if len(self.topics) else {}),
        }

    def restore(self, snapshot: Any) -> None:
        """`StateMachine.restore`."""
        next_id = typed(snapshot["next_id"], int)
        collections = [Collection.from_wire(wire) for wire in snapshot["collections"]]
        channels = {
            name: PChannelState(
                owner, typed(term, int), typed(limit, int), typed(previous, int), checkpoint, dict(fences), *moves
            )
            for name, (owner, term, limit, previous, checkpoint, fences, *moves) in snapshot["channels"].items()
        }
        rising = {name: RisingLimit.from_wire(wire) for name, wire in snapshot.get("rising", {}).items()}
        wishes = PlacementWishes.from_wire(snapshot.get("wishes", {}))
        topics = Topics([Topic.from_wire(wire) for wire in snapshot.get("topics", [])])
        self.next_id, self.channels, self.rising, self.wishes = next_id, channels, rising, wishes
        self.collections, self._names, self._shards = {}, {}, Counter()
        topics.changes, self.topics = self.topics.changes + 1, topics
        self.collection_changes += 1
        for collection in collections:
            self._add(collection)

    def _add(self, collection: Collection) -> None:
        self.collections[collection.name] = collection
        self.collection_changes += 1
        self._names[collection.id] = collection.name
        self._shards.update(map(pchannel_of, collection.vchannels))

    # ---- one method per kind ----------------------------------------------------------------------------------------

    def _on_create(self, event: Event) -> None:
        collection = Collection.from_wire(event["collection"])
        if collection.name in self.collections or collection.id < self.next_id:
            raise PreconditionFailed(f"there is a collection {collection.name} by now, or one with id {collection.id}")
        self._add(collection)
        self.next_id = collection.id + 1

    def _on_ready(self, event: Event) -> None:
        beginning = CollectionBeginning.from_wire(event.get("beginning"))
        self._change(event, state=READY, beginning=beginning)

    def _on_load(self, event: Event) -> None:
        self._change(event, replicas=typed(event["replicas"], int))

    def _on_drop(self, event: Event) -> None:
        self._change(event, state=DROPPING)

    def _on_dropped(self, event: Event) -> None:
        dropped = self._present(event)
        del self.collections[dropped.name], self._names[dropped.id]
        self.collection_changes += 1
        self._shards -= Counter(map(pchannel_of, dropped.vchannels))  # keeps what is above 0

    def _change(self, event: Event, **fields: Any) -> None:
        found = self._present(event)
        self.collections[found.name] = replace(found, **fields)
        self.collection_changes += 1

    def _present(self, event: Event) -> Collection:
        found = self.by_id(event["id"])
        if found is None:
            raise PreconditionFailed(f"there is no collection with id {event['id']} any more")
        return found

    def _on_create_topic(self, event: Event) -> None:
        topic = Topic.from_wire(event["topic"])
        if topic.id < self.next_id:
            raise PreconditionFailed(f"there was a topic or a collection with id {topic.id}")
        self.topics.add(topic)
        self.next_id = topic.id + 1

    def _on_topic_ready(self, event: Event) -> None:
        self.topics.set_state(typed(event["id"], int), TOPIC_READY)

    def _on_delay_topic(self, event: Event) -> None:
        self.topics.begin_delays(typed(event["id"], int))

    def _on_drop_topic(self, event: Event) -> None:
        self.topics.set_state(typed(event["id"], int), TOPIC_DROPPING)

    def _on_topic_dropped(self, event: Event) -> None:
        self._forget(self.topics.remove(typed(event["id"], int)).owned_channels)

    def _forget(self, pchannels: Sequence[str]) -> None:
        for channel in pchannels:
            self.channels.pop(channel, None)
            self.rising.pop(channel, None)

    def _on_alter_topic(self, event: Event) -> None:
        partitions = [typed(vchannel, str) for vchannel in event["partitions"]]
        hashed = typed(event["hashed"], bool)
        self.topics.alter(typed(event["id"], int), typed(event["epoch"], int), partitions, hashed=hashed)

    def _on_epoch_ready(self, event: Event) -> None:
        self.topics.begin_epoch(typed(event["id"], int), typed(event["epoch"], int))

    def _on_partition_ended(self, event: Event) -> None:
        ends = {name: (term, PartitionEnd.from_wire(end)) for name, (term, *end) in event["channels"].items()}
        self._check_terms(event, {name: typed(term, int) for name, (term, _) in ends.items()})
        for name, (_, end) in ends.items():
            self.topics.end_partition(name, end)

    def _on_partition_begun(self, event: Event) -> None:
        self._check_terms(event, {name: typed(term, int) for name, (term,) in event["channels"].items()})
        for name in event["channels"]:
            self.topics.begin_partition(name)

    def _on_delays_drained(self, event: Event) -> None:
        self._check_terms(event, {name: typed(term, int) for name, (term,) in event["channels"].items()})
        for name in event["channels"]:
            self.topics.drain(name)

    def _on_retire_epoch(self, event: Event) -> None:
        self.topics.retire_epoch(typed(event["id"], int), typed(event["epoch"], int))

    def _on_epoch_retired(self, event: Event) -> None:
        self._forget(self.topics.remove_epoch(typed(event["id"], int), typed(event["epoch"], int)))

    def _on_grant(self, event: Event) -> None:
        node, limit = typed(event["node"], str), typed(event["limit"], int)
        grants = {
            typed(name, str): (typed(term, int), typed(after, int)) for name, (term, after) in event["channels"].items()
        }
        for name, (term, after) in grants.items():
            present = self.channels[name].term if name in self.channels else 0
            if not present == after < term:
                raise PreconditionFailed(f"{name} has term {present} by now, and cannot have {term} after {after}")
        for name, (term, _) in grants.items():
            channel = self.channels.setdefault(name, PChannelState())
            channel.previous_limit = channel.used_limit
            channel.owner, channel.term, channel.limit, channel.target = node, term, limit, ""
            self.rising.pop(name, None)

    def _on_move(self, event: Event) -> None:
        at_ms = typed(event["at_ms"], int)
        moves = {
            typed(name, str): (typed(term, int), typed(node, str)) for name, (term, node) in event["channels"].items()
        }
        self._check_terms(event, {name: term for name, (term, _) in moves.items()})
        for name, (_, node) in moves.items():
            channel = self.channels[name]
            channel.target, channel.moved_ms = node, at_ms

    def _on_place(self, event: Event) -> None:
        self.wishes = PlacementWishes.from_wire(event["wishes"])

    def _on_fenced(self, event: Event) -> None:
        fences = {name: (typed(term, int), typed(id, bytes)) for name, (term, id) in event["channels"].items()}
        self._check_terms(event, {name: term for name, (term, _) in fences.items()})
        for name, (term, id) in fences.items():
            self.channels[name].fences[term] = id
            self.channels[name].failed_on = ""

    def _on_released(self, event: Event) -> None:
        limits, rising = self._limits(event), _rising_of(event)
        if rising is not None and any(self.rising.get(name) != rising for name in event["channels"]):
            raise PreconditionFailed("the owner has stored another limit by now")
        for channel, limit, checkpoint in limits:
            if channel.term not in channel.fences:
                channel.failed_on = channel.owner
            channel.owner, channel.limit = "", limit
            channel.checkpoint = checkpoint or channel.checkpoint
        self._set_rising(event, None)

    def _on_renewed(self, event: Event) -> None:
        limits, rising = self._limits(event), _rising_of(event)
        for channel, limit, checkpoint in limits:
            channel.limit = max(channel.limit, limit)
            channel.checkpoint = checkpoint or channel.checkpoint
        self._set_rising(event, rising)

    def _set_rising(self, event: Event, rising: RisingLimit | None) -> None:
        for name in event["channels"]:
            self.rising.pop(name, None)
            if rising is not None:
                self.rising[name] = rising

    def _limits(self, event: Event) -> Sequence[tuple[PChannelState, int, bytes]]:
        """The channels of an event, with their limits and checkpoints. Raises as `_check_terms` does."""
        given = {
            name: (typed(term, int), typed(limit, int), typed(checkpoint, bytes))
            for name, (term, limit, checkpoint) in event["channels"].items()
        }
        self._check_terms(event, {name: term for name, (term, _, _) in given.items()})
        return [(self.channels[name], limit, checkpoint) for name, (_, limit, checkpoint) in given.items()]

    def _check_terms(self, event: Event, terms: Mapping[str, int]) -> None:
        """Raise unless these are the present terms of the channels, and, where a node wrote the event itself, its
        own."""
        node = None if "claim" in event else typed(event["node"], str)
        for name, term in terms.items():
            channel = self.channels.get(name)
            if channel is None or channel.term != term:
                present = 0 if channel is None else channel.term
                raise PreconditionFailed(f"{name} has term {present} by now, not {term}")
            if node not in (None, channel.owner):
                raise PreconditionFailed(f"{name} belongs to {channel.owner or 'no node'}, not to {node}")

    def _on_lease(self, event: Event) -> None:
        node, limit = typed(event["node"], str), typed(event["limit"], int)
        checkpoints = {name: typed(id, bytes) for name, id in event["checkpoints"].items()}
        for name, channel in self.channels.items():
            if channel.owner == node:
                self.rising.pop(name, None)
                # that of a grant to an owner behind older limits may be above it, and be used already
                channel.limit = limit if event.get("released") else max(channel.limit, limit)
                channel.checkpoint = checkpoints.get(name) or channel.checkpoint
                if event.get("released"):
                    channel.owner = ""


def _rising_of(event: Event) -> RisingLimit | None:
    return RisingLimit.from_wire(event["rising"]) if "rising" in event else None


def catalog_fold(on_bad: Callable[[Entry, BadRecord], None] | None = None) -> Fold[Catalog]:
    """An empty fold of the catalog's channel. `on_bad` gets the entries that cannot be read."""
    return Fold(Catalog, RecordType.CATALOG, led=True, on_bad=on_bad)
