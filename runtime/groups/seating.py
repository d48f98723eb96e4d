"""Who has which channel of a group: one holder at a time, and none while a commit of the channel is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from ..clock import Clock
from ..errors import ChannelNotFound, Overloaded, TidewalError
from ..wal import Append, Delivery, From
from .membership import Group, Member, Seat
from .progress import Change, GroupBackend, Progress
from .section import Section

MAX_GROUPS = 1_000
MAX_MEMBERS_PER_GROUP = 1_000

Done: TypeAlias = Callable[[TidewalError | None], None]


class Seating:
    """The mechanism under the coordinator. Every method is to be called within the section."""

    def __init__(self, clock: Clock, backend: GroupBackend, boot: int, watch: Callable[[], None]) -> None:
        self._clock = clock
        self._backend = backend
        self._watch = watch
        self._numbers = itertools.count((boot << 32) + 1)  # of leases and versions
        self._section = Section()
        self._groups: dict[str, Group] = {}
        self._known: frozenset[str] = frozenset()  # channels

    # ---- members ----------------------------------------------------------------------------------------------------

    def _admit(self, group: Group, member: Member) -> None:
        before = group.members.get(member.id)
        if before is None and len(group.members) >= MAX_MEMBERS_PER_GROUP:
            raise Overloaded(f"group {group.name} has {MAX_MEMBERS_PER_GROUP} members", limit="members_per_group")
        if before is not None:
            for channel in list(before.held):
                self._vacate(group, group.seats[channel])
            group.unsubscribe(before)
        group.members[member.id] = member
        self._touch(member)

    def _remove(self, group: Group, member: Member) -> None:
        """Take a member out, unless it has joined again meanwhile."""
        with self._section:
            if group.members.get(member.id) is not member:
                return
            for channel in list(member.held):
                self._vacate(group, group.seats[channel])
            del group.members[member.id]
            group.unsubscribe(member)
            self._rebalance(group)

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _rebalance(self, group: Group, then: Done | None = None) -> None:
        group.divide()
        for seat in group.seats.values():
            if seat.holder is None:
                continue
            wanted = seat.holder != seat.target
            if wanted != (seat.wanted_since is not None):
                seat.wanted_since = self._clock.monotonic() if wanted else None
                self._touch(group.members[seat.holder])
        self._settle(group, sorted(group.moving), then)

    def _settle(self, group: Group, channels: Iterable[str], then: Done | None = None) -> None:
        """Give channels that nobody has to those they are meant for. Where the group has no position yet, that is
        stored first; `then` hears of it."""
        starting: list[Seat] = []
        for channel in channels:
            seat = group.seats.get(channel)
            if seat is None or seat.holder is not None or seat.commits_in_flight or group.forgetting:
                continue
            if seat.target is None:
                group.moving.discard(channel)
                del group.seats[channel]
            elif group.name in self._positions(channel):
                self._grant(group, seat, group.members[seat.target])
            else:
                starting.append(seat)
        if group.moving:
            self._section.after(self._watch)
        if starting:
            self._start(group, starting, then)
        elif then is not None:
            self._section.after(partial(then, None))
        self._tidy(group)

    def _start(self, group: Group, seats: Sequence[Seat], then: Done | None) -> None:
        """Store where the group begins. A failure that no `then` hears of is not lost: `expire` tries again."""

        def started(result: list[bytes] | TidewalError) -> None:
            if then is not None:
                self._section.after(partial(then, result if isinstance(result, TidewalError) else None))

        changes: list[Change] = []
        for seat in seats:
            with suppress(ChannelNotFound):  # dropped just now: `channels_changed` takes it away
                at = self._backend.end if seat.start is From.LATEST else self._backend.begin
                changes.append(Change(group.name, seat.channel, at(seat.channel), reset=True))
        try:
            self._commit(group, [group.seats[change.channel] for change in changes], [], changes, started)
        except TidewalError as error:
            started(error)

    def _grant(self, group: Group, seat: Seat, member: Member) -> None:
        seat.holder, seat.lease, seat.wanted_since = member.id, next(self._numbers), None
        group.moving.discard(seat.channel)
        member.held.add(seat.channel)
        self._touch(member)

    def _vacate(self, group: Group, seat: Seat) -> None:
        if seat.holder is not None:
            holder = group.members[seat.holder]
            holder.held.discard(seat.channel)
            self._touch(holder)
        seat.holder, seat.lease, seat.wanted_since = None, 0, None
        group.moving.add(seat.channel)

    def _touch(self, member: Member) -> None:
        member.version = next(self._numbers)
        self._section.after(member.changed)

    def _notice_channels(self) -> None:
        now = frozenset(self._backend.channels())
        new, gone = sorted(now - self._known), self._known - now
        self._known = now
        for group in list(self._groups.values()) if new or gone else ():
            gone_here = gone & group.seats.keys()
            for channel in gone_here:
                self._vacate(group, group.seats[channel])
                group.moving.discard(channel)
                del group.seats[channel]
            new_here = [channel for channel in new if self._may_read(group.name, channel)]
            for member in group.members.values():
                group.subscribe(new_here, member, From.EARLIEST)
            if gone_here or not group.seats.keys().isdisjoint(new_here):
                self._rebalance(group)

    # ---- commits ----------------------------------------------------------------------------------------------------

    def _commit(
        self,
        group: Group,
        seats: Sequence[Seat],
        outputs: Sequence[Append],
        changes: Sequence[Change],
        then: Callable[[list[bytes] | TidewalError], None],
    ) -> None:
        """Commit, and let none of the seats change hands before it is decided. `then` is called within the section."""
        for seat in seats:
            seat.commits_in_flight += 1

        def decided(result: list[bytes] | TidewalError) -> None:
            failed = isinstance(result, TidewalError)
            with self._section:
                for seat in seats:
                    seat.commits_in_flight -= 1
                then(result)
                # After a failure a first position is not tried again at once, but by `expire`.
                still = [seat.channel for seat in seats if group.seats.get(seat.channel) is seat]
                self._settle(group, [name for name in still if not failed or group.name in self._positions(name)])

        try:
            self._backend.commit(outputs, changes, decided)
        except TidewalError:
            for seat in seats:
                seat.commits_in_flight -= 1
            self._tidy(group)
            raise

    def _move(self, group: Group, seat: Seat, upto: bytes, done: Done) -> None:
        def moved(result: list[bytes] | TidewalError) -> None:
            self._section.after(partial(done, result if isinstance(result, TidewalError) else None))

        try:
            change = Change(group.name, seat.channel, upto or self._backend.begin(seat.channel), reset=True)
            self._commit(group, [seat], [], [change], moved)
        except TidewalError:
            self._settle(group, [seat.channel])
            raise

    # ---- looking things up ------------------------------------------------------------------------------------------

    def _group(self, name: str) -> Group:
        found = self._groups.get(name)
        if found is None:
            known = set(self._groups).union(*(self._positions(channel) for channel in self._backend.channels()))
            if name not in known and len(known) >= MAX_GROUPS:
                raise Overloaded(f"there are {MAX_GROUPS} groups: drop one that is not used", limit="groups")
            found = self._groups[name] = Group(name)
        return found

    def _tidy(self, group: Group) -> None:
        if group.settled and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _positions(self, channel: str) -> Mapping[str, Progress]:
        try:
            return self._backend.progress(channel)
        except ChannelNotFound:
            return {}

    def _may_read(self, group: str, channel: str) -> bool:
        """A queue belongs to the first group that has a position in it or asks for it."""
        try:
            if self._backend.policy(channel).delivery is not Delivery.QUEUE:
                return True
        except ChannelNotFound:
            return False
        asking = (name for name, other in self._groups.items() if channel in other.seats)
        return not {*self._positions(channel), *asking} - {group}
