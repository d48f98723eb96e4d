"""What the coordinator remembers of a group: its members, and which of them has which channel. Memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..log.wal import From
from .assignment import assign
from .subscriptions import Subscription


@dataclass(slots=True, eq=False)
class MemberState:
    """One member. `session_timeout_s` of None: the member runs in the owner's process and has no session."""

    id: str
    subscription: Subscription
    session_timeout_s: float | None
    revocation_timeout_s: float
    seen_alive: float
    changed: Callable[[], None]
    version: int = 0
    held: set[str] = field(default_factory=set[str])


@dataclass(slots=True, eq=False)
class Assignment:
    """One channel of a group. Between `holder` and `target` it has no holder for a moment, and it never moves while
    commits are in flight, so that the next holder starts from all that was accepted before."""

    channel: str
    start: From  # where the group begins, as long as it has no position
    target: str | None = None
    holder: str | None = None
    epoch: int = 0
    revoking_since: float | None = None
    commits_in_flight: int = 0
    single_acks_in_flight: int = 0
    subscribers: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Group:
    """One group. `moving` are the channels whose holder is not (yet) their target."""

    name: str
    members: dict[str, MemberState] = field(default_factory=dict[str, MemberState])
    assignments: dict[str, Assignment] = field(default_factory=dict[str, Assignment])
    moving: set[str] = field(default_factory=set[str])
    forgetting: bool = False  # its positions are being removed: no member may start from them

    @property
    def idle(self) -> bool:
        """The group has no members and nothing is in flight: only its positions are left."""
        return (
            not self.members and not self.forgetting and not any(a.commits_in_flight for a in self.assignments.values())
        )

    def subscribe(self, channels: Iterable[str], member: MemberState, start: From) -> None:
        """Note which of `channels` the member subscribes to; those without a subscriber before begin at `start`."""
        for channel in channels:
            if member.subscription.takes(channel):
                assignment = self.assignments.setdefault(channel, Assignment(channel, start))
                if not assignment.subscribers:
                    assignment.start = start
                assignment.subscribers |= {member.id}

    def unsubscribe(self, member: MemberState) -> None:
        """Forget the member's subscriptions."""
        for assignment in self.assignments.values():
            assignment.subscribers -= {member.id}

    def plan_targets(self) -> None:
        """Decide anew which member is the target of each channel."""
        targets = assign(
            {channel: assignment.subscribers for channel, assignment in self.assignments.items()},
            {channel: assignment.holder or assignment.target for channel, assignment in self.assignments.items()},
        )
        for channel, assignment in self.assignments.items():
            assignment.target = targets.get(channel)
            if assignment.holder is not None and assignment.target == assignment.holder:
                self.moving.discard(channel)
            else:
                self.moving.add(channel)
