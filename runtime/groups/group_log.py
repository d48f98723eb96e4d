"""The log of one group: a topic of its own, followed by each process with a member in it, and the state that it folds.

It is a replicated state without leader: a member's command is a record, and takes effect where it lies in the log.
Sessions are judged by the log as well: each process appends heartbeats, and counts how many of its own lie after
the last record of another process. So no clocks are compared, and a process that was busy or stopped for a while first
reads the records of the meantime.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from ..clock import Clock
from ..errors import BadRecord, ChannelNotFound, Closed, Fenced, TidewalError, Unavailable, of_unknown_outcome
from ..log.record import RecordType
from ..log.wal import Entry
from ..replicated.fold import Applied
from ..replicated.follower import ReplicatedLog
from ..replicated.replica import Replica, SnapshotPacing
from .commands import Command, EvictMember, Join, Leave, ProcessBeat, Release, event_of
from .coordinator_client import MemberAssignment
from .group_state import GroupMachine, GroupState

log: logging.Logger = logging.getLogger("tidewal.groups")

T = TypeVar("T")

BEATS_PER_TIMEOUT = 3  # so that two may come late
RECORDS_PER_SNAPSHOT = 2_000
MOST_BEATS_UNDER_WAY = 1_000
HOLDER = "group"  # holds the records that are not in a snapshot


class GroupLogHost(ReplicatedLog, Protocol):
    """What following a group needs of the WAL."""

    @property
    def process(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...


def _log_bad(topic: str, entry: Entry, error: BadRecord) -> None:
    log.warning(
        "skipped an entry of %s that is no record of a group, id %s: %s",
        topic,
        entry.id.hex(),
        error.message,
        extra={"channel": topic},
    )


class GroupLog(Replica[GroupMachine]):
    """The log of one group, between `open` and `close`. Belongs to one event loop; only `beat` may be called from any
    thread."""

    def __init__(self, wal: GroupLogHost, group: str, topic: str, *, clock: Clock, new_id: Callable[[], bytes]) -> None:
        """`topic` is the channel. `clock` measures silence; `new_id` returns ids that were never used before."""
        super().__init__(
            wal,
            topic,
            lambda: GroupMachine(GroupState(group, self._changed)),
            RecordType.GROUP,
            led=False,
            author=f"{wal.process}-{new_id().hex()}",
            holder=HOLDER,
            pacing=SnapshotPacing(records=RECORDS_PER_SNAPSHOT),
            on_bad=_log_bad,
        )
        self.group = group
        self.topic = topic
        # The members of this process, and the events that their assignments set.
        self.local: dict[str, asyncio.Event] = {}
        self.on_command: Callable[[bytes, Command], None] | None = None
        self.on_snapshot: Callable[[], None] | None = None
        self.beat_every_s: float = 10.0
        self._wal = wal
        self._clock = clock
        self.new_id = new_id
        self._storing: asyncio.Task[None] | None = None
        self._silence = _SilenceTracker()
        self._beats = 0
        self._beaten: dict[int, float] = {}  # when each unread heartbeat of this process was sent

    def numbers_from(self) -> int:
        """Above which number the epochs and versions of a group that is new now begin. The log of one that was dropped
        is gone, and with it the numbers that it gave out: the wall clock is above all of them, unless there were 2**20
        for each of its milliseconds."""
        return self._clock.wall_ms() << 20

    # ---- open and close ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Follow the log, and catch up with it; an empty log gets its first record. Raises `Fenced` when the group is
        dropped, `Unavailable`, `CorruptLog`."""
        await self._in_time(super().open())

    async def catch_up(self) -> GroupMachine:
        """The state with all records that are in the log now. Raises as `open` does."""
        return await self._in_time(super().catch_up())

    async def _in_time(self, reading: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._wal.timeout_s):
                return await reading
        except TimeoutError:
            raise Unavailable(f"the log of group {self.group} is not read in time") from None

    async def close(self) -> None:
        """Stop following; calls that wait fail with `Closed`."""
        self.end(Closed("the log of this group is not followed any more"))
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.gather(self._storing, return_exceptions=True)
        await super().close()

    def end(self, error: TidewalError) -> None:
        if isinstance(error, ChannelNotFound):
            error = Fenced(f"group {self.group} was dropped")
        super().end(error)
        for event in self.local.values():
            event.set()

    @property
    def state(self) -> GroupState:
        """The state of the group. Raises what has ended following."""
        self.check_following()
        return self.fold.state.state

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(self, *commands: Command, token: bytes | None = None) -> None:
        """Append the commands and return when the last one, whose record gets `token`, has taken effect. Raises the
        error with which it is refused, `Fenced` when the group is dropped, and `Unavailable` with `outcome_unknown`
        when it is not read back in time."""
        tokens = [*(self.new_id() for _ in commands[1:]), self.new_id() if token is None else token]
        events = [event_of(each, command) for each, command in zip(tokens, commands, strict=True)]
        self.check_following()
        try:
            async with asyncio.timeout(2 * self._wal.timeout_s):
                await self.propose(*events)
        except ChannelNotFound as error:
            if error.fields.get("channel") != self.topic:
                raise
            dropped = Fenced(f"group {self.group} was dropped")
            raise of_unknown_outcome(dropped) if error.fields.get("outcome_unknown") else dropped from error
        except TimeoutError:
            raise Unavailable(f"no answer from the log of group {self.group} in time", outcome_unknown=True) from None

    def tell(self, command: Command) -> None:
        """Append a command without waiting. A failure is ignored: the reason remains, and the command is sent again."""
        with suppress(TidewalError):
            self.submit(event_of(b"", command))

    def beat(self) -> None:
        """Append a heartbeat of this process. From any thread."""
        self._beats += 1
        self._beaten[self._beats] = self._clock.monotonic()
        self._beaten.pop(self._beats - MOST_BEATS_UNDER_WAY, None)
        self.tell(ProcessBeat(self._wal.process, self._beats))

    async def assignment(self, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        """`CoordinatorClient.assignment`."""
        changed = self.local.setdefault(member, asyncio.Event())
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while True:
                    changed.clear()
                    assignment = self.state.assignment(member)
                    if assignment.version != seen or wait_s <= 0:
                        return assignment
                    await changed.wait()
        except TimeoutError:
            return self.state.assignment(member)

    # ---- what was read ----------------------------------------------------------------------------------------------

    def on_restored(self) -> None:
        super().on_restored()
        self._silence = _SilenceTracker()
        if self.on_snapshot is not None:
            self.on_snapshot()
        for event in self.local.values():
            event.set()

    def on_applied(self, applied: Applied) -> None:
        super().on_applied(applied)
        machine = self.fold.state
        if machine.last is None:
            return
        token, command = machine.last
        machine.last = None
        if applied.error is None and self.on_command is not None:
            self.on_command(token, command)
        self._observe(machine.state, command)
        idle = self._storing is None or self._storing.done()
        if idle and self.snapshot_due and self._stores_snapshots(machine.state):
            self._storing = asyncio.create_task(self.snapshot_if_due(), name=f"snapshot of group {self.group}")

    def _stores_snapshots(self, state: GroupState) -> bool:
        """Whether this process has to store the next snapshot."""
        first = min(state.members, default=None)
        return first is not None and state.members[first].process == self._wal.process

    def _changed(self, member: str) -> None:
        event = self.local.get(member)
        if event is not None:
            event.set()

    # ---- silence ----------------------------------------------------------------------------------------------------

    def _observe(self, state: GroupState, command: Command) -> None:
        match command:
            case ProcessBeat(process, number) if process == self._wal.process:
                sent = self._beaten.pop(number, None)
                if sent is not None:
                    self._silence.own_beat(sent, 2 * self.beat_every_s)
                    self._propose_removals(state)
            case ProcessBeat(process) | Join(process=process):
                self._silence.heard(process)
            case _:
                pass
        if isinstance(command, Join | Leave | EvictMember) and state.members:
            shortest_s = min(joined.session_timeout_s for joined in state.members.values())
            self.beat_every_s = shortest_s / BEATS_PER_TIMEOUT

    def _propose_removals(self, state: GroupState) -> None:
        for member, joined in state.members.items():
            silent_s = self._silence.of(joined.process)
            if joined.process != self._wal.process and silent_s > joined.session_timeout_s:
                log.warning("member %s of group %s is silent: its channels go to others", member, self.group)
                self.tell(EvictMember(member, state.last_beats[joined.process]))
        wanted = state.revoking()
        self._silence.keep({epoch for _, _, epoch in wanted})
        for member, channel, epoch in wanted:
            if self._silence.of(epoch) > state.members[member].session_timeout_s:
                self.tell(Release(member, channel, epoch))


class _SilenceTracker:
    """For how long no record of a process, or of a revocation, was read: measured by this process's own heartbeats in
    the log."""

    def __init__(self) -> None:
        self._now: float | None = None  # when this process sent its last heartbeat that it has read
        self._heard: dict[str | int, float] = {}

    def own_beat(self, sent: float, most_s: float) -> None:
        """A heartbeat of this process was read, which was `sent` at that time. An interval of more than `most_s`
        between two of them does not count as silence: this process was stopped, and does not know the order of the
        other processes' records meanwhile."""
        if self._now is not None and sent - self._now > most_s:
            stopped_s = sent - self._now
            self._heard = {name: heard + stopped_s for name, heard in self._heard.items()}
        self._now = sent

    def heard(self, name: str) -> None:
        if self._now is not None:
            self._heard[name] = self._now

    def of(self, name: str | int) -> float:
        """The silence of a name in seconds; 0 the first time that it is asked for."""
        if self._now is None:
            return 0.0
        return self._now - self._heard.setdefault(name, self._now)

    def keep(self, epochs: set[int]) -> None:
        """Forget all assignment epochs but these."""
        self._heard = {name: at for name, at in self._heard.items() if isinstance(name, str) or name in epochs}
