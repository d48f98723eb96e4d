"""The metadata that members of a group exchange through Kafka, and how their leader assigns the channels.

Kafka passes the metadata of all members to one of them, the leader, and its assignment back to each. An assignment
takes no channel from a member: a channel that is to go to another member stays assigned to its holder, marked as
revoking, until the holder releases it; the holder then joins anew without it, and the next round assigns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.protocol.group import MemberAssignment, ProtocolMetadata

from ....runtime.groups.assignment import assign
from ....runtime.groups.subscriptions import Subscription
from ....runtime.log.wal import From
from ..catalog import KafkaChannel
from ..topics import foreign_channel
from .requests import by_topic

PROTOCOL_TYPE = "consumer"  # Kafka's own tools can show this type
PROTOCOL = "tidewal"
VERSION = 0


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """What a member sends when it joins. `known_to` is the end of the catalog when it first joined: in channels that
    are created later the group begins at the first entry, and so in partitions of foreign topics beyond the number of
    `partitions`, by topic. `turn` makes the metadata differ from the previous one, so
    that Kafka begins a round. Kafka keeps the positions in the `topics` of a member's metadata, however long ago the
    last commit was. `held` are the keys of the channels that the member has."""

    id: str
    channels: Sequence[str]
    start: From
    known_to: int
    topics: Sequence[str]
    held: frozenset[str]
    turn: int
    partitions: Mapping[str, int] = field(default_factory=dict[str, int])

    def encode(self) -> bytes:
        fields = {
            "id": self.id,
            "channels": list(self.channels),
            "start": self.start.value,
            "known_to": self.known_to,
            "held": sorted(self.held),
            "turn": self.turn,
            **({"partitions": dict(self.partitions)} if self.partitions else {}),
        }
        return ProtocolMetadata(VERSION, list(self.topics), json.dumps(fields).encode()).encode()

    @classmethod
    def decode(cls, data: bytes) -> MemberMetadata:
        """Decode the metadata of a member. Raises `ValueError`, `KeyError` for other clients' data."""
        decoded: Any = ProtocolMetadata.decode(data)
        fields = json.loads(decoded.user_data or b"")
        return cls(
            fields["id"],
            fields["channels"],
            From(fields["start"]),
            fields["known_to"],
            decoded.subscription,
            frozenset(fields["held"]),
            fields["turn"],
            fields.get("partitions", {}),
        )


@dataclass(frozen=True, slots=True)
class TopicAssignment:
    """The leader's assignment for one member: channels by their keys, those of them that it has to release, and those
    in which the group begins at the end where it has no position."""

    topics: frozenset[str]
    revoking: frozenset[str] = frozenset()
    from_latest: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        fields = {"wanted_back": sorted(self.revoking), "from_latest": sorted(self.from_latest)}
        assigned = by_topic((key, ()) for key in sorted(self.topics))
        topics = [(topic, [number for (number,) in numbers]) for topic, numbers in assigned]
        return MemberAssignment(VERSION, topics, json.dumps(fields).encode()).encode()

    @classmethod
    def decode(cls, data: bytes, *, foreign: bool = False) -> TopicAssignment:
        """Decode an assignment, of foreign topics or of a log's own; empty data is an empty one. Raises `ValueError`,
        `KeyError` for other clients' data."""
        if not data:
            return cls(frozenset())
        decoded: Any = MemberAssignment.decode(data)
        fields = json.loads(decoded.user_data or b"")
        keys = (
            foreign_channel(topic, number) if foreign else topic
            for topic, numbers in decoded.assignment
            for number in numbers
        )
        return cls(frozenset(keys), frozenset(fields["wanted_back"]), frozenset(fields["from_latest"]))


def assign_topics(
    group: str, members: Mapping[str, MemberMetadata], channels: Sequence[KafkaChannel]
) -> dict[str, TopicAssignment]:
    """Assign the channels to the members that subscribe to them. `members` and the result are by Kafka's member ids."""
    subscriptions = {member: Subscription(metadata.channels) for member, metadata in members.items()}
    subscribers: dict[str, frozenset[str]] = {}
    from_latest: set[str] = set()
    for channel in channels:
        if not channel.policy.ephemeral and channel.queue_of in (None, group):
            subscribed = frozenset(member for member, each in subscriptions.items() if each.takes(channel.name))
            subscribers[channel.key] = subscribed
            if all(_begins_at_end(members[member], channel) for member in subscribed):
                from_latest.add(channel.key)
    holders = {topic: member for member, metadata in sorted(members.items()) for topic in metadata.held}
    targets = assign(subscribers, {topic: holders.get(topic) for topic in subscribers})
    assignments: dict[str, TopicAssignment] = {}
    for member in members:
        kept = {topic for topic, holder in holders.items() if holder == member and topic in subscribers}
        targeted = {topic for topic, target in targets.items() if target == member}
        free = {topic for topic in targeted if topic not in holders}
        topics = frozenset(kept | free)
        assignments[member] = TopicAssignment(topics, frozenset(kept - targeted), topics & from_latest)
    return assignments


def _begins_at_end(metadata: MemberMetadata, channel: KafkaChannel) -> bool:
    if channel.foreign:
        known = channel.number < metadata.partitions.get(channel.topic, 0)
    else:
        known = channel.incarnation < metadata.known_to
    return metadata.start is From.LATEST and known
