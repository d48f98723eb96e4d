"""Decide which member reads which channel of a consumer group, and let only that member move the group's position.

One coordinator runs beside the log, in its owner. Membership is kept in memory only: after a change of owner the
members join again. Positions are durable in the log (`GroupBackend`). An assignment epoch numbers one assignment of one
channel to one member, and is unique over all incarnations of the log's owner; under an epoch that is over no position
moves (`Fenced`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ..clock import Clock
from ..errors import ChannelNotFound, Closed, Fenced, InvalidRequest, Overloaded, TidewalError
from ..log.checks import check_name
from ..log.wal import Append, From, GroupInfo, OnAppended
from .assignment_state import AssignmentState, Done
from .coordinator_client import Ack, AssignedChannel, MemberAssignment
from .membership import Assignment, Group, MemberState
from .progress import Change, GroupBackend, GroupProgress, check_metadata, check_new, group_info
from .subscriptions import Subscription

MAX_SINGLE_ACKS = 10_000  # per channel and group, above what is acknowledged cumulatively
REVOCATION_TIMEOUT_S = 30.0


def epochs(boot: int) -> Iterator[int]:
    """The numbers of assignment epochs and versions in an incarnation of the log's owner, which is its `boot`-th."""
    return itertools.count((boot << 32) + 1)


def _nothing() -> None:
    pass


class GroupCoordinator(AssignmentState):
    """Pure state behind one lock. No method blocks; any thread may call. A call that cannot succeed raises at once; a
    later outcome comes through `done`, which may be called on any thread and before the method returns.

    `clock` measures sessions and revocations. `numbers` are those of assignment epochs and versions, see `epochs`.
    `watch` is called when `expire` gets something to wait for; a caller that calls `expire` periodically anyway needs
    none.
    """

    def __init__(
        self, clock: Clock, backend: GroupBackend, numbers: Iterator[int], *, watch: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(clock, backend, numbers, watch)
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
        revocation_timeout_s: float = REVOCATION_TIMEOUT_S,
    ) -> None:
        """Make `member` a member of the group; when it joins again, its channels are taken from it first.

        `channels` are names and patterns, `start` is where the group begins in a channel in which it has no position.
        Without a session (`session_timeout_s` of None: the member runs in this process) `revocation_timeout_s` says how
        long the member may keep a channel that is being revoked, otherwise the session timeout does. `changed` is
        called, on any thread, when `assignment` would return something new. `done` is called once the first positions
        are durable. Patterns pass over queues that belong to another group. Raises `InvalidRequest`, `ChannelNotFound`
        and `Overloaded` (`limit`: "groups", "members_per_group", "subscriptions", "patterns")."""
        check_name("group", group)
        check_name("member", member)
        subscription = Subscription(channels)
        if session_timeout_s is not None and not session_timeout_s > 0:
            raise InvalidRequest(f"a session timeout of {session_timeout_s} s leaves no time for a session")
        revocation_timeout_s = revocation_timeout_s if session_timeout_s is None else session_timeout_s
        joining = MemberState(
            member, subscription, session_timeout_s, revocation_timeout_s, self._clock.monotonic(), changed
        )
        with self._lock:
            self._check_open()
            for channel in sorted(subscription.names):
                self._check_subscribed(group, channel)
            self._refresh_channels()
            found = self._group(group)
            self._admit(found, joining)
            found.subscribe((channel for channel in self._known if self._may_read(group, channel)), joining, start)

            def positioned(error: TidewalError | None) -> None:
                if error is not None:
                    self._remove(found, joining)
                done(error)

            self._rebalance(found, positioned)

    def beat(self, group: str, member: str) -> None:
        """Note that the member is alive."""
        with self._lock:
            found = self._groups.get(group)
            if found is not None and member in found.members:
                found.members[member].seen_alive = self._clock.monotonic()

    def has_member(self, group: str, member: str) -> bool:
        """Whether the member has joined, and has neither left nor lost its session."""
        with self._lock:
            found = self._groups.get(group)
            return found is not None and member in found.members

    def assignment(self, group: str, member: str) -> MemberAssignment:
        """The channels that the member has. Raises `Fenced` for an unknown member: it must join again."""
        with self._lock:
            found, asking = self._find(group, member)
            held: dict[str, AssignedChannel] = {}
            for channel in sorted(asking.held):
                progress = self._positions(channel).get(group, GroupProgress())
                held[channel] = AssignedChannel(
                    found.assignments[channel].epoch,
                    progress.acked_to,
                    frozenset(progress.acked),
                    progress.metadata,
                )
            revoking = frozenset(channel for channel in held if found.assignments[channel].revoking_since is not None)
            return MemberAssignment(asking.version, held, revoking)

    def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append], done: OnAppended) -> None:
        """Append `outputs` and store what is done, in one commit. No channel of it goes to another member before that
        is decided. Raises `Fenced` for an assignment epoch that is over, `InvalidRequest` for outputs of what is done
        and for metadata over `MAX_METADATA_BYTES`, `Overloaded` (`limit` "single_acks") and what `Wal.submit` raises;
        nothing was queued then."""
        with self._lock:
            found, _ = self._find(group, member)
            assignments = [self._assignment_of(found, member, ack.channel, ack.assignment_epoch) for ack in acks]
            for ack, assignment in zip(acks, assignments, strict=True):
                self._check_ack(group, ack, assignment, outputs)
            changes = [Change(group, ack.channel, ack.upto, tuple(ack.ids), metadata=ack.metadata) for ack in acks]

            def count(sign: int) -> None:
                for ack, assignment in zip(acks, assignments, strict=True):
                    assignment.single_acks_in_flight += sign * len(ack.ids)

            def committed(result: list[bytes] | TidewalError) -> None:
                count(-1)
                self._lock.after(partial(done, result))

            count(+1)
            try:
                self._commit(found, assignments, outputs, changes, committed)
            except TidewalError:
                count(-1)
                raise

    def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        """End the assignment epoch, as `CoordinatorClient.release` does. An epoch that is over is fine."""
        with self._lock:
            found = self._groups.get(group)
            assignment = None if found is None else found.assignments.get(channel)
            if (
                found is not None
                and assignment is not None
                and assignment.holder == member
                and assignment.epoch == assignment_epoch
            ):
                self._unassign(found, assignment)
                self._assign_free(found, [channel])

    def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes, done: Done) -> None:
        """Move the position to `upto`, backward too (b"": to the first entry that is kept), and clear its metadata. The
        assignment epoch ends; the member gets the channel again under a new one, also when storing the position failed.
        Raises `Fenced`, and `InvalidRequest` for an id past the end."""
        with self._lock:
            found, _ = self._find(group, member)
            assignment = self._assignment_of(found, member, channel, assignment_epoch)
            self._check_ids(channel, [upto])
            self._unassign(found, assignment)
            self._reset_position(found, assignment, upto, done)

    def leave(self, group: str, member: str, changed: Callable[[], None] | None = None) -> None:
        """End the membership; the other members get the channels at once. An unknown member is fine. With `changed`,
        only the membership that was joined with it: the member may have joined anew, from elsewhere."""
        with self._lock:
            found = self._groups.get(group)
            leaving = None if found is None else found.members.get(member)
            if found is not None and leaving is not None and changed in (None, leaving.changed):
                self._remove(found, leaving)

    def seek_group(self, group: str, channel: str, upto: bytes, done: Done) -> None:
        """Move the position as `seek` does, for a channel that no member has. Raises `InvalidRequest` while one has it,
        and what `join` raises for a channel that the group may not read."""
        check_name("group", group)
        with self._lock:
            self._check_open()
            self._check_channel(group, channel)
            self._check_ids(channel, [upto])
            self._refresh_channels()
            found = self._group(group)
            assignment = found.assignments.setdefault(channel, Assignment(channel, From.EARLIEST))
            if assignment.holder is not None:
                raise InvalidRequest(f"member {assignment.holder} has {channel} now: seek there, or let it leave first")
            self._reset_position(found, assignment, upto, done)

    def drop_group(self, group: str, done: Done) -> None:
        """Forget the positions of a group. Raises `InvalidRequest` while it has members; an unknown group is
        fine."""
        check_name("group", group)
        with self._lock:
            self._check_open()
            found = self._group(group)
            if found.members or found.forgetting:
                raise InvalidRequest(f"group {group} has {len(found.members)} members: let them leave first")
            found.forgetting = True

            def forgotten(result: list[bytes] | TidewalError) -> None:
                with self._lock:
                    found.forgetting = False
                    self._lock.after(partial(done, result if isinstance(result, TidewalError) else None))
                    self._assign_free(found, list(found.moving))

            try:
                self._backend.forget(group, forgotten)
            except TidewalError:
                found.forgetting = False
                self._forget_empty(found)
                raise

    def groups(self) -> list[GroupInfo]:
        """All groups that have positions or members, by name."""
        with self._lock:
            self._check_open()
            progress: dict[str, dict[str, GroupProgress]] = {name: {} for name in self._groups}
            for channel in sorted(self._backend.channels()):
                for group, each in list(self._positions(channel).items()):
                    progress.setdefault(group, {})[channel] = each
            infos = [group_info(name, found, self._members(name)) for name, found in sorted(progress.items())]
            return [info for info in infos if info.positions or info.members]

    def channels_changed(self) -> None:
        """Give new channels to the groups whose patterns match them, from their first entry on, and remove dropped
        ones. To be called after each creation and each drop (between a drop and a creation of the same name too)."""
        with self._lock:
            if self._groups and not self._closed:
                self._refresh_channels()

    def expire(self) -> None:
        """End sessions that timed out, take away channels whose revocation timed out, and try again to store first
        positions that could not be stored. To be called about twice a second."""
        with self._lock:
            now = self._clock.monotonic()
            for group in list(self._groups.values()):
                for member in list(group.members.values()):
                    timeout_s = member.session_timeout_s
                    if timeout_s is not None and now - member.seen_alive > timeout_s:
                        self._remove(group, member)
                for assignment in [group.assignments[channel] for channel in sorted(group.moving)]:
                    if assignment.holder is not None and assignment.revoking_since is not None:
                        overdue = (
                            now - assignment.revoking_since >= group.members[assignment.holder].revocation_timeout_s
                        )
                        if overdue:
                            self._unassign(group, assignment)
                self._assign_free(group, sorted(group.moving))

    def extend_sessions(self, seconds: float) -> None:
        """Do not count the last `seconds` against any session or revocation: this process did not run, and could
        receive no heartbeat."""
        with self._lock:
            now = self._clock.monotonic()
            for group in self._groups.values():
                for member in group.members.values():
                    member.seen_alive = min(member.seen_alive + seconds, now)
                for assignment in group.assignments.values():
                    if assignment.revoking_since is not None:
                        assignment.revoking_since = min(assignment.revoking_since + seconds, now)

    @property
    def quiet(self) -> bool:
        """`expire` has nothing to wait for."""
        with self._lock:
            return not any(
                group.moving or any(member.session_timeout_s is not None for member in group.members.values())
                for group in self._groups.values()
            )

    def close(self) -> None:
        """Wake all waiting members; from now on every call but `leave`, `release` and `beat` raises `Closed`."""
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                for member in group.members.values():
                    self._new_version(member)

    # ---- lookups and checks -----------------------------------------------------------------------------------------

    def _find(self, group: str, member: str) -> tuple[Group, MemberState]:
        self._check_open()
        found = self._groups.get(group)
        if found is None or member not in found.members:
            raise Fenced(f"{member} is no member of group {group} (any more): join again", group=group, member=member)
        asking = found.members[member]
        asking.seen_alive = self._clock.monotonic()
        return found, asking

    def _assignment_of(self, group: Group, member: str, channel: str, assignment_epoch: int) -> Assignment:
        assignment = group.assignments.get(channel)
        if assignment is None or assignment.holder != member or assignment.epoch != assignment_epoch:
            raise Fenced(
                f"{channel} was taken from {member} of group {group.name}: its entries are delivered again",
                channel=channel,
                term=assignment_epoch,
                group=group.name,
            )
        return assignment

    def _members(self, group: str) -> dict[str, frozenset[str]]:
        found = self._groups.get(group)
        return {} if found is None else {name: frozenset(found.members[name].held) for name in sorted(found.members)}

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the log is closed")

    def _check_subscribed(self, group: str, name: str) -> None:
        """Check the channel of that name, or where there is none the partitions of the foreign topic."""
        try:
            self._check_channel(group, name)
        except ChannelNotFound:
            partitions = [channel for channel in self._backend.channels() if channel.startswith(f"{name}:")]
            if not partitions:
                raise
            for channel in partitions:
                self._check_channel(group, channel)

    def _check_channel(self, group: str, channel: str) -> None:
        if self._backend.policy(channel).ephemeral:
            raise InvalidRequest(f"channel {channel} is ephemeral: it keeps nothing to have a position in")
        if not self._may_read(group, channel):
            raise InvalidRequest(f"channel {channel} is a queue, and belongs to another group")

    def _check_ids(self, channel: str, ids: Iterable[bytes]) -> None:
        end = self._backend.end(channel)
        if any(id > end for id in ids):
            raise InvalidRequest(f"an id lies past the end of channel {channel}")

    def _check_ack(self, group: str, ack: Ack, assignment: Assignment, outputs: Sequence[Append]) -> None:
        check_metadata(ack.metadata)
        self._check_ids(ack.channel, [*ack.ids] if ack.upto is None else [*ack.ids, ack.upto])
        progress = self._positions(ack.channel).get(group, GroupProgress())
        check_new(ack, progress, outputs)
        count = len(progress.acked) + assignment.single_acks_in_flight + len(ack.ids)
        if ack.ids and count > MAX_SINGLE_ACKS:
            passed = 0 if ack.upto is None else sum(id <= ack.upto for id in progress.acked)
            if count - passed > MAX_SINGLE_ACKS:
                raise Overloaded(
                    f"group {group} has {MAX_SINGLE_ACKS} single acknowledgements in {ack.channel} behind an entry that"
                    f" is not acknowledged; acknowledge that one",
                    limit="single_acks",
                )
