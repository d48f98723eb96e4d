"""Which member has which channel of a group: one holder at a time, and no new one while a commit of the channel is in
flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from ..clock import Clock
from ..errors import ChannelNotFound, Overloaded, TidewalError
from ..log.wal import Append, Delivery, From
from .callback_lock import CallbackLock
from .membership import Assignment, Group, MemberState
from .progress import Change, GroupBackend, GroupProgress

MAX_GROUPS = 1_000
MAX_MEMBERS_PER_GROUP = 1_000

Done: TypeAlias = Callable[[TidewalError | None], None]


class AssignmentState:
    """The mechanism under the coordinator. Every method is to be called with the lock held.

    `numbers` are those of assignment epochs and versions: they rise, and never repeat. `watch` is called when
    `GroupCoordinator.expire` gets something to wait for.
    """

    def __init__(self, clock: Clock, backend: GroupBackend, numbers: Iterator[int], watch: Callable[[], None]) -> None:
        self._clock = clock
        self._backend = backend
        self._watch = watch
        self._numbers = numbers
        self._lock = CallbackLock()
        self._groups: dict[str, Group] = {}
        self._known: frozenset[str] = frozenset()  # channels

    # ---- members ----------------------------------------------------------------------------------------------------

    def _admit(self, group: Group, member: MemberState) -> None:
        before = group.members.get(member.id)
        if before is None and len(group.members) >= MAX_MEMBERS_PER_GROUP:
            raise Overloaded(f"group {group.name} has {MAX_MEMBERS_PER_GROUP} members", limit="members_per_group")
        if before is not None:
            for channel in list(before.held):
                self._unassign(group, group.assignments[channel])
            group.unsubscribe(before)
        group.members[member.id] = member
        self._new_version(member)
        if member.session_timeout_s is not None:
            self._lock.after(self._watch)

    def _remove(self, group: Group, member: MemberState) -> None:
        """Take a member out, unless it has joined again meanwhile."""
        with self._lock:
            if group.members.get(member.id) is not member:
                return
            for channel in list(member.held):
                self._unassign(group, group.assignments[channel])
            del group.members[member.id]
            group.unsubscribe(member)
            self._rebalance(group)

    # ---- channels ---------------------------------------------------------------------------------------------------

    def _rebalance(self, group: Group, then: Done | None = None) -> None:
        group.plan_targets()
        for assignment in group.assignments.values():
            if assignment.holder is None:
                continue
            revoking = assignment.holder != assignment.target
            if revoking != (assignment.revoking_since is not None):
                assignment.revoking_since = self._clock.monotonic() if revoking else None
                self._new_version(group.members[assignment.holder])
        self._assign_free(group, sorted(group.moving), then)

    def _assign_free(self, group: Group, channels: Iterable[str], then: Done | None = None) -> None:
        """Assign channels that have no holder to their targets. Where the group has no position yet, a first one is
        stored before; `then` is called with the outcome."""
        starting: list[Assignment] = []
        for channel in channels:
            assignment = group.assignments.get(channel)
            if assignment is None or assignment.holder is not None or assignment.commits_in_flight or group.forgetting:
                continue
            if assignment.target is None:
                group.moving.discard(channel)
                del group.assignments[channel]
            elif group.name in self._positions(channel):
                self._assign(group, assignment, group.members[assignment.target])
            else:
                starting.append(assignment)
        if group.moving:
            self._lock.after(self._watch)
        if starting:
            self._start(group, starting, then)
        elif then is not None:
            self._lock.after(partial(then, None))
        self._forget_empty(group)

    def _start(self, group: Group, assignments: Sequence[Assignment], then: Done | None) -> None:
        """Store where the group begins. A failure without a `then` to receive it is not lost: `expire` tries again."""

        def started(result: list[bytes] | TidewalError) -> None:
            if then is not None:
                self._lock.after(partial(then, result if isinstance(result, TidewalError) else None))

        changes: list[Change] = []
        for assignment in assignments:
            with suppress(ChannelNotFound):  # dropped just now: `channels_changed` removes it
                at = self._backend.end if assignment.start is From.LATEST else self._backend.begin
                changes.append(Change(group.name, assignment.channel, at(assignment.channel), reset=True))
        try:
            self._commit(group, [group.assignments[change.channel] for change in changes], [], changes, started)
        except TidewalError as error:
            started(error)

    def _assign(self, group: Group, assignment: Assignment, member: MemberState) -> None:
        assignment.holder, assignment.epoch, assignment.revoking_since = member.id, next(self._numbers), None
        group.moving.discard(assignment.channel)
        member.held.add(assignment.channel)
        self._new_version(member)

    def _unassign(self, group: Group, assignment: Assignment) -> None:
        if assignment.holder is not None:
            holder = group.members[assignment.holder]
            holder.held.discard(assignment.channel)
            self._new_version(holder)
        assignment.holder, assignment.epoch, assignment.revoking_since = None, 0, None
        group.moving.add(assignment.channel)

    def _new_version(self, member: MemberState) -> None:
        member.version = next(self._numbers)
        self._lock.after(member.changed)

    def _refresh_channels(self) -> None:
        now = frozenset(self._backend.channels())
        new, gone = sorted(now - self._known), self._known - now
        self._known = now
        for group in list(self._groups.values()) if new or gone else ():
            gone_here = gone & group.assignments.keys()
            for channel in gone_here:
                self._unassign(group, group.assignments[channel])
                group.moving.discard(channel)
                del group.assignments[channel]
            new_here = [channel for channel in new if self._may_read(group.name, channel)]
            for member in group.members.values():
                group.subscribe(new_here, member, From.EARLIEST)
            if gone_here or not group.assignments.keys().isdisjoint(new_here):
                self._rebalance(group)

    # ---- commits ----------------------------------------------------------------------------------------------------

    def _commit(
        self,
        group: Group,
        assignments: Sequence[Assignment],
        outputs: Sequence[Append],
        changes: Sequence[Change],
        then: Callable[[list[bytes] | TidewalError], None],
    ) -> None:
        """Commit, and let no channel of the assignments change its holder before it is decided. `then` is called with
        the lock held."""
        for assignment in assignments:
            assignment.commits_in_flight += 1

        def decided(result: list[bytes] | TidewalError) -> None:
            failed = isinstance(result, TidewalError)
            with self._lock:
                for assignment in assignments:
                    assignment.commits_in_flight -= 1
                then(result)
                # After a failure, storing a first position is not tried again at once, but by `expire`.
                still = [
                    assignment.channel
                    for assignment in assignments
                    if group.assignments.get(assignment.channel) is assignment
                ]
                self._assign_free(group, [name for name in still if not failed or group.name in self._positions(name)])

        try:
            self._backend.commit(outputs, changes, decided)
        except TidewalError:
            for assignment in assignments:
                assignment.commits_in_flight -= 1
            self._forget_empty(group)
            raise

    def _reset_position(self, group: Group, assignment: Assignment, upto: bytes, done: Done) -> None:
        def moved(result: list[bytes] | TidewalError) -> None:
            self._lock.after(partial(done, result if isinstance(result, TidewalError) else None))

        try:
            change = Change(group.name, assignment.channel, upto or self._backend.begin(assignment.channel), reset=True)
            self._commit(group, [assignment], [], [change], moved)
        except TidewalError:
            self._assign_free(group, [assignment.channel])
            raise

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> Group:
        found = self._groups.get(name)
        if found is None:
            known = set(self._groups).union(*(self._positions(channel) for channel in self._backend.channels()))
            if name not in known and len(known) >= MAX_GROUPS:
                raise Overloaded(f"there are {MAX_GROUPS} groups: drop one that is not used", limit="groups")
            found = self._groups[name] = Group(name)
        return found

    def _forget_empty(self, group: Group) -> None:
        if group.idle and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _positions(self, channel: str) -> Mapping[str, GroupProgress]:
        try:
            return self._backend.progress(channel)
        except ChannelNotFound:
            return {}

    def _may_read(self, group: str, channel: str) -> bool:
        """A queue belongs to the first group that has a position in it or subscribes to it."""
        try:
            if self._backend.policy(channel).delivery is not Delivery.QUEUE:
                return True
        except ChannelNotFound:
            return False
        asking = (name for name, other in self._groups.items() if channel in other.assignments)
        return not {*self._positions(channel), *asking} - {group}
