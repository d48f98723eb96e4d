"""What the assigner is given, members and channels, and what it returns: the plan for one role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

Holders = Mapping[str, tuple[str, ...]]  # by channel, the incarnations of the members that have it


@dataclass(frozen=True, slots=True)
class AssignableMember:
    """A member of the cluster, as the assigner of one role sees it.

    `joined_ms` orders two lives of one name: the elder gets nothing new. A member gets a part of the weight in
    proportion to its `size`. `load` is what it bears besides the channels of the role, and `capacity` the most that it
    should bear altogether, None for no limit; both in the unit of the channels' weights. `host` and `zone` are where it
    runs, "" where that is not known. A cordoned member keeps what it has and gets nothing new, a draining one loses
    all. `has_reported` says whether it has reported its load.
    """

    incarnation: str
    name: str
    roles: frozenset[str]
    joined_ms: int = 0
    size: int = 1
    load: int = 0
    capacity: int | None = None
    host: str = ""
    zone: str = ""
    cordoned: bool = False
    draining: bool = False
    has_reported: bool = True


@dataclass(frozen=True, slots=True)
class AssignableChannel:
    """A pchannel or vchannel that some members with the role are to have: `replicas` of them.

    `weight` is the load that was measured, with what an idle channel costs, in a unit of the role: bytes in memory, or
    bytes per second; at least 1. `pins` are the names of members on which an operator wants it, one replica each.
    `moved_ms` is when its last move was decided, by the clock of `now_ms`, None for never; `moving` says that this move
    is still under way. `failed_on` are the names of the nodes that failed because of it, as far as that is known.
    """

    name: str
    weight: int = 1
    replicas: int = 1
    pins: tuple[str, ...] = ()
    moved_ms: int | None = None
    moving: bool = False
    failed_on: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.weight < 1 or self.replicas < 1:
            raise ValueError(f"channel {self.name} has weight {self.weight} and {self.replicas} replicas")


@dataclass(frozen=True, slots=True)
class AssignmentRules:
    """How much is moved, and for what.

    `max_moves` bounds the moves that are under way at once. A channel whose move was decided less than `cooldown_ms`
    ago is moved by operators alone. Two members are balanced while their loads, for each unit of size, differ by at
    most `tolerance` times the mean; a move for balance lowers the higher one by at least `min_gain` times the mean.
    `balance` is the operators' switch: without it only operators move channels that have a member.
    """

    max_moves: int = 4
    cooldown_ms: int = 60_000
    tolerance: float = 0.2
    min_gain: float = 0.0001
    balance: bool = True


class MoveReason(Enum):
    """Why a channel gets another member."""

    NEW = "no member has it"
    LOST = "its member is gone"
    FAILED = "it failed on its member"
    DRAIN = "its member is drained"
    PIN = "an operator has pinned it"
    APART = "its replicas share a host or a zone"
    CAPACITY = "its member bears more than it should"
    BALANCE = "its member has more to do than others"
    SURPLUS = "it has more replicas than it should"
    PARKED = "it is parked"


class ConditionKind(Enum):
    """What an operator must know: the assignment is not what the channels ask for, or waits."""

    NO_MEMBER = "no member offers the role"
    NO_TAKER = "no member with the role takes anything new"
    PIN_AWAY = "a pin names a member that is away"
    PIN_REFUSED = "a pin names a member that cannot take the channel"
    TOO_FEW_MEMBERS = "there are fewer members than replicas"
    REPLICAS_CLOSE = "replicas share a host or a zone"
    OVER_CAPACITY = "a member bears more than it should"
    PARKED = "channels failed on several nodes, and are parked until an operator releases them"
    DRAIN_WAITS = "what a draining member has can go nowhere"
    AWAITED = "a member may still come back: its channels wait for the end of a lease"
    NOT_REPORTED = "a member has not reported its load: balancing waits"


@dataclass(frozen=True, slots=True)
class ChannelMove:
    """One replica of a channel goes from `source` to `target`, both incarnations; "" for none. `detail` has the numbers
    behind the reason, for people."""

    channel: str
    source: str
    target: str
    reason: MoveReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AssignmentCondition:
    """Something that is not as it should be: `subject` is the role, or the name or incarnation of a member; `channels`
    are all that it concerns."""

    kind: ConditionKind
    subject: str
    channels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The assignment of one role, and how it comes about: `moves` take channels from members that have them, at most
    `max_moves`; `placed` gives members to channels, or replicas, that had none, or lost it; `dropped` takes replicas
    away, with nothing in their place. What is in the present assignment and not among the channels is in none of them.
    """

    role: str
    assignment: Holders
    moves: tuple[ChannelMove, ...]
    placed: tuple[ChannelMove, ...]
    dropped: tuple[ChannelMove, ...]
    conditions: tuple[AssignmentCondition, ...]

    def owners(self) -> dict[str, str]:
        """The one incarnation that is to have each channel, where channels have one replica: pchannels."""
        return {channel: holders[0] for channel, holders in self.assignment.items()}
