"""The state of one group, folded from the records of its log: every process that reads them in order has the same
state.

A member's command is a record, and its place in the log decides: an acknowledgement after the record that revoked the
channel moves no position. The state depends on nothing but the records, not even on time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..clock import Clock
from ..errors import TidewalError, Unavailable
from ..log.checks import not_found
from ..log.wal import Append, ChannelPolicy, Delivery, From, GroupInfo, OnAppended
from ..replicated.records import Event
from .commands import (
    ChannelIdentity,
    ChannelsChanged,
    Command,
    CommitOutputs,
    Drop,
    EvictMember,
    Join,
    Leave,
    Output,
    ProcessBeat,
    Published,
    Release,
    Seek,
    SeekGroup,
    Stage,
    command_of,
    outputs_from_plain,
    outputs_to_plain,
)
from .coordinator import GroupCoordinator
from .coordinator_client import MemberAssignment
from .membership import Assignment, Group, MemberState
from .progress import Change, GroupProgress
from .subscriptions import Subscription


@dataclass(frozen=True, slots=True)
class Decided:
    """A decided commit whose outputs may not be in their channels yet. `inputs` are the channels that it
    acknowledged."""

    token: bytes
    member: str
    publisher: str
    outputs: list[Output]
    after: dict[str, bytes]
    inputs: frozenset[str]

    def follows(self, earlier: Decided) -> bool:
        """Whether its outputs may only be published after those of an `earlier` commit: the outputs for one input
        channel keep their order also when the channel is assigned anew, and a publisher's numbers ascend."""
        return self.publisher == earlier.publisher or not self.inputs.isdisjoint(earlier.inputs)


class GroupState:
    """The state of one group. Not thread-safe."""

    def __init__(self, group: str, changed: Callable[[str], None]) -> None:
        """`changed` is called with a member's id when its shares are others than before."""
        self.group = group
        self.known: dict[str, ChannelIdentity] = {}
        self.dropped: bool = False
        self.last_beats: dict[str, int] = {}  # by process
        self.undelivered: dict[bytes, Decided] = {}  # commits whose outputs may not be in their channels yet, in order
        self._changed = changed
        self._joined: dict[str, Join] = {}
        self._staged: dict[str, tuple[bytes, list[Output]]] = {}  # by member, of its latest commit
        self._positions = _Positions(group, self.known)
        self._assignments = _AssignmentState(self._positions)

    # ---- queries ---------------------------------------------------------------------------------------------------

    def assignment(self, member: str) -> MemberAssignment:
        """The assignment of a member. Raises `Fenced` for an unknown one."""
        return self._assignments.assignment(self.group, member)

    def info(self) -> GroupInfo | None:
        """The group's positions and members; None while it has neither."""
        return next(iter(self._assignments.groups()), None)

    @property
    def members(self) -> Mapping[str, Join]:
        """The members, each with the record with which it joined."""
        return self._joined

    def asked_for(self, channel: str) -> bool:
        """Whether any member asks for the channel."""
        group = self._assignments.find(self.group)
        return group is not None and any(member.subscription.takes(channel) for member in group.members.values())

    def revoking(self) -> list[tuple[str, str, int]]:
        """The member, channel and assignment epoch of each channel that is being revoked."""
        group = self._assignments.find(self.group)
        if group is None:
            return []
        assignments = group.assignments.values()
        return [
            (s.holder, s.channel, s.epoch) for s in assignments if s.holder is not None and s.revoking_since is not None
        ]

    # ---- commands --------------------------------------------------------------------------------------------------

    def apply(self, token: bytes, command: Command) -> None:
        """Apply the next record of the log, with its token. Raises the error with which the command is refused; then no
        position and no assignment has changed."""
        match command:
            case Join():
                self._join(command)
            case ProcessBeat(process, number):
                if any(joined.process == process for joined in self._joined.values()):
                    self.last_beats[process] = number
            case Leave(member):
                self._remove(member)
            case EvictMember(member, last_beat):
                joined = self._joined.get(member)
                if joined is not None and self.last_beats.get(joined.process, 0) == last_beat:
                    self._remove(member)
            case Release(member, channel, epoch):
                self._assignments.release(self.group, member, channel, epoch)
            case Stage(member, batch, outputs):
                if member in self._joined:
                    of, before = self._staged.get(member, (b"", []))
                    self._staged[member] = batch, [*before, *outputs] if of == batch else outputs
            case CommitOutputs():
                self._commit(token, command)
            case Published(commits):
                for commit in commits:
                    self.undelivered.pop(commit, None)
            case Seek(member, channel, epoch, upto):
                _at_once(partial(self._assignments.seek, self.group, member, channel, epoch, upto))
            case SeekGroup(channel, found, upto):
                self._learn({channel: found})
                _at_once(partial(self._assignments.seek_group, self.group, channel, upto))
            case ChannelsChanged(found, gone):
                known = self.known
                self._forget([name for name in gone if name in known and known[name].incarnation == gone[name]])
                self._learn(found)
            case Drop():
                _at_once(partial(self._assignments.drop_group, self.group))
                self.dropped = True

    def _join(self, join: Join) -> None:
        self._assignments.number_above(join.numbers_from)
        self._learn(join.found)
        begin = partial(self._assignments.join, self.group, join.member, join.channels, join.start, None)
        before = self._joined.get(join.member)
        self._joined[join.member] = join
        try:
            _at_once(
                lambda done: begin(
                    partial(self._changed, join.member), done, revocation_timeout_s=join.session_timeout_s
                )
            )
        except TidewalError:
            if before is None:
                del self._joined[join.member]
            else:
                self._joined[join.member] = before
            raise
        self.last_beats.setdefault(join.process, 0)

    def _remove(self, member: str) -> None:
        joined = self._joined.pop(member, None)
        if joined is None:
            return
        if all(other.process != joined.process for other in self._joined.values()):
            self.last_beats.pop(joined.process, None)
        self._staged.pop(member, None)
        self._assignments.leave(self.group, member)
        self._changed(member)

    def _commit(self, token: bytes, commit: CommitOutputs) -> None:
        of, staged = self._staged.pop(commit.member, (b"", []))
        if of != commit.batch:
            staged = []
        if len(staged) != commit.staged:  # one of its records was not stored
            raise Unavailable("a part of the outputs of this commit is missing: it has no effect")
        outputs = [*staged, *commit.outputs]
        appends = [output.append for output in outputs]
        _at_once(partial(self._assignments.commit, self.group, commit.member, commit.acks, appends))
        if outputs:
            inputs = frozenset(ack.channel for ack in commit.acks)
            self.undelivered[token] = Decided(token, commit.member, commit.publisher, outputs, commit.after, inputs)

    def _learn(self, found: Mapping[str, ChannelIdentity]) -> None:
        """Note channels. A later channel replaces the known one of its name."""
        late = [
            name
            for name, each in found.items()
            if (now := self.known.get(name)) and now.incarnation != each.incarnation
        ]
        self._forget(name for name in late if self.known[name].generation < found[name].generation)
        for name in sorted(found.keys() - self.known.keys()):
            self.known[name] = found[name]
        for name in found.keys() & self.known.keys():  # its beginning and end, for members without a position in it
            if self.known[name].incarnation == found[name].incarnation:
                self.known[name] = found[name]
        self._assignments.channels_changed()

    def _forget(self, channels: Iterable[str]) -> None:
        for channel in sorted(channels):
            del self.known[channel]
            self._positions.by_channel.pop(channel, None)
        self._assignments.channels_changed()

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def to_wire(self) -> dict[str, Any]:
        """The whole state in its wire form, for msgpack."""
        return {
            "known": {name: list(found) for name, found in self.known.items()},
            "positions": {
                name: [progress.acked_to, sorted(progress.acked), progress.metadata]
                for name, progress in self._positions.by_channel.items()
            },
            "members": [
                [each.member, each.process, each.channels, each.start.value, each.session_timeout_s]
                for each in self._joined.values()
            ],
            "last_beats": self.last_beats,
            "undelivered": [
                [token, each.member, each.publisher, outputs_to_plain(each.outputs), each.after, sorted(each.inputs)]
                for token, each in self.undelivered.items()
            ],
            "staged": [[member, batch, outputs_to_plain(outs)] for member, (batch, outs) in self._staged.items()],
            "seats": self._assignments.to_wire(self.group),
        }

    def restore(self, wire: Mapping[str, Any]) -> None:
        """Restore the state from its wire form; an empty one is a new group."""
        if not wire:
            return
        self.known.update((name, ChannelIdentity(*found)) for name, found in wire["known"].items())
        for name, (acked_to, acked, *metadata) in wire["positions"].items():  # older snapshots have no metadata
            self._positions.by_channel[name] = GroupProgress(acked_to, set(acked), *metadata)
        for member, process, channels, start, session_timeout_s in wire["members"]:
            self._joined[member] = Join(member, process, channels, From(start), session_timeout_s, {})
        self.last_beats.update(wire["last_beats"])
        for token, member, publisher, plain, after, inputs in wire["undelivered"]:
            outputs = outputs_from_plain(plain)
            self.undelivered[token] = Decided(token, member, publisher, outputs, after, frozenset(inputs))
        for member, batch, outputs in wire["staged"]:
            self._staged[member] = batch, outputs_from_plain(outputs)
        members = {
            each.member: MemberState(
                each.member,
                Subscription(each.channels),
                None,
                each.session_timeout_s,
                0.0,
                partial(self._changed, each.member),
            )
            for each in self._joined.values()
        }
        self._assignments.restore(self.group, members, wire["seats"])


class GroupMachine:
    """`GroupState` as a `StateMachine`."""

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.last: tuple[bytes, Command] | None = None  # the token and command applied last, or refused

    def apply(self, event: Event) -> None:
        """`StateMachine.apply`."""
        self.last = None
        self.last = command_of(event)
        self.state.apply(*self.last)

    def snapshot(self) -> object:
        """`StateMachine.snapshot`."""
        return self.state.to_wire()

    def restore(self, snapshot: Any) -> None:
        """`StateMachine.restore`."""
        self.state.restore(snapshot)


def _at_once(begin: Callable[[Callable[[Any], None]], None]) -> None:
    """Call `begin`, whose callback is called before it returns, and raise the error that it is called with, if any."""
    results: list[Any] = []
    begin(results.append)
    (result,) = results
    if isinstance(result, TidewalError):
        raise result


class _Positions:
    """`GroupBackend` in memory: applied changes are durable already, since they are in the log."""

    def __init__(self, group: str, known: Mapping[str, ChannelIdentity]) -> None:
        self.by_channel: dict[str, GroupProgress] = {}
        self._group = group
        self._known = known

    def channels(self) -> Collection[str]:
        return self._known.keys()

    def policy(self, channel: str) -> ChannelPolicy:
        self._find(channel)
        return ChannelPolicy(delivery=Delivery.KEEP)  # the queue was bound before the channel became known

    def progress(self, channel: str) -> Mapping[str, GroupProgress]:
        self._find(channel)
        progress = self.by_channel.get(channel)
        return {} if progress is None else {self._group: progress}

    def begin(self, channel: str) -> bytes:
        return self._find(channel).begin

    def end(self, channel: str) -> bytes:
        return self._find(channel).end

    def commit(self, outputs: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        for change in changes:
            if change.channel in self._known:
                self.by_channel.setdefault(change.channel, GroupProgress()).apply(change)
        done([])

    def forget(self, group: str, done: OnAppended) -> None:
        self.by_channel.clear()
        done([])

    def _find(self, channel: str) -> ChannelIdentity:
        found = self._known.get(channel)
        if found is None:
            raise not_found(channel)
        return found


class _AssignmentState(GroupCoordinator):
    """The coordinator with a clock that stands still, and a state that can be stored and restored."""

    def __init__(self, positions: _Positions) -> None:
        self._counted = _Numbers()
        super().__init__(_Timeless(), positions, self._counted)

    def find(self, name: str) -> Group | None:
        return self._groups.get(name)

    def number_above(self, number: int) -> None:
        self._counted.last = max(self._counted.last, number)

    def to_wire(self, name: str) -> list[Any]:
        group = self._groups.get(name, Group(name))
        assignments = [
            [
                *(assignment.channel, assignment.start.value, assignment.target, assignment.holder, assignment.epoch),
                *(assignment.revoking_since is not None, sorted(assignment.subscribers)),
            ]
            for assignment in group.assignments.values()
        ]
        return [self._counted.last, sorted(self._known), assignments, sorted(group.moving)]

    def restore(self, name: str, members: dict[str, MemberState], wire: list[Any]) -> None:
        last, known, assignments, moving = wire
        self._counted.last = last
        self._known = frozenset(known)
        group = Group(name, members=members, moving=set(moving))
        for channel, start, target, holder, epoch, wanted, subscribers in assignments:
            since = 0.0 if wanted else None
            assignment = Assignment(
                channel, From(start), target, holder, epoch, since, subscribers=frozenset(subscribers)
            )
            group.assignments[channel] = assignment
            if holder is not None:
                members[holder].held.add(channel)
        for member in members.values():
            member.version = last  # not below a version that a member has seen
        if members:
            self._groups[name] = group

    def _check_ids(self, channel: str, ids: Any) -> None:
        """The writer of the record has checked them: here the result would depend on when the end is read."""


class _Numbers(Iterator[int]):
    """Counts, and has the last number."""

    last = 0

    def __next__(self) -> int:
        self.last += 1
        return self.last


class _Timeless(Clock):
    """One that stands still."""

    def wall_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0
