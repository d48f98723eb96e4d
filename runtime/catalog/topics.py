"""The topics of a catalog: what there is to send messages to, and where these lie.

A topic is a list of epochs, and an epoch a list of partitions: a message with a key goes to partition number
`hash % partitions` of the last epoch. Each partition has a pchannel of its own, on which nothing else lies, so
retention, ownership and pressure are the partition's; its messages name its vchannel, which is never used again. Topics
and collections count their ids together, and may have the same names.

Their events (feature level 2):

    create_topic   topic    a topic begins to exist; its channels may not be there yet: none has its name, and neither a
                            topic nor a collection had its id
    topic_ready    id       its channels are there, and are granted to owners from now on
    drop_topic     id       it takes no more messages: its owners give its channels up, and none gets them
    topic_dropped  id       its channels are removed, and its name is free. No node owns one of them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidRequest, PreconditionFailed, TopicNotFound
from ..log.names import pchannel_of
from ..log.wal import ChannelPolicy
from ..nearest import nearest
from ..replicated.records import typed

CREATING, READY, DROPPING = "creating", "ready", "dropping"
TOPICS_LEVEL = 2  # the feature level from which there are topics
RETENTION_S = ChannelPolicy().retention_s

_name_rule = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. Each of its `epochs` lists the vchannels of its partitions in their order; the last one takes
    messages. `retention_s` and `retention_bytes` are those of each partition's channel (`ChannelPolicy`; None keeps
    everything); `created_ts` is when it began to exist."""

    id: int
    name: str
    epochs: tuple[tuple[str, ...], ...]
    created_ts: int
    state: str = CREATING
    retention_s: float | None = RETENTION_S
    retention_bytes: int | None = None

    @property
    def epoch(self) -> int:
        """The number of the epoch that takes messages."""
        return len(self.epochs)

    @property
    def partitions(self) -> tuple[str, ...]:
        """The vchannels of the partitions that take messages, in their order."""
        return self.epochs[-1]

    @property
    def pchannels(self) -> tuple[str, ...]:
        """The pchannels of all its partitions, in the order in which these were made."""
        return tuple(dict.fromkeys(pchannel_of(vchannel) for epoch in self.epochs for vchannel in epoch))

    @property
    def policy(self) -> ChannelPolicy:
        """The policy of its pchannels."""
        return ChannelPolicy(retention_s=self.retention_s, retention_bytes=self.retention_bytes)

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
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Topic:
        """The topic of a wire form that `to_wire` returned. Raises `ValueError` or `LookupError` for a malformed
        one."""
        if wire["state"] not in (CREATING, READY, DROPPING):
            raise ValueError(f"a topic that is {wire['state']!r}")
        epochs = tuple(tuple(typed(name, str) for name in epoch) for epoch in wire["epochs"])
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
        )


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
        self._by_name = {topic.name: topic for topic in topics}
        self._of_channel = {channel: topic.name for topic in topics for channel in topic.pchannels}
        self.changes: int = 0

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
        """The topic that has a partition on `pchannel`."""
        name = self._of_channel.get(pchannel)
        return None if name is None else self._by_name[name]

    @property
    def to_be_owned(self) -> frozenset[str]:
        """The pchannels that are to have an owner."""
        return frozenset(channel for topic in self if topic.state == READY for channel in topic.pchannels)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        """A topic begins to exist. Raises `PreconditionFailed` where its name is taken."""
        if topic.name in self._by_name:
            raise PreconditionFailed(f"there is a topic {topic.name} by now")
        self._by_name[topic.name] = topic
        self._of_channel.update(dict.fromkeys(topic.pchannels, topic.name))
        self.changes += 1

    def set_state(self, id: int, state: str) -> None:
        """Raises `PreconditionFailed` where the topic is gone."""
        topic = self.present(id)
        self._by_name[topic.name] = replace(topic, state=state)
        self.changes += 1

    def remove(self, id: int) -> Topic:
        """The topic is gone. Raises `PreconditionFailed` where it was before."""
        topic = self.present(id)
        del self._by_name[topic.name]
        for channel in topic.pchannels:
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
