"""The state of one group, as the records of its log make it: whoever reads them in order has the same.

What a member wants is a record, and where it lies in the log decides: an acknowledgement behind the record that took
the channel away moves nothing. Nothing here knows of time or of anything else that is not in the records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ...runtime.errors import ChannelNotFound, TidewalError, Unavailable
from ...runtime.groups.coordinator import Coordinator
from ...runtime.groups.link import Shares
from ...runtime.groups.membership import Group, Member, Seat
from ...runtime.groups.progress import Change, Progress
from ...runtime.groups.subscriptions import Subscription
from ...runtime.wal import Append, ChannelPolicy, Delivery, From, GroupInfo, OnAppended
from .group_records import (
    Beat,
    Channels,
    Command,
    Commit,
    Drop,
    Expel,
    Found,
    Join,
    Leave,
    Output,
    Published,
    Release,
    Seek,
    SeekGroup,
    Stage,
    outputs_from_plain,
    outputs_to_plain,
)


@dataclass(frozen=True, slots=True)
class Decided:
    """A commit whose outputs are on their way into their channels. `inputs` are the channels that it acknowledged."""

    token: bytes
    member: str
    publisher: str
    outputs: list[Output]
    after: dict[str, bytes]
    inputs: frozenset[str]

    def follows(self, earlier: Decided) -> bool:
        """Whether its outputs may only be published behind those of an `earlier` commit: what comes of one channel
        keeps its order also where the channel has changed hands, and a publisher's numbers only rise."""
        return self.publisher == earlier.publisher or not self.inputs.isdisjoint(earlier.inputs)


class GroupState:
    """One group. Not thread-safe."""

    def __init__(self, group: str, changed: Callable[[str], None]) -> None:
        """`changed` is called with a member's id when its shares are others than before."""
        self.group = group
        self.known: dict[str, Found] = {}
        self.dropped = False
        self.last_beats: dict[str, int] = {}  # by process
        self.undelivered: dict[bytes, Decided] = {}  # commits whose outputs may not be in their channels yet, in order
        self._changed = changed
        self._joined: dict[str, Join] = {}
        self._staged: dict[str, tuple[bytes, list[Output]]] = {}  # by member, of its latest commit
        self._positions = _Positions(group, self.known)
        self._seats = _Seats(self._positions)

    # ---- what it tells ----------------------------------------------------------------------------------------------

    def shares(self, member: str) -> Shares:
        """Raises `Fenced` for an unknown member."""
        return self._seats.shares(self.group, member)

    def info(self) -> GroupInfo | None:
        """None while it has neither positions nor members."""
        return next(iter(self._seats.groups()), None)

    @property
    def members(self) -> Mapping[str, Join]:
        """What each of the members joined with."""
        return self._joined

    def asked_for(self, channel: str) -> bool:
        """Whether any member asks for the channel."""
        group = self._seats.find(self.group)
        return group is not None and any(member.subscription.takes(channel) for member in group.members.values())

    def wanted_back(self) -> list[tuple[str, str, int]]:
        """The member, channel and lease of each channel that is to go to somebody else."""
        group = self._seats.find(self.group)
        if group is None:
            return []
        seats = group.seats.values()
        return [(s.holder, s.channel, s.lease) for s in seats if s.holder is not None and s.wanted_since is not None]

    # ---- what changes it --------------------------------------------------------------------------------------------

    def apply(self, token: bytes, command: Command) -> None:
        """Let the next record of the log take effect. Raises what it is refused with; it has changed nothing then."""
        match command:
            case Join():
                self._join(command)
            case Beat(process, number):
                if any(joined.process == process for joined in self._joined.values()):
                    self.last_beats[process] = number
            case Leave(member):
                self._remove(member)
            case Expel(member, last_beat):
                joined = self._joined.get(member)
                if joined is not None and self.last_beats.get(joined.process, 0) == last_beat:
                    self._remove(member)
            case Release(member, channel, lease):
                self._seats.release(self.group, member, channel, lease)
            case Stage(member, batch, outputs):
                if member in self._joined:
                    of, before = self._staged.get(member, (b"", []))
                    self._staged[member] = batch, [*before, *outputs] if of == batch else outputs
            case Commit():
                self._commit(token, command)
            case Published(commits):
                for commit in commits:
                    self.undelivered.pop(commit, None)
            case Seek(member, channel, lease, upto):
                _at_once(partial(self._seats.seek, self.group, member, channel, lease, upto))
            case SeekGroup(channel, found, upto):
                self._learn({channel: found})
                _at_once(partial(self._seats.seek_group, self.group, channel, upto))
            case Channels(found, gone):
                known = self.known
                self._forget([name for name in gone if name in known and known[name].made == gone[name]])
                self._learn(found)
            case Drop():
                _at_once(partial(self._seats.drop_group, self.group))
                self.dropped = True
            case _:  # a picture changes nothing
                return

    def _join(self, join: Join) -> None:
        self._learn(join.found)
        begin = partial(self._seats.join, self.group, join.member, join.channels, join.start, None)
        before = self._joined.get(join.member)
        self._joined[join.member] = join
        try:
            _at_once(lambda done: begin(partial(self._changed, join.member), done, hand_over_s=join.session_timeout_s))
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
        self._seats.leave(self.group, member)
        self._changed(member)

    def _commit(self, token: bytes, commit: Commit) -> None:
        of, staged = self._staged.pop(commit.member, (b"", []))
        if of != commit.batch:
            staged = []
        if len(staged) != commit.staged:  # one of its records did not arrive
            raise Unavailable("a part of the outputs of this commit is missing: nothing of it counts")
        outputs = [*staged, *commit.outputs]
        appends = [output.append for output in outputs]
        _at_once(partial(self._seats.commit, self.group, commit.member, commit.acks, appends))
        if outputs:
            inputs = frozenset(ack.channel for ack in commit.acks)
            self.undelivered[token] = Decided(token, commit.member, commit.publisher, outputs, commit.after, inputs)

    def _learn(self, found: Mapping[str, Found]) -> None:
        """Note channels. One with the name of a known one takes its place if it is a later one."""
        late = [name for name, each in found.items() if (now := self.known.get(name)) and now.made != each.made]
        self._forget(name for name in late if self.known[name].ledger < found[name].ledger)
        for name in sorted(found.keys() - self.known.keys()):
            self.known[name] = found[name]
        for name in found.keys() & self.known.keys():  # where it begins and ends, for who has no position in it yet
            if self.known[name].made == found[name].made:
                self.known[name] = found[name]
        self._seats.channels_changed()

    def _forget(self, channels: Iterable[str]) -> None:
        for channel in sorted(channels):
            del self.known[channel]
            self._positions.by_channel.pop(channel, None)
        self._seats.channels_changed()

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def picture(self) -> dict[str, Any]:
        """The whole state, for msgpack."""
        return {
            "known": {name: list(found) for name, found in self.known.items()},
            "positions": {
                name: [progress.acked_to, sorted(progress.acked)]
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
            "seats": self._seats.picture(self.group),
        }

    def restore(self, picture: Mapping[str, Any]) -> None:
        """Become what the picture shows; an empty one shows a new group."""
        if not picture:
            return
        self.known.update((name, Found(*found)) for name, found in picture["known"].items())
        for name, (acked_to, acked) in picture["positions"].items():
            self._positions.by_channel[name] = Progress(acked_to, set(acked))
        for member, process, channels, start, session_timeout_s in picture["members"]:
            self._joined[member] = Join(member, process, channels, From(start), session_timeout_s, {})
        self.last_beats.update(picture["last_beats"])
        for token, member, publisher, plain, after, inputs in picture["undelivered"]:
            outputs = outputs_from_plain(plain)
            self.undelivered[token] = Decided(token, member, publisher, outputs, after, frozenset(inputs))
        for member, batch, outputs in picture["staged"]:
            self._staged[member] = batch, outputs_from_plain(outputs)
        members = {
            each.member: Member(
                each.member,
                Subscription(each.channels),
                None,
                each.session_timeout_s,
                0.0,
                partial(self._changed, each.member),
            )
            for each in self._joined.values()
        }
        self._seats.restore(self.group, members, picture["seats"])


def _at_once(begin: Callable[[Callable[[Any], None]], None]) -> None:
    """Begin what calls back before it returns here, and raise what it calls back with."""
    results: list[Any] = []
    begin(results.append)
    (result,) = results
    if isinstance(result, TidewalError):
        raise result


class _Positions:
    """`GroupBackend` in memory: what is applied is durable already, being in the log."""

    def __init__(self, group: str, known: Mapping[str, Found]) -> None:
        self.by_channel: dict[str, Progress] = {}
        self._group = group
        self._known = known

    def channels(self) -> Collection[str]:
        return self._known.keys()

    def policy(self, channel: str) -> ChannelPolicy:
        self._find(channel)
        return ChannelPolicy(delivery=Delivery.KEEP)  # whose queue a channel is was settled before it became known

    def progress(self, channel: str) -> Mapping[str, Progress]:
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
                self.by_channel.setdefault(change.channel, Progress()).apply(change)
        done([])

    def forget(self, group: str, done: OnAppended) -> None:
        self.by_channel.clear()
        done([])

    def _find(self, channel: str) -> Found:
        found = self._known.get(channel)
        if found is None:
            raise ChannelNotFound(f"no channel {channel}; create it first", channel=channel)
        return found


class _Seats(Coordinator):
    """The coordinator, of whose time nothing passes, and whose state can be carried elsewhere."""

    def __init__(self, positions: _Positions) -> None:
        super().__init__(_Timeless(), positions, 0)
        self._numbers = self._counted = _Numbers.behind(0)

    def find(self, name: str) -> Group | None:
        return self._groups.get(name)

    def picture(self, name: str) -> list[Any]:
        group = self._groups.get(name, Group(name))
        seats = [
            [
                *(seat.channel, seat.start.value, seat.target, seat.holder, seat.lease),
                *(seat.wanted_since is not None, sorted(seat.subscribers)),
            ]
            for seat in group.seats.values()
        ]
        return [self._counted.last, sorted(self._known), seats, sorted(group.moving)]

    def restore(self, name: str, members: dict[str, Member], picture: list[Any]) -> None:
        last, known, seats, moving = picture
        self._numbers = self._counted = _Numbers.behind(last)
        self._known = frozenset(known)
        group = Group(name, members=members, moving=set(moving))
        for channel, start, target, holder, lease, wanted, subscribers in seats:
            since = 0.0 if wanted else None
            seat = Seat(channel, From(start), target, holder, lease, since, subscribers=frozenset(subscribers))
            group.seats[channel] = seat
            if holder is not None:
                members[holder].held.add(channel)
        for member in members.values():
            member.version = last  # not below what anybody has seen
        if members:
            self._groups[name] = group

    def _check_ids(self, channel: str, ids: Any) -> None:
        """Whoever wrote the record has checked them: what is past the end depends on when one looks."""


if TYPE_CHECKING:
    Count = itertools.count[int]
else:
    Count = itertools.count  # is not generic when it runs


class _Numbers(Count):
    """Counts, and tells where it is."""

    last: int

    @classmethod
    def behind(cls, last: int) -> Self:
        """Count on behind this number."""
        numbers = cls(last + 1)
        numbers.last = last
        return numbers

    def __next__(self) -> int:
        self.last = super().__next__()
        return self.last


class _Timeless:
    """A `Clock` that stands still."""

    def wall_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0
