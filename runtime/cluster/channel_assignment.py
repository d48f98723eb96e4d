"""Which StreamingNode is to own which pchannel: what the assigner is given, from what a coordinator has read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from ..catalog.catalog import PChannelState
from ..catalog.placement_wishes import CORDONED, DRAINED
from .assigner import assign
from .assignment_plan import AssignableChannel, AssignableMember, AssignmentPlan, AssignmentRules
from .decisions import ClusterView
from .roles import STREAMING_NODE
from .state import RATES, NodeMember

MOVES_MAX = 16  # at once: each of them holds writes up for some round trips to the log
IDLE_WEIGHT = 64 * 1024  # what a channel costs beside its bytes a second, in the same unit: a rule of thumb


def assign_channels(
    view: ClusterView, channels: Iterable[str], *, balance: bool | None = None, moves_max: int = MOVES_MAX
) -> AssignmentPlan:
    """The plan for the pchannels `channels`. Members that are silent get none. A channel that is being moved counts as
    where it is going. `balance` is what operators have said where it is None. A delay channel is where its partition
    is, and no channel of its own for this plan."""
    states, members = view.catalog.channels, view.cluster.members
    partition_of = view.catalog.topics.partition_of
    wanted = sorted(set(channels).difference(partition_of))
    holders = {name: _holder(states[name], members) for name in wanted if name in states}
    plan = assign(
        STREAMING_NODE,
        [_member(view, member) for member in members.values() if member.incarnation not in view.silent],
        [_channel(view, name) for name in wanted],
        {name: [holder] for name, holder in holders.items() if holder},
        now_ms=view.wall_ms,
        settled=view.settled,
        ended={holder for holder in holders.values() if holder and view.is_over(holder)},
        rules=AssignmentRules(balance=view.catalog.wishes.balance if balance is None else balance, max_moves=moves_max),
    )
    beside = {delays: plan.assignment[name] for delays, name in partition_of.items() if name in plan.assignment}
    return replace(plan, assignment={**plan.assignment, **beside})


def _holder(state: PChannelState, members: Mapping[str, NodeMember]) -> str:
    return state.target if state.target in members else state.owner


def _member(view: ClusterView, member: NodeMember) -> AssignableMember:
    wish = view.catalog.wishes.nodes.get(member.name)
    return AssignableMember(
        member.incarnation,
        member.name,
        frozenset(member.roles),
        joined_ms=member.since_ms,
        host=member.host,
        cordoned=wish == CORDONED,
        draining=member.draining or wish == DRAINED,
        has_reported=RATES in member.report,
    )


def _channel(view: ClusterView, name: str) -> AssignableChannel:
    state = view.catalog.channels.get(name, PChannelState())
    pin, failed = view.catalog.wishes.pins.get(name), view.cluster.members.get(state.failed_on)
    return AssignableChannel(
        name,
        IDLE_WEIGHT + _rate(view.cluster.members.get(state.owner), name),
        pins=(pin,) if pin else (),
        moved_ms=state.moved_ms or None,
        moving=state.target in view.cluster.members and state.target != state.owner,
        failed_on=frozenset([failed.name]) if failed else frozenset(),
    )


def _rate(owner: NodeMember | None, channel: str) -> int:
    """The bytes a second of a channel as its owner has reported them; another member's report is of a time when it was
    the owner. What cannot be one is none."""
    rates = None if owner is None else owner.report.get(RATES)
    rate = cast("Mapping[object, object]", rates).get(channel) if isinstance(rates, dict) else None
    return max(rate, 0) if isinstance(rate, int) else 0
