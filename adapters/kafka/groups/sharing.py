"""What members of a group tell each other through Kafka, and how their leader divides the channels.

Kafka hands what each member says to one of them, the leader, and what that decides back to each. Nothing is taken from
a member by that: a channel that is meant for another one stays with who has it, marked as wanted back, until it is let
go; that member joins anew without it then, and the next round gives it away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.protocol.group import MemberAssignment, ProtocolMetadata

from ....runtime.groups.assignment import divide
from ....runtime.groups.subscriptions import Subscription
from ....runtime.wal import From
from ..catalog import Channel
from ..cluster import PARTITION

PROTOCOL_TYPE = "consumer"  # what Kafka's own tools can show
PROTOCOL = "tidewal"
VERSION = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a member says when it joins. `known_to` is where the catalog ended when it first did: in what is created
    later the group begins at the first entry. `turn` only makes a claim differ from the one before. Positions in the
    `topics` that somebody names are not forgotten by Kafka, however long nothing is committed there."""

    id: str
    channels: Sequence[str]
    start: From
    known_to: int
    topics: Sequence[str]
    held: frozenset[str]
    turn: int

    def encode(self) -> bytes:
        said = {
            "id": self.id,
            "channels": list(self.channels),
            "start": self.start.value,
            "known_to": self.known_to,
            "held": sorted(self.held),
            "turn": self.turn,
        }
        return ProtocolMetadata(VERSION, list(self.topics), json.dumps(said).encode()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        """Raises `ValueError`, `KeyError` for what no Tidewal wrote."""
        told: Any = ProtocolMetadata.decode(data)
        said = json.loads(told.user_data or b"")
        return cls(
            said["id"],
            said["channels"],
            From(said["start"]),
            said["known_to"],
            told.subscription,
            frozenset(said["held"]),
            said["turn"],
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """What the leader gives one member: topics, those of them that are wanted back, and those where the group begins
    at the end where it has no position."""

    topics: frozenset[str]
    wanted_back: frozenset[str] = frozenset()
    from_latest: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        said = {"wanted_back": sorted(self.wanted_back), "from_latest": sorted(self.from_latest)}
        topics = [(topic, [PARTITION]) for topic in sorted(self.topics)]
        return MemberAssignment(VERSION, topics, json.dumps(said).encode()).encode()

    @classmethod
    def decode(cls, data: bytes) -> Grant:
        """Raises `ValueError`, `KeyError` for what no Tidewal wrote; nothing at all is an empty one."""
        if not data:
            return cls(frozenset())
        told: Any = MemberAssignment.decode(data)
        said = json.loads(told.user_data or b"")
        topics = frozenset(topic for topic, _ in told.assignment)
        return cls(topics, frozenset(said["wanted_back"]), frozenset(said["from_latest"]))


def share_out(group: str, claims: Mapping[str, Claim], channels: Sequence[Channel]) -> dict[str, Grant]:
    """Divide the channels among the members that claim them, by the ids that Kafka gave these."""
    subscriptions = {member: Subscription(claim.channels) for member, claim in claims.items()}
    subscribers: dict[str, frozenset[str]] = {}
    from_latest: set[str] = set()
    for channel in channels:
        if not channel.policy.ephemeral and channel.queue_of in (None, group):
            takers = frozenset(member for member, each in subscriptions.items() if each.takes(channel.name))
            subscribers[channel.topic] = takers
            if all(_begins_at_end(claims[member], channel) for member in takers):
                from_latest.add(channel.topic)
    holders = {topic: member for member, claim in sorted(claims.items()) for topic in claim.held}
    targets = divide(subscribers, {topic: holders.get(topic) for topic in subscribers})
    grants: dict[str, Grant] = {}
    for member in claims:
        kept = {topic for topic, holder in holders.items() if holder == member and topic in subscribers}
        meant = {topic for topic, target in targets.items() if target == member}
        free = {topic for topic in meant if topic not in holders}
        topics = frozenset(kept | free)
        grants[member] = Grant(topics, frozenset(kept - meant), topics & from_latest)
    return grants


def _begins_at_end(claim: Claim, channel: Channel) -> bool:
    return claim.start is From.LATEST and channel.incarnation < claim.known_to
