"""The topics of a catalog: what there is to send messages to, and where these lie.

A topic is a list of epochs, and an epoch a list of partitions: a message with a key goes to partition number
`hash % partitions` of the last epoch. Each partition has a pchannel of its own, on which nothing else lies, so
retention, ownership and pressure are the partition's; its messages name its vchannel, which is never used again. Topics
and collections count their ids together, and may have the same names.

A topic that gets another number of partitions gets an epoch, whose channels are all new. From `epoch_ready` on the
owners of the epoch before take no message; each writes EPOCH_END behind the last one. A partition of the new epoch
takes messages once each of its predecessors has ended and its owner has written EPOCH_BEGIN, which names these ends. So
per key all messages of an epoch lie before all of the next, in the log and in time.

Their events (feature level 2):

    create_topic   topic    a topic begins to exist; its channels may not be there yet: none has its name, and neither a
                            topic nor a collection had its id
    topic_ready    id       its channels are there, and are granted to owners from now on
    delay_topic    id       it takes messages that are due later from now on: each partition of its last epoch, which
                            has begun, and of those to come has a delay channel, which is there, and which the owner
                            of the partition gets, too
    drop_topic     id       it takes no more messages: its owners give its channels up, and none gets them
    topic_dropped  id       its channels are removed, and its name is free. No node owns one of them
    alter_topic    id, epoch, partitions, hashed   an epoch of that number is to come, with these vchannels; its
                            channels may not be there yet. `hashed`: keys alone decide on partitions
    epoch_ready    id, epoch    its channels are there: it takes messages, and the epoch before takes none
    partition_ended   node, channels   by pchannel the term under which its owner has written EPOCH_END, its id and
                            timestamp; the owner writes this itself
    partition_begun   node, channels   by pchannel the term under which its owner has written EPOCH_BEGIN
    delays_drained   node, channels   by delay channel of a partition that has ended the term under which its owner has
                            released the last message: none comes any more
    retire_epoch   id, epoch    the first epoch goes: its owners give its channels up, and none gets them
    epoch_retired  id, epoch    its channels are removed. No node owns one of them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import InvalidRequest, PreconditionFailed, TopicNotFound
from ..log.names import delay_channel_of, pchannel_of
from ..log.wal import ChannelPolicy
from ..nearest import nearest
from ..replicated.records import typed
from .topic_epochs import PartitionEnd, predecessors

CREATING, READY, DROPPING = "creating", "ready", "dropping"
TOPICS_LEVEL = 2  # the feature level from which there are topics
RETENTION_S = ChannelPolicy().retention_s

_name_rule = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. Each of its `epochs`, of which the first has the number `first_epoch`, lists the vchannels of its
    partitions in their order; the last one takes messages. `retention_s` and `retention_bytes` are those of each
    partition's channel (`ChannelPolicy`; None keeps everything); `created_ts` is when it began to exist.

    `coming` is the epoch to come, while its channels are made. By pchannel, `ends` has the partitions that have ended,
    and `begun` those of later epochs that have begun. In the epochs of the numbers in `unhashed` keys alone do not
    decide on partitions: each follows all of the epoch before. `retiring`: the first epoch is being removed.

    From the epoch `delays_from` on, if that is not 0, each partition has a channel for messages that are due later,
    which no retention takes from. Where the partition ends, what is pending there stays, and is released into
    partitions of later epochs; `drained` are the delay channels that have none left, and get none."""

    id: int
    name: str
    epochs: tuple[tuple[str, ...], ...]
    created_ts: int
    state: str = CREATING
    retention_s: float | None = RETENTION_S
    retention_bytes: int | None = None
    first_epoch: int = 1
    coming: tuple[str, ...] = ()
    ends: Mapping[str, PartitionEnd] = field(default_factory=dict[str, PartitionEnd], hash=False)
    begun: frozenset[str] = frozenset()
    unhashed: frozenset[int] = frozenset()
    retiring: bool = False
    delays_from: int = 0
    drained: frozenset[str] = frozenset()

    @property
    def delays(self) -> bool:
        """Whether it takes messages that are due later."""
        return self.delays_from > 0

    @property
    def epoch(self) -> int:
        """The number of the epoch that takes messages."""
        return self.first_epoch + len(self.epochs) - 1

    @property
    def partitions(self) -> tuple[str, ...]:
        """The vchannels of the partitions that take messages, in their order."""
        return self.epochs[-1]

    def partitions_of(self, epoch: int) -> tuple[str, ...]:
        """The vchannels of the epoch of that number, in their order; none where it is not there (any more)."""
        return self.epochs[epoch - self.first_epoch] if self.first_epoch <= epoch <= self.epoch else ()

    @property
    def pchannels(self) -> tuple[str, ...]:
        """The pchannels of all its partitions, in the order in which these were made."""
        epochs = (*self.epochs, self.coming)
        return tuple(dict.fromkeys(pchannel_of(vchannel) for epoch in epochs for vchannel in epoch))

    @property
    def delay_channels(self) -> Mapping[str, str]:
        """Where messages wait that are due later: by pchannel of a partition its delay channel. Of a topic without
        `delays` those of the last epoch, which may be there if it was about to have them."""
        first = self.delays_from or self.epoch
        return {channel: delay_channel_of(channel) for channel, (epoch, _) in self.places.items() if epoch >= first}

    @property
    def pending_epochs(self) -> tuple[int, ...]:
        """The numbers of the epochs that are over, and may have messages yet that are due later."""
        if not self.delays:
            return ()
        left = [name for name, delays in self.delay_channels.items() if delays not in self.drained]
        return tuple(sorted({self.places[name][0] for name in left} - {self.epoch}))

    @property
    def owned_channels(self) -> tuple[str, ...]:
        """The pchannels that are to have an owner while it is ready: those of its partitions, and their delay
        channels."""
        return (*self.pchannels, *self.delay_channels.values()) if self.delays else self.pchannels

    @property
    def policy(self) -> ChannelPolicy:
        """The policy of its pchannels."""
        return ChannelPolicy(retention_s=self.retention_s, retention_bytes=self.retention_bytes)

    @property
    def settled(self) -> bool:
        """Whether no epoch is to come, and all partitions of the last one take messages."""
        return not self.coming and not self.unbegun

    @property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """By pchannel the number of its epoch, and that of its partition in it: in the order of both."""
        return _places(self.first_epoch, self.epochs)

    def predecessors(self, pchannel: str) -> list[str]:
        """The pchannels of the epoch before that are read to their ends before `pchannel` is."""
        if pchannel not in self.places:
            return []
        epoch, number = self.places[pchannel]
        before = [name for name, (other, _) in self.places.items() if other == epoch - 1]
        return predecessors(before, len(self.partitions_of(epoch)), number, hashed=epoch not in self.unhashed)

    @property
    def unbegun(self) -> list[str]:
        """The pchannels of the last epoch that take no messages yet."""
        if self.epoch == 1:
            return []
        return [name for name, (epoch, _) in self.places.items() if epoch == self.epoch and name not in self.begun]

    @property
    def unended(self) -> list[str]:
        """The pchannels of epochs that are over, whose partitions have not ended yet."""
        return [name for name, (epoch, _) in self.places.items() if epoch < self.epoch and name not in self.ends]

    def is_to_go(self, pchannel: str) -> bool:
        """Whether its owner is to give `pchannel` up, because it is removed."""
        return self.state == DROPPING or (self.retiring and pchannel in self.first_channels)

    @property
    def first_channels(self) -> list[str]:
        """The pchannels of the first epoch, which are removed together: of partitions, and their delay channels."""
        first = [name for name, (epoch, _) in self.places.items() if epoch == self.first_epoch]
        delays = self.delay_channels
        return [*first, *(delays[name] for name in first if self.delays and name in delays)]

    def to_wire(self) -> dict[str, Any]:
        """The wire form: a map that msgpack can encode."""
        return {
            "id": self.id,
            "name": self.name,
            "epochs": [list(epoch) for epoch in self.epochs],
            "created_ts": self.created_ts,
            "state": self.state,
            "retention_s": self.retention_s,
            "retention_bytes": self.retention_bytes,
            "first_epoch": self.first_epoch,
            "coming": list(self.coming),
            "ends": {name: list(end) for name, end in self.ends.items()},
            "begun": sorted(self.begun),
            "unhashed": sorted(self.unhashed),
            "retiring": self.retiring,
            "delays_from": self.delays_from,
            "drained": sorted(self.drained),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Topic:
        """The topic of a wire form that `to_wire` returned. Raises `ValueError` or `LookupError` for a malformed
        one."""
        if wire["state"] not in (CREATING, READY, DROPPING):
            raise ValueError(f"a topic that is {wire['state']!r}")
        epochs = tuple(map(_names, wire["epochs"]))
        if not (epochs and all(epochs)):
            raise ValueError("a topic without partitions")
        seconds, size = wire["retention_s"], wire["retention_bytes"]
        return cls(
            typed(wire["id"], int),
            typed(wire["name"], str),
            epochs,
            typed(wire["created_ts"], int),
            wire["state"],
            None if seconds is None else typed(seconds, float),
            None if size is None else typed(size, int),
            typed(wire["first_epoch"], int),
            _names(wire["coming"]),
            {typed(name, str): PartitionEnd.from_wire(end) for name, end in wire["ends"].items()},
            frozenset(_names(wire["begun"])),
            frozenset(typed(number, int) for number in wire["unhashed"]),
            typed(wire["retiring"], bool),
            typed(wire["delays_from"], int),
            frozenset(_names(wire["drained"])),
        )


@lru_cache(maxsize=256)
def _places(first_epoch: int, epochs: tuple[tuple[str, ...], ...]) -> Mapping[str, tuple[int, int]]:
    return {
        pchannel_of(vchannel): (epoch, number)
        for epoch, vchannels in enumerate(epochs, first_epoch)
        for number, vchannel in enumerate(vchannels)
    }


def _names(wire: Sequence[Any]) -> tuple[str, ...]:
    return tuple(typed(name, str) for name in wire)


def check_topic_name(name: str) -> None:
    """Raise `InvalidRequest` for what is no name of a topic."""
    if not _name_rule.fullmatch(name):
        raise InvalidRequest(
            f"topic name {name!r}: use a letter, a digit or _, then at most 248 letters, digits, '.', '_' or '-'",
            argument="name",
        )


class Topics:
    """The topics of a catalog by name, in whatever state. `changes` counts how often they have changed."""

    def __init__(self, topics: Sequence[Topic] = ()) -> None:
        self._by_name: dict[str, Topic] = {}
        self._of_channel: dict[str, str] = {}
        self._unbegun: dict[int, frozenset[str]] = {}  # by topic: pchannels of its last epoch; none is empty
        self.changes: int = 0
        for topic in topics:
            self._put(topic)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Topic | None:
        """The topic of that name, in whatever state."""
        return self._by_name.get(name)

    def ready(self, name: str) -> Topic:
        """The topic of that name, if it is ready. Raises `TopicNotFound`."""
        found = self._by_name.get(name)
        if found is None or found.state != READY:
            near = nearest(name, (each.name for each in self if each.state == READY))
            raise TopicNotFound(f"no topic {name!r}{near or '; create it first'}", topic=name)
        return found

    def by_id(self, id: int) -> Topic | None:
        """The topic of that id, in whatever state."""
        return next((topic for topic in self._by_name.values() if topic.id == id), None)

    def of_channel(self, pchannel: str) -> Topic | None:
        """The topic that has a partition on `pchannel`, or messages for one that are due later."""
        name = self._of_channel.get(pchannel)
        return None if name is None else self._by_name[name]

    @property
    def to_be_owned(self) -> frozenset[str]:
        """The pchannels that are to have an owner."""
        found: set[str] = set()
        for topic in self:
            if topic.state == READY:
                delays = topic.delay_channels.values() if topic.delays else ()
                found.update(name for name in (*topic.places, *delays) if not topic.is_to_go(name))
        return frozenset(found)

    def has_begun(self, pchannel: str) -> bool:
        """Whether `pchannel` takes what it is owned for: not while it is a partition whose predecessors go on."""
        return not any(pchannel in channels for channels in self._unbegun.values())

    @property
    def partition_of(self) -> Mapping[str, str]:
        """The pchannel of the partition of each delay channel that is to have an owner: it is to have the same."""
        ready = (topic for topic in self if topic.delays and topic.state == READY)
        return {delays: channel for topic in ready for channel, delays in topic.delay_channels.items()}

    # ---- changes ----------------------------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        """A topic begins to exist. Raises `PreconditionFailed` where its name is taken."""
        if topic.name in self._by_name:
            raise PreconditionFailed(f"there is a topic {topic.name} by now")
        self._put(topic)

    def begin_delays(self, id: int) -> None:
        """The topic takes messages that are due later. Raises `PreconditionFailed` where it is not ready, or an epoch
        of it has not begun."""
        topic = self.present(id)
        if topic.state != READY or not topic.settled:
            raise PreconditionFailed(
                f"topic {topic.name} is {topic.state} in epoch {topic.epoch}: it has no delays now"
            )
        self._put(replace(topic, delays_from=topic.epoch))

    def set_state(self, id: int, state: str) -> None:
        """Raises `PreconditionFailed` where the topic is gone."""
        self._put(replace(self.present(id), state=state))

    def alter(self, id: int, epoch: int, partitions: Sequence[str], *, hashed: bool) -> None:
        """An epoch is to come. Raises `PreconditionFailed` where the topic is gone, is dropped, or has it already."""
        topic = self.present(id)
        if topic.state != READY or topic.coming or topic.epoch + 1 != epoch or not partitions:
            raise PreconditionFailed(f"topic {topic.name} is {topic.state} in epoch {topic.epoch}: it gets no {epoch}")
        self._put(
            replace(topic, coming=tuple(partitions), unhashed=topic.unhashed | ({epoch} if not hashed else set()))
        )

    def begin_epoch(self, id: int, epoch: int) -> None:
        """The epoch that was to come takes messages. Raises `PreconditionFailed` where it does not come, or has."""
        topic = self.present(id)
        if topic.state != READY or not topic.coming or topic.epoch + 1 != epoch:
            raise PreconditionFailed(
                f"topic {topic.name} is {topic.state} in epoch {topic.epoch}: {epoch} does not come"
            )
        self._put(replace(topic, epochs=(*topic.epochs, topic.coming), coming=()))

    def end_partition(self, pchannel: str, end: PartitionEnd) -> None:
        """A partition has ended; the first end counts."""
        topic = self.of_channel(pchannel)
        if topic is not None and pchannel not in topic.ends:
            self._put(replace(topic, ends={**topic.ends, pchannel: end}))

    def begin_partition(self, pchannel: str) -> None:
        """A partition has begun."""
        topic = self.of_channel(pchannel)
        if topic is not None:
            self._put(replace(topic, begun=topic.begun | {pchannel}))

    def drain(self, delay_channel: str) -> None:
        """A delay channel of an epoch that is over has nothing pending any more."""
        topic = self.of_channel(delay_channel)
        if topic is not None and delay_channel not in topic.places:
            self._put(replace(topic, drained=topic.drained | {delay_channel}))

    def retire_epoch(self, id: int, epoch: int) -> None:
        """The first epoch goes. Raises `PreconditionFailed` where it is not the first, or the only one."""
        topic = self.present(id)
        if topic.first_epoch != epoch or len(topic.epochs) == 1:
            raise PreconditionFailed(f"epoch {epoch} of topic {topic.name} does not go now")
        self._put(replace(topic, retiring=True))

    def remove_epoch(self, id: int, epoch: int) -> Sequence[str]:
        """The first epoch is gone; returns its pchannels. Raises `PreconditionFailed` where it was not to go."""
        topic = self.present(id)
        if topic.first_epoch != epoch or not topic.retiring:
            raise PreconditionFailed(f"epoch {epoch} of topic {topic.name} does not go")
        gone = topic.first_channels
        ends = {name: end for name, end in topic.ends.items() if name not in gone}
        self._put(
            replace(
                topic,
                epochs=topic.epochs[1:],
                first_epoch=epoch + 1,
                ends=ends,
                begun=topic.begun.difference(gone),
                drained=topic.drained.difference(gone),
                retiring=False,
            )
        )
        for channel in gone:
            del self._of_channel[channel]
        return gone

    def _put(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._of_channel.update(dict.fromkeys(topic.owned_channels, topic.name))
        if topic.unbegun:
            self._unbegun[topic.id] = frozenset(topic.unbegun)
        else:
            self._unbegun.pop(topic.id, None)
        self.changes += 1

    def remove(self, id: int) -> Topic:
        """The topic is gone. Raises `PreconditionFailed` where it was before."""
        topic = self.present(id)
        del self._by_name[topic.name]
        self._unbegun.pop(topic.id, None)
        for channel in topic.owned_channels:
            del self._of_channel[channel]
        self.changes += 1
        return topic

    def present(self, id: int) -> Topic:
        """The topic of that id. Raises `PreconditionFailed` where there is none any more."""
        found = self.by_id(id)
        if found is None:
            raise PreconditionFailed(f"there is no topic with id {id} any more")
        return found

    def to_wire(self) -> list[dict[str, Any]]:
        """The topics as msgpack has them."""
        return [topic.to_wire() for topic in self]
