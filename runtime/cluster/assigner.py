"""Which member is to have which channel: a pure function of what is known, whatever order that comes in.

What has a member stays there, but for a few moves at a time. What has none gets one: the first in rendezvous order of
those that have less than their fair part. So when a member goes only its channels get others, and when it comes back
it gets what it had, as far as that has not gone elsewhere. Moves are for, in this order: what is drained; what is
pinned; replicas that share a zone or a host; members that bear more than they should; balance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from .assignment_draft import AssignmentDraft, DraftNode, closeness
from .assignment_plan import (
    AssignableChannel,
    AssignableMember,
    AssignmentCondition,
    AssignmentPlan,
    AssignmentRules,
    ChannelMove,
    ConditionKind,
    MoveReason,
)
from .balancing import LoadBalancer

PARK_AFTER = 2  # nodes that failed because of a channel: a third is not tried


def assign(
    role: str,
    members: Iterable[AssignableMember],
    channels: Iterable[AssignableChannel],
    present: Mapping[str, Sequence[str]],
    *,
    now_ms: int,
    settled: bool,
    ended: Set[str] = frozenset(),
    rules: AssignmentRules | None = None,
) -> AssignmentPlan:
    """Assign the channels of one role to those of the members that offer it.

    `present` has the incarnations that have each channel now, or get it by a move under way. `now_ms` is a wall clock.
    `settled` says that one lease has passed since the leader's claim was read: before that a holder that is no member
    may only not have been read of yet, and keeps what it has, unless it is among `ended`, which are known to be gone.
    The weights are relied upon only once all members have reported; until then nothing is moved for balance.
    """
    assigner = _Assigner(role, members, channels, now_ms, rules or AssignmentRules())
    return assigner.plan(present, settled, ended)


class _Assigner:
    """One assignment in the making. Members and channels are looked at in orders of their own, never in that of the
    arguments."""

    def __init__(
        self,
        role: str,
        members: Iterable[AssignableMember],
        channels: Iterable[AssignableChannel],
        now_ms: int,
        rules: AssignmentRules,
    ) -> None:
        known = list(members)
        self._incarnations = {member.incarnation for member in known}  # with whatever roles
        self._names = {member.name for member in known}
        self._role, self._now_ms, self._rules = role, now_ms, rules
        self._draft = AssignmentDraft(role, known)
        self._channels = {channel.name: channel for channel in sorted(channels, key=lambda channel: channel.name)}
        self._takers_by_name = {node.member.name: node for node in self._draft.takers}
        self._fresh: dict[tuple[str, str], tuple[str, MoveReason]] = {}  # channel and target: source and reason
        self._moves: dict[str, ChannelMove] = {}  # by channel: one replica of it at a time
        self._dropped: list[ChannelMove] = []
        self._awaited: dict[str, list[str]] = defaultdict(list)  # by incarnation, channels
        self._conditions: dict[tuple[ConditionKind, str], list[str]] = defaultdict(list)
        moving = sum(channel.moving for channel in self._channels.values())
        self._max_moves = max(0, rules.max_moves - moving)

    def plan(self, present: Mapping[str, Sequence[str]], settled: bool, ended: Set[str]) -> AssignmentPlan:
        lost = {
            channel.name: self._keep(channel, present.get(channel.name, ()), settled, ended)
            for channel in self._channels.values()
        }
        self._place(lost)
        self._drain()
        self._pin()
        if self._may_balance(settled):
            self._separate()
            self._balance()
        self._look_for_conditions()
        return self._result()

    # ---- what stays, and what has no member -------------------------------------------------------------------------

    def _keep(self, channel: AssignableChannel, present: Sequence[str], settled: bool, ended: Set[str]) -> list[str]:
        """Keep the holders that may keep the channel; returns the others, of which nothing is left to be kept."""
        lost: list[str] = []
        self._draft.holders[channel.name] = []
        for holder in sorted(set(present)):
            if self._is_parked(channel):
                self._dropped.append(ChannelMove(channel.name, holder, "", MoveReason.PARKED))
            elif holder in self._draft.nodes:
                self._draft.add(channel, holder)
            elif settled or holder in ended or holder in self._incarnations:
                lost.append(holder)
            else:
                self._draft.add(channel, holder)
                self._awaited[holder].append(channel.name)
        self._drop_surplus(channel)
        lost += self._give_up_failed(channel)
        return lost

    def _is_parked(self, channel: AssignableChannel) -> bool:
        return len(channel.failed_on) >= PARK_AFTER

    def _drop_surplus(self, channel: AssignableChannel) -> None:
        """Take replicas away that are too many: first those of members that are drained, or that are not pinned."""
        holders = self._draft.holders[channel.name]
        while len(holders) > channel.replicas:
            worst = max(holders, key=lambda holder: self._dispensability(channel, holder))
            self._draft.remove(channel, worst)
            self._dropped.append(ChannelMove(channel.name, worst, "", MoveReason.SURPLUS))

    def _dispensability(self, channel: AssignableChannel, holder: str) -> tuple[object, ...]:
        node = self._draft.nodes.get(holder)
        if node is None:
            return True, holder
        near = closeness(node.member, self._draft.others(channel, holder))
        return False, node.member.draining, node.member.name not in channel.pins, near, node.load, holder

    def _give_up_failed(self, channel: AssignableChannel) -> list[str]:
        """The holders on which the channel failed lose it, as far as there are others that can take it."""
        if not channel.failed_on or self._is_parked(channel):
            return []
        nodes = self._nodes_of(channel)
        failed = [node.member.incarnation for node in nodes if node.member.name in channel.failed_on]
        able = self._takers_by_name.keys() - channel.failed_on - {node.member.name for node in nodes}
        given_up = failed[: max(0, len(able) - self._missing(channel))]
        for holder in given_up:
            self._draft.remove(channel, holder)
        return given_up

    # ---- channels without a member ----------------------------------------------------------------------------------

    def _place(self, lost: Mapping[str, list[str]]) -> None:
        """Give members to what has none, the heaviest first; then even that out, which costs no move."""
        missing = [(channel, self._missing(channel)) for channel in self._channels.values()]
        missing.sort(key=lambda each: (-each[0].weight, each[0].name))
        drained = sum(node.load - node.member.load for node in self._draft.nodes.values() if node.member.draining)
        self._draft.set_fair(drained + sum(channel.weight * count for channel, count in missing))
        for channel, count in missing:
            self._replace(channel, lost[channel.name], count)
        balancer = LoadBalancer(
            self._draft, self._channels, self._unpinned(self._fresh), self._rules, self._move_fresh, again=True
        )
        balancer.even_out(float("inf"))

    def _missing(self, channel: AssignableChannel) -> int:
        return 0 if self._is_parked(channel) else channel.replicas - len(self._draft.holders[channel.name])

    def _replace(self, channel: AssignableChannel, lost: Sequence[str], count: int) -> None:
        """Give `count` members to the channel, instead of those that it has lost and beyond."""
        for index in range(max(count, len(lost))):
            source = lost[index] if index < len(lost) else ""
            failed = source in self._draft.nodes
            reason = MoveReason.FAILED if failed else MoveReason.LOST if source else MoveReason.NEW
            target = self._target(channel) if index < count else None
            if target is not None:
                self._draft.add(channel, target.member.incarnation)
                self._fresh[channel.name, target.member.incarnation] = source, reason
            elif source:
                self._dropped.append(ChannelMove(channel.name, source, "", reason))

    def _target(self, channel: AssignableChannel, leaving: str = "") -> DraftNode | None:
        pinned = self._missing_pins(channel) if channel.pins else []
        return pinned[0] if pinned else self._draft.best_taker(channel, leaving)

    def _move_fresh(
        self, channel: AssignableChannel, source: DraftNode, target: DraftNode, _why: MoveReason, _detail: str
    ) -> None:
        self._draft.remove(channel, source.member.incarnation)
        self._draft.add(channel, target.member.incarnation)
        why = self._fresh.pop((channel.name, source.member.incarnation))
        self._fresh[channel.name, target.member.incarnation] = why

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for node in sorted(self._draft.nodes.values(), key=lambda node: node.member.incarnation):
            if node.member.draining:
                for channel in sorted((self._channels[each] for each in node.channels), key=lambda each: each.name):
                    self._drain_one(channel, node)

    def _drain_one(self, channel: AssignableChannel, node: DraftNode) -> None:
        leaving = node.member.incarnation
        if not self._draft.has_taker(channel, leaving):
            self._conditions[ConditionKind.DRAIN_WAITS, node.member.name].append(channel.name)
        elif self._may_move(channel):
            target = self._target(channel, leaving)
            if target is not None:
                self._move(channel, node, target, MoveReason.DRAIN)

    def _pin(self) -> None:
        for channel in self._channels.values():
            if channel.pins and self._may_move(channel):
                targets = self._missing_pins(channel)
                sources = [node for node in self._nodes_of(channel) if node.member.name not in channel.pins]
                if targets and sources:
                    self._move(channel, sources[0], targets[0], MoveReason.PIN)

    def _missing_pins(self, channel: AssignableChannel) -> list[DraftNode]:
        """The members to which the channel is pinned, which can take it and do not have it, in the order of the pins;
        no more than it can have."""
        held = {node.member.name for node in self._nodes_of(channel)}
        able = self._takers_by_name.keys() - channel.failed_on
        wanted = [each for each in dict.fromkeys(channel.pins) if each in held or each in able][: channel.replicas]
        return [self._takers_by_name[each] for each in wanted if each not in held]

    def _may_balance(self, settled: bool) -> bool:
        silent = [node.member for node in self._draft.nodes.values() if not node.member.has_reported]
        for member in silent:
            self._conditions[ConditionKind.NOT_REPORTED, member.name] = []
        return self._rules.balance and settled and not silent

    def _separate(self) -> None:
        for channel in self._channels.values():
            if channel.replicas > 1 and self._may_move(channel) and not self._is_cooling(channel):
                for node in self._nodes_of(channel):
                    if not self._is_pinned(channel.name, node.member.incarnation):
                        target = self._draft.apart(channel, node)
                        if target is not None:
                            self._move(channel, node, target, MoveReason.APART)
                            break

    def _balance(self) -> None:
        if self._max_moves <= len(self._moves):
            return
        movable = [
            (channel.name, holder)
            for channel in self._channels.values()
            if self._may_move(channel) and not self._is_cooling(channel)
            for holder in self._draft.holders[channel.name]
            if (channel.name, holder) not in self._fresh
        ]
        balancer = LoadBalancer(self._draft, self._channels, self._unpinned(movable), self._rules, self._move)
        balancer.relieve(self._max_moves - len(self._moves))
        balancer.even_out(self._max_moves - len(self._moves))

    def _may_move(self, channel: AssignableChannel) -> bool:
        return len(self._moves) < self._max_moves and not channel.moving and channel.name not in self._moves

    def _is_cooling(self, channel: AssignableChannel) -> bool:
        """A move in the future is none: the clock was set back."""
        return channel.moved_ms is not None and 0 <= self._now_ms - channel.moved_ms < self._rules.cooldown_ms

    def _is_pinned(self, name: str, incarnation: str) -> bool:
        pins = self._channels[name].pins
        return bool(pins) and self._draft.nodes[incarnation].member.name in pins

    def _unpinned(self, held: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        nodes = self._draft.nodes
        return [each for each in held if each[1] in nodes and not self._is_pinned(*each)]

    def _nodes_of(self, channel: AssignableChannel) -> list[DraftNode]:
        nodes = self._draft.nodes
        return [nodes[each] for each in sorted(self._draft.holders[channel.name]) if each in nodes]

    def _move(
        self, channel: AssignableChannel, source: DraftNode, target: DraftNode, why: MoveReason, detail: str = ""
    ) -> None:
        leaving, coming = source.member.incarnation, target.member.incarnation
        self._draft.remove(channel, leaving)
        self._draft.add(channel, coming)
        self._moves[channel.name] = ChannelMove(channel.name, leaving, coming, why, detail)

    # ---- what comes out ---------------------------------------------------------------------------------------------

    def _look_for_conditions(self) -> None:
        for node in self._draft.nodes.values():
            if node.load > node.capacity:
                self._conditions[ConditionKind.OVER_CAPACITY, node.member.name] = sorted(node.channels)
        for holder, channels in self._awaited.items():
            self._conditions[ConditionKind.AWAITED, holder] = channels
        for channel in self._channels.values():
            kind = self._condition_of(channel)
            if kind is not None:
                self._conditions[kind, self._role].append(channel.name)
            for pin in dict.fromkeys(channel.pins):
                self._look_at_pin(channel, pin)

    def _condition_of(self, channel: AssignableChannel) -> ConditionKind | None:
        holders = self._draft.holders[channel.name]
        if self._is_parked(channel):
            return ConditionKind.PARKED
        if not holders:
            return ConditionKind.NO_TAKER if self._draft.nodes else ConditionKind.NO_MEMBER
        if len(holders) < channel.replicas:
            return ConditionKind.TOO_FEW_MEMBERS
        if len(holders) > 1:
            members = [node.member for node in self._nodes_of(channel)]
            if any(closeness(member, members[:index]) != (0, 0) for index, member in enumerate(members)):
                return ConditionKind.REPLICAS_CLOSE
        return None

    def _look_at_pin(self, channel: AssignableChannel, pin: str) -> None:
        """A pin that may yet be followed, by one of the next moves, is none to be named."""
        if pin not in self._names:
            self._conditions[ConditionKind.PIN_AWAY, pin].append(channel.name)
            return
        cannot = pin not in self._takers_by_name or pin in channel.failed_on
        if cannot and all(node.member.name != pin or node.member.draining for node in self._nodes_of(channel)):
            self._conditions[ConditionKind.PIN_REFUSED, pin].append(channel.name)

    def _result(self) -> AssignmentPlan:
        assigned = {name: tuple(sorted(holders)) for name, holders in self._draft.holders.items() if holders}
        fresh = [ChannelMove(name, source, target, why) for (name, target), (source, why) in self._fresh.items()]
        conditions = [AssignmentCondition(*key, tuple(channels)) for key, channels in self._conditions.items()]
        return AssignmentPlan(
            self._role,
            assigned,
            tuple(self._moves.values()),
            tuple(sorted(fresh, key=lambda move: (move.channel, move.target))),
            tuple(self._dropped),
            tuple(sorted(conditions, key=lambda condition: (condition.kind.name, condition.subject))),
        )
