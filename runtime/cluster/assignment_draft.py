"""An assignment while it is made: which members have which channels, what they bear, and where a channel fits best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import xxhash

from .assignment_plan import AssignableChannel, AssignableMember


class DraftNode:
    """A member, and what it bears by now: `load`, in the unit of weights, and `channels`, by name."""

    __slots__ = ("capacity", "channels", "fair", "load", "member", "seed", "size")

    def __init__(self, member: AssignableMember) -> None:
        self.member: AssignableMember = member
        self.load: int = member.load
        self.size: int = member.size
        self.capacity: float = math.inf if member.capacity is None else member.capacity
        self.fair: float = math.inf  # its part of all the weight, in proportion to its size
        self.seed: int = xxhash.xxh3_64_intdigest(member.name.encode())
        self.channels: set[str] = set()

    @property
    def use(self) -> float:
        """Load for each unit of size: what balancing makes equal."""
        return self.load / self.size

    def rank(self, channel: bytes) -> int:
        """The rendezvous rank of this node for a channel, by both names: the same in every process, and with whatever
        other nodes there are. A node that was restarted has the ranks that it had before."""
        return xxhash.xxh3_64_intdigest(channel, self.seed)


class AssignmentDraft:
    """The channels of one role and who holds them. Holders that are awaited are no nodes here.

    `takers` are the nodes that may get something new, in the order of their names; of two lives of one name only the
    last is among them."""

    def __init__(self, role: str, members: Iterable[AssignableMember]) -> None:
        offering = sorted((m for m in members if role in m.roles), key=lambda m: (m.name, m.joined_ms, m.incarnation))
        last = {member.name: member.incarnation for member in offering}
        self.nodes: dict[str, DraftNode] = {member.incarnation: DraftNode(member) for member in offering}
        self.takers: list[DraftNode] = [
            node
            for incarnation, node in self.nodes.items()
            if last[node.member.name] == incarnation and not (node.member.cordoned or node.member.draining)
        ]
        self.holders: dict[str, list[str]] = {}
        self._hosts = {node.member.host for node in self.takers}
        self._zones = {node.member.zone for node in self.takers}

    # ---- who has what -----------------------------------------------------------------------------------------------

    def add(self, channel: AssignableChannel, incarnation: str) -> None:
        """The holder gets a replica of the channel."""
        self.holders[channel.name].append(incarnation)
        node = self.nodes.get(incarnation)
        if node is not None:
            node.load += channel.weight
            node.channels.add(channel.name)

    def remove(self, channel: AssignableChannel, incarnation: str) -> None:
        """The holder loses its replica of the channel."""
        self.holders[channel.name].remove(incarnation)
        node = self.nodes.get(incarnation)
        if node is not None:
            node.load -= channel.weight
            node.channels.remove(channel.name)

    def others(self, channel: AssignableChannel, leaving: str = "") -> list[AssignableMember]:
        """The members that have the channel, but for the one that it is leaving."""
        nodes = self.nodes
        return [nodes[each].member for each in self.holders[channel.name] if each != leaving and each in nodes]

    def mean_use(self, coming: int = 0) -> float:
        """The mean use of the takers, in weight for each unit of size, when `coming` more weight is with them."""
        size = sum(node.size for node in self.takers)
        return (sum(node.load for node in self.takers) + coming) / size if size else 0.0

    def set_fair(self, coming: int) -> None:
        """Fix each taker's fair part of what they have and what is coming to them."""
        mean = self.mean_use(coming)
        for node in self.takers:
            node.fair = min(mean * node.size, node.capacity)

    # ---- where a channel may go -------------------------------------------------------------------------------------

    def has_taker(self, channel: AssignableChannel, leaving: str) -> bool:
        """Whether there is a taker without a replica of the channel, when that on `leaving` goes."""
        taken = {member.name for member in self.others(channel, leaving)}
        return any(node.member.name not in taken for node in self.takers)

    def best_taker(self, channel: AssignableChannel, leaving: str = "") -> DraftNode | None:
        """The taker for a replica of the channel, None where each of them has it. In this order: one on which it has
        not failed; one with the capacity; far from the other replicas; the first in rendezvous order of those that have
        less than their fair part, or else the least used."""
        others, weight = self.others(channel, leaving), channel.weight
        taken = {member.name for member in others}
        nodes = [node for node in self.takers if node.member.name not in taken] if taken else self.takers
        if leaving:
            nodes = [node for node in nodes if node.member.incarnation != leaving]
        if not nodes:
            return None
        if channel.failed_on:
            nodes = [node for node in nodes if node.member.name not in channel.failed_on] or nodes
        nodes = [node for node in nodes if node.load + weight <= node.capacity] or nodes
        if others:
            near = [closeness(node.member, others) for node in nodes]
            least = min(near)
            nodes = [node for node, how_near in zip(nodes, near, strict=True) if how_near == least]
        key = channel.name.encode()
        below = [node for node in nodes if node.load + weight <= node.fair]
        if below:
            return max(below, key=lambda node: node.rank(key))
        return min(nodes, key=lambda node: ((node.load + weight) / node.size, -node.rank(key)))

    def may_go(self, channel: AssignableChannel, source: DraftNode, target: DraftNode) -> bool:
        """Whether a move for the sake of load makes nothing else worse."""
        if target.load + channel.weight > target.capacity or target.member.name in channel.failed_on:
            return False
        others = self.others(channel, source.member.incarnation)
        if not others:
            return target is not source
        name = target.member.name
        if name == source.member.name or any(member.name == name for member in others):
            return False
        return closeness(target.member, others) <= closeness(source.member, others)

    def apart(self, channel: AssignableChannel, source: DraftNode) -> DraftNode | None:
        """The best taker, where the replica on `source` shares a zone or a host that it need not share there."""
        others = self.others(channel, source.member.incarnation)
        zones_shared, hosts_shared = closeness(source.member, others)
        free_zone = zones_shared and not self._zones <= {member.zone for member in others}
        free_host = hosts_shared and not self._hosts <= {member.host for member in others}
        if not (free_zone or free_host):
            return None
        target = self.best_taker(channel, source.member.incarnation)
        fits = target is not None and target.load + channel.weight <= target.capacity
        if target is None or not fits or target.member.name in channel.failed_on:
            return None
        return target if closeness(target.member, others) < (zones_shared, hosts_shared) else None


def closeness(member: AssignableMember, others: Sequence[AssignableMember]) -> tuple[int, int]:
    """How many of the others are in the member's zone, and how many on its host, as far as both are known."""
    zone, host = member.zone, member.host
    zones = hosts = 0
    for other in others:  # a loop, because this is asked a million times
        if zone and other.zone == zone:
            zones += 1
        if host and other.host == host:
            hosts += 1
    return zones, hosts
