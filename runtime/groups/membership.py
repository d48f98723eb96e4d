"""What the coordinator remembers of a group: its members, and who has which channel. Memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..wal import From
from .assignment import divide
from .subscriptions import Subscription


@dataclass(slots=True, eq=False)
class Member:
    """One member. `session_timeout_s` of None: it lives in the owner's process and has no session."""

    id: str
    subscription: Subscription
    session_timeout_s: float | None
    hand_over_s: float
    seen_alive: float
    changed: Callable[[], None]
    version: int = 0
    held: set[str] = field(default_factory=set[str])


@dataclass(slots=True, eq=False)
class Seat:
    """One channel of a group. It goes from `holder` to `target` over nobody, and never while commits are in flight, so
    that the next holder starts from all that was accepted before."""

    channel: str
    start: From  # where the group begins, as long as it has no position
    target: str | None = None
    holder: str | None = None
    lease: int = 0
    wanted_since: float | None = None
    commits_in_flight: int = 0
    single_acks_in_flight: int = 0
    subscribers: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Group:
    """One group. `moving` are the channels whose holder is not (yet) the member they are meant for."""

    name: str
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    seats: dict[str, Seat] = field(default_factory=dict[str, Seat])
    moving: set[str] = field(default_factory=set[str])
    forgetting: bool = False  # its positions are being removed: nobody may start from them

    @property
    def settled(self) -> bool:
        """Nobody is in it and nothing on its way: what is left of it are its positions."""
        return not self.members and not self.forgetting and not any(s.commits_in_flight for s in self.seats.values())

    def subscribe(self, channels: Iterable[str], member: Member, start: From) -> None:
        """Note which of the channels the member asks for; those nobody asked for before begin at `start`."""
        for channel in channels:
            if member.subscription.takes(channel):
                seat = self.seats.setdefault(channel, Seat(channel, start))
                if not seat.subscribers:
                    seat.start = start
                seat.subscribers |= {member.id}

    def unsubscribe(self, member: Member) -> None:
        """Forget what the member asked for."""
        for seat in self.seats.values():
            seat.subscribers -= {member.id}

    def divide(self) -> None:
        """Decide anew for whom each channel is meant."""
        targets = divide(
            {channel: seat.subscribers for channel, seat in self.seats.items()},
            {channel: seat.holder or seat.target for channel, seat in self.seats.items()},
        )
        for channel, seat in self.seats.items():
            seat.target = targets.get(channel)
            if seat.holder is not None and seat.target == seat.holder:
                self.moving.discard(channel)
            else:
                self.moving.add(channel)
