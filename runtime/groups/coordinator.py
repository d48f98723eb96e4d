"""Decide who reads which channel of a consumer group, and let only that member move the group's position.

One coordinator lives beside the log, in its owner. Who is a member is kept in memory only: after a change of owner the
members join again. Positions are durable in the log (`GroupBackend`). A lease names one spell of one member with one
channel, and is unique over all lives of the log; a lease that is over moves nothing (`Fenced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..clock import Clock
from ..errors import Closed, Fenced, InvalidRequest, Overloaded, TidewalError
from ..wal import Append, From, GroupInfo, OnAppended
from .link import Ack, Share, Shares
from .membership import Group, Member, Seat
from .progress import Change, GroupBackend, Progress, check_new
from .seating import Done, Seating
from .subscriptions import Subscription, check_name

MAX_SINGLE_ACKS = 10_000  # per channel and group, above what is acknowledged cumulatively
HAND_OVER_S = 30.0


def _nothing() -> None:
    pass


class Coordinator(Seating):
    """Pure state behind one lock. No method blocks; any thread may call. What cannot be is raised at once, what turns
    out later comes through `done`, which may be called on any thread and before the method returns.

    `watch` is called when `expire` gets something to wait for; whoever calls `expire` all the time needs none.
    """

    def __init__(self, clock: Clock, backend: GroupBackend, boot: int, *, watch: Callable[[], None] = _nothing) -> None:
        super().__init__(clock, backend, boot, watch)
        self._closed = False

    def join(
        self,
        group: str,
        member: str,
        channels: Sequence[str],
        start: From,
        session_timeout_s: float | None,
        changed: Callable[[], None],
        done: Done,
        *,
        hand_over_s: float = HAND_OVER_S,
    ) -> None:
        """Make `member` one of the group; as it joins again, what it had is taken from it.

        Without a session (None: it lives in this process) `hand_over_s` says how long it may keep a channel that is
        wanted back, otherwise the session timeout does. `changed` is called, on any thread, when `shares` would answer
        something new. `done` is called once the first positions are durable. Patterns pass over queues that belong to
        another group. Raises `InvalidRequest`, `ChannelNotFound` and `Overloaded` (`limit`: "groups",
        "members_per_group", "subscriptions", "patterns")."""
        check_name("group", group)
        check_name("member", member)
        subscription = Subscription(channels)
        if session_timeout_s is not None and not session_timeout_s > 0:
            raise InvalidRequest(f"a session timeout of {session_timeout_s} s leaves no time for a session")
        hand_over_s = hand_over_s if session_timeout_s is None else session_timeout_s
        joining = Member(member, subscription, session_timeout_s, hand_over_s, self._clock.monotonic(), changed)
        with self._section:
            self._check_open()
            for channel in sorted(subscription.names):
                self._check_channel(group, channel)
            self._notice_channels()
            found = self._group(group)
            self._admit(found, joining)
            found.subscribe((channel for channel in self._known if self._may_read(group, channel)), joining, start)

            def positioned(error: TidewalError | None) -> None:
                if error is not None:
                    self._remove(found, joining)
                done(error)

            self._rebalance(found, positioned)

    def beat(self, group: str, member: str) -> None:
        """Note that the member lives."""
        with self._section:
            found = self._groups.get(group)
            if found is not None and member in found.members:
                found.members[member].seen_alive = self._clock.monotonic()

    def shares(self, group: str, member: str) -> Shares:
        """What the member has. Raises `Fenced` for an unknown member: it must join again."""
        with self._section:
            found, asking = self._find(group, member)
            held: dict[str, Share] = {}
            for channel in sorted(asking.held):
                progress = self._positions(channel).get(group, Progress())
                held[channel] = Share(found.seats[channel].lease, progress.acked_to, frozenset(progress.acked))
            wanted = frozenset(channel for channel in held if found.seats[channel].wanted_since is not None)
            return Shares(asking.version, held, wanted)

    def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append], done: OnAppended) -> None:
        """Append `outputs` and store what is done, in one commit. No channel of it goes to another member before that
        is decided. Raises `Fenced` for a lease that is over, `InvalidRequest` for outputs of what is done already,
        `Overloaded` (`limit` "single_acks") and what `Wal.submit` raises; nothing was queued then."""
        with self._section:
            found, _ = self._find(group, member)
            seats = [self._seat(found, member, ack.channel, ack.lease) for ack in acks]
            for ack, seat in zip(acks, seats, strict=True):
                self._check_ack(group, ack, seat, outputs)
            changes = [Change(group, ack.channel, ack.upto, tuple(ack.ids)) for ack in acks]

            def count(sign: int) -> None:
                for ack, seat in zip(acks, seats, strict=True):
                    seat.single_acks_in_flight += sign * len(ack.ids)

            def committed(result: list[bytes] | TidewalError) -> None:
                count(-1)
                self._section.after(partial(done, result))

            count(+1)
            try:
                self._commit(found, seats, outputs, changes, committed)
            except TidewalError:
                count(-1)
                raise

    def release(self, group: str, member: str, channel: str, lease: int) -> None:
        """`GroupLink.release`."""
        with self._section:
            found = self._groups.get(group)
            seat = None if found is None else found.seats.get(channel)
            if found is not None and seat is not None and seat.holder == member and seat.lease == lease:
                self._vacate(found, seat)
                self._settle(found, [channel])

    def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes, done: Done) -> None:
        """Move the position to `upto`, backward too (b"": to the first entry that is kept). The lease is over; the
        member gets the channel again under a new one, also when storing the position failed. Raises `Fenced`, and
        `InvalidRequest` for an id past the end."""
        with self._section:
            found, _ = self._find(group, member)
            seat = self._seat(found, member, channel, lease)
            self._check_ids(channel, [upto])
            self._vacate(found, seat)
            self._move(found, seat, upto, done)

    def leave(self, group: str, member: str) -> None:
        """End the membership; the others get the channels at once. An unknown member is fine."""
        with self._section:
            found = self._groups.get(group)
            leaving = None if found is None else found.members.get(member)
            if found is not None and leaving is not None:
                self._remove(found, leaving)

    def seek_group(self, group: str, channel: str, upto: bytes, done: Done) -> None:
        """As `seek`, for a channel that no member has. Raises `InvalidRequest` while one has it, and
        what `join` raises for a group and channel that do not go together."""
        check_name("group", group)
        with self._section:
            self._check_open()
            self._check_channel(group, channel)
            self._check_ids(channel, [upto])
            self._notice_channels()
            found = self._group(group)
            seat = found.seats.setdefault(channel, Seat(channel, From.EARLIEST))
            if seat.holder is not None:
                raise InvalidRequest(f"member {seat.holder} has {channel} now: seek there, or let it leave first")
            self._move(found, seat, upto, done)

    def drop_group(self, group: str, done: Done) -> None:
        """Forget the positions of a group. Raises `InvalidRequest` while it has members; absent is fine."""
        check_name("group", group)
        with self._section:
            self._check_open()
            found = self._group(group)
            if found.members or found.forgetting:
                raise InvalidRequest(f"group {group} has {len(found.members)} members: let them leave first")
            found.forgetting = True

            def forgotten(result: list[bytes] | TidewalError) -> None:
                with self._section:
                    found.forgetting = False
                    self._section.after(partial(done, result if isinstance(result, TidewalError) else None))
                    self._settle(found, list(found.moving))

            try:
                self._backend.forget(group, forgotten)
            except TidewalError:
                found.forgetting = False
                self._tidy(found)
                raise

    def groups(self) -> list[GroupInfo]:
        """All groups that have positions or members, by name."""
        with self._section:
            self._check_open()
            positions: dict[str, dict[str, bytes | None]] = {name: {} for name in self._groups}
            for channel in sorted(self._backend.channels()):
                for group, progress in list(self._positions(channel).items()):
                    positions.setdefault(group, {})[channel] = progress.acked_to or None
            infos = [GroupInfo(name, at, self._members(name)) for name, at in sorted(positions.items())]
            return [info for info in infos if info.positions or info.members]

    def channels_changed(self) -> None:
        """Give new channels to the groups whose patterns take them, from their first entry on, and take dropped ones
        away. To be called after each creation and each drop (between a drop and a creation of the same name too)."""
        with self._section:
            if self._groups and not self._closed:
                self._notice_channels()

    def expire(self) -> None:
        """End sessions that show no life, take channels back that were wanted for too long, and try again to store
        first positions that could not be stored. To be called about twice a second."""
        with self._section:
            now = self._clock.monotonic()
            for group in list(self._groups.values()):
                for member in list(group.members.values()):
                    timeout_s = member.session_timeout_s
                    if timeout_s is not None and now - member.seen_alive > timeout_s:
                        self._remove(group, member)
                for seat in [group.seats[channel] for channel in sorted(group.moving)]:
                    if seat.holder is not None and seat.wanted_since is not None:
                        overdue = now - seat.wanted_since >= group.members[seat.holder].hand_over_s
                        if overdue:
                            self._vacate(group, seat)
                self._settle(group, sorted(group.moving))

    def excuse(self, seconds: float) -> None:
        """Count so much of the time that has passed against nobody: this process did not run, and could hear no one."""
        with self._section:
            now = self._clock.monotonic()
            for group in self._groups.values():
                for member in group.members.values():
                    member.seen_alive = min(member.seen_alive + seconds, now)
                for seat in group.seats.values():
                    if seat.wanted_since is not None:
                        seat.wanted_since = min(seat.wanted_since + seconds, now)

    @property
    def quiet(self) -> bool:
        """`expire` has nothing to wait for."""
        with self._section:
            return not any(
                group.moving or any(member.session_timeout_s is not None for member in group.members.values())
                for group in self._groups.values()
            )

    def close(self) -> None:
        """Wake everybody who waits; from now on every call but `leave`, `release` and `beat` raises `Closed`."""
        with self._section:
            self._closed = True
            for group in self._groups.values():
                for member in group.members.values():
                    self._touch(member)

    # ---- looking things up, and checking them -----------------------------------------------------------------------

    def _find(self, group: str, member: str) -> tuple[Group, Member]:
        self._check_open()
        found = self._groups.get(group)
        if found is None or member not in found.members:
            raise Fenced(f"{member} is no member of group {group} (any more): join again", group=group, member=member)
        asking = found.members[member]
        asking.seen_alive = self._clock.monotonic()
        return found, asking

    def _seat(self, group: Group, member: str, channel: str, lease: int) -> Seat:
        seat = group.seats.get(channel)
        if seat is None or seat.holder != member or seat.lease != lease:
            raise Fenced(
                f"{channel} was taken from {member} of group {group.name}: its entries are delivered again",
                channel=channel,
                term=lease,
            )
        return seat

    def _members(self, group: str) -> dict[str, frozenset[str]]:
        found = self._groups.get(group)
        return {} if found is None else {name: frozenset(found.members[name].held) for name in sorted(found.members)}

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the log is closed")

    def _check_channel(self, group: str, channel: str) -> None:
        if self._backend.policy(channel).ephemeral:
            raise InvalidRequest(f"channel {channel} is ephemeral: it keeps nothing to have a position in")
        if not self._may_read(group, channel):
            raise InvalidRequest(f"channel {channel} is a queue, and belongs to another group")

    def _check_ids(self, channel: str, ids: Iterable[bytes]) -> None:
        end = self._backend.end(channel)
        if any(id > end for id in ids):
            raise InvalidRequest(f"an id lies past the end of channel {channel}")

    def _check_ack(self, group: str, ack: Ack, seat: Seat, outputs: Sequence[Append]) -> None:
        self._check_ids(ack.channel, [*ack.ids] if ack.upto is None else [*ack.ids, ack.upto])
        progress = self._positions(ack.channel).get(group, Progress())
        check_new(ack, progress, outputs)
        count = len(progress.acked) + seat.single_acks_in_flight + len(ack.ids)
        if ack.ids and count > MAX_SINGLE_ACKS:
            passed = 0 if ack.upto is None else sum(id <= ack.upto for id in progress.acked)
            if count - passed > MAX_SINGLE_ACKS:
                raise Overloaded(
                    f"group {group} has {MAX_SINGLE_ACKS} single acknowledgements in {ack.channel} behind an entry that"
                    f" is not acknowledged; acknowledge that one",
                    limit="single_acks",
                )
