"""The log of one group: a topic of its own, followed by each process with a member in it, and the state that it folds.

A member's command is appended, and takes effect where it lies in the log: `ask` returns when this process has read it
back. Sessions are judged by the log as well: each process appends heartbeats, and counts how many of its own lie after
the last record of another process. So no clocks are compared, and a process that was busy or stopped for a while first
reads the records of the meantime.

Snapshots keep the log short: once one is stored, the records before its base are truncated.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

from ....runtime.errors import (
    ChannelNotFound,
    Closed,
    CorruptLog,
    Fenced,
    PositionLost,
    TidewalError,
    Unavailable,
    of_unknown_outcome,
)
from ....runtime.groups.coordinator_client import MemberAssignment
from ....runtime.log.wal import Append, Entry, From, FromId, OnAppended, Start
from .records import (
    Command,
    EvictMember,
    GroupSnapshot,
    Join,
    Leave,
    ProcessBeat,
    Release,
    decode_record,
    encode_record,
)
from .state import GroupState

log = logging.getLogger("tidewal.pulsar")

BEATS_PER_TIMEOUT = 3  # so that two may come late
RECORDS_PER_SNAPSHOT = 2_000
SNAPSHOT_BYTES = 4 * 1024 * 1024  # a larger snapshot waits until commits are done
MOST_BEATS_UNDER_WAY = 1_000
PAUSE_S = 0.5  # before following again
HOLDER = "group"  # holds the records that are not in a snapshot


class GroupLogHost(Protocol):
    """What following a group needs of the WAL."""

    @property
    def process(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]: ...

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]: ...

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None: ...

    async def latest_id(self, channel: str) -> bytes | None: ...

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None: ...

    async def truncate(self, channel: str, id: bytes) -> None: ...


class GroupLog:
    """The log of one group, between `open` and `close`. Belongs to one event loop; only `beat` may be called from any
    thread."""

    def __init__(self, wal: GroupLogHost, group: str, topic: str) -> None:
        self.group = group
        self.topic = topic
        self.local: dict[
            str, asyncio.Event
        ] = {}  # the members of this process, and the events that their assignments set
        self.ended: TidewalError | None = None
        self.on_applied: Callable[[bytes, Command], None] | None = None
        self.on_restored: Callable[[], None] | None = None
        self.beat_every_s = 10.0
        self._wal = wal
        self._state: GroupState | None = None
        self._early: list[tuple[bytes, bytes, Command]] = []  # records read before the snapshot to begin from
        self._first: bytes | None = None
        self._applied = b""
        self._base = b""  # the last record that changed something
        self._since_snapshot = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._asked: dict[bytes, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._silence = _SilenceTracker()
        self._beats = 0
        self._beaten: dict[int, float] = {}  # when each unread heartbeat of this process was sent

    # ---- open and close ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Follow the log, and catch up with it. Raises `ChannelNotFound`, `Unavailable`, `CorruptLog`."""
        self._follower = asyncio.create_task(self._follow(), name=f"group log {self.group}")
        await self.catch_up()

    async def catch_up(self) -> None:
        """Return when all records that are in the log now are applied; an empty log gets its first record. Raises what
        has ended following, `Unavailable`, and `CorruptLog` for a log without a snapshot."""
        last = await self._wal.latest_id(self.topic)
        if last is None:
            record = Append(self.topic, encode_record(b"", GroupSnapshot(b"", {})))
            (last,) = await self._wal.append_many([record])
        await self._until(lambda: self._applied >= last)
        if self._state is None:
            raise CorruptLog(f"the log of group {self.group} has no beginning", path=self.topic, offset=0)

    async def close(self) -> None:
        """Stop following; calls that wait fail with `Closed`."""
        self._end(Closed("the log of this group is not followed any more"))
        tasks = [task for task in (self._follower, self._snapshotting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def state(self) -> GroupState:
        """The state of the group. Raises what has ended following, and `Unavailable` while the log is read anew."""
        if self.ended is not None:
            raise self.ended
        if self._state is None:
            raise Unavailable(f"the log of group {self.group} is being read from its beginning")
        return self._state

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(self, *commands: Command, token: bytes | None = None) -> None:
        """Append the commands and return when the last one, whose record gets `token`, has taken effect. Raises the
        error with which it is refused, `Fenced` when the group is dropped, and `Unavailable` with `outcome_unknown`
        when it is not read back in time."""
        token = new_token() if token is None else token
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[token] = future
        tokens = [*(new_token() for _ in commands[1:]), token]
        records = [encode_record(each, command) for each, command in zip(tokens, commands, strict=True)]
        try:
            if self.ended is not None:
                raise self.ended
            async with asyncio.timeout(2 * self._wal.timeout_s):
                await self._wal.append_many([Append(self.topic, record) for record in records])
                await future
        except ChannelNotFound as error:
            if error.fields.get("channel") != self.topic:
                raise
            dropped = Fenced(f"group {self.group} was dropped")
            raise of_unknown_outcome(dropped) if error.fields.get("outcome_unknown") else dropped from error
        except TimeoutError:
            raise Unavailable(f"no answer from the log of group {self.group} in time", outcome_unknown=True) from None
        finally:
            del self._asked[token]

    def propose(self, command: Command) -> None:
        """Append a command without waiting. A failure is ignored: the reason remains, and the command is proposed
        again."""
        with suppress(TidewalError):
            self._wal.submit([Append(self.topic, encode_record(b"", command))], _ignore)

    def beat(self) -> None:
        """Append a heartbeat of this process. From any thread."""
        self._beats += 1
        self._beaten[self._beats] = time.monotonic()
        self._beaten.pop(self._beats - MOST_BEATS_UNDER_WAY, None)
        self.propose(ProcessBeat(self._wal.process, self._beats))

    async def assignment(self, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        """`CoordinatorClient.assignment`."""
        changed = self.local.setdefault(member, asyncio.Event())
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while True:
                    changed.clear()
                    if self._state is not None or self.ended is not None:
                        assignment = self.state.assignment(member)
                        if assignment.version != seen or wait_s <= 0:
                            return assignment
                    await changed.wait()
        except TimeoutError:
            return self.state.assignment(member)

    # ---- following --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        start: Start = From.EARLIEST
        while self.ended is None:
            reader = cast("AsyncGenerator[Sequence[Entry]]", self._wal.read(self.topic, start))
            try:
                async for entries in reader:
                    for entry in entries:
                        self._take(entry)
                    start = FromId(self._applied)
                    self._wake()
                self._end(Closed("the Pulsar log is closed"))
            except PositionLost as error:  # snapshots were stored faster than this process has read
                log.warning("group %s is read from its beginning: %s", self.group, error)
                self._begin_anew()
                start = From.EARLIEST
            except TidewalError as error:
                if not error.retryable:
                    self._end(error)
                    return
                log.warning("following group %s: %s", self.group, error)
                await asyncio.sleep(PAUSE_S)
            except Exception as error:
                log.exception("group %s cannot be followed", self.group)
                self._end(CorruptLog(f"the log of group {self.group}: {error}", path=self.topic, offset=0))
            finally:
                await reader.aclose()

    def _take(self, entry: Entry) -> None:
        decoded = decode_record(entry.payload)
        if decoded is None:
            log.warning("a message in %s is not a record of this group: ignored", self.topic)
        else:
            token, command = decoded
            if self._first is None:
                self._first = entry.id
            if self._state is not None:
                self._apply(entry.id, token, command)
            elif isinstance(command, GroupSnapshot) and self._fits(entry.id, command):
                self._state = GroupState(self.group, self._changed)
                self._state.restore(command.state)
                if self.on_restored is not None:
                    self.on_restored()
                self._base = command.base
                early, self._early = self._early, []
                for record in early:
                    if record[0] > command.base:
                        self._apply(*record)
            else:
                self._early.append((entry.id, token, command))
        self._applied = entry.id

    def _fits(self, id: bytes, snapshot: GroupSnapshot) -> bool:
        """Whether all records after the snapshot's base were read: an old snapshot may have been appended late."""
        assert self._first is not None
        return snapshot.base >= self._first if snapshot.base else id == self._first

    def _apply(self, id: bytes, token: bytes, command: Command) -> None:
        state = self.state
        error: TidewalError | None = None
        try:
            state.apply(token, command)
        except TidewalError as refused:
            error = refused
        except Exception as broken:  # not written by Tidewal; every process ignores it
            log.exception("a record of group %s cannot be applied", self.group)
            error = CorruptLog(f"a record of group {self.group} cannot be applied: {broken}", path=self.topic, offset=0)
        if isinstance(command, GroupSnapshot):
            self._since_snapshot = 0
        else:
            self._base = id
            self._since_snapshot += 1
        if error is None and self.on_applied is not None:
            self.on_applied(token, command)
        self._observe(state, command)
        asked = self._asked.get(token)
        if asked is not None and not asked.done():
            asked.set_result(None) if error is None else asked.set_exception(error)
        if self._since_snapshot >= RECORDS_PER_SNAPSHOT and self._is_snapshot_due(state):
            self._snapshotting = asyncio.create_task(
                self._store_snapshot(state), name=f"snapshot of group {self.group}"
            )

    def _changed(self, member: str) -> None:
        event = self.local.get(member)
        if event is not None:
            event.set()

    def _begin_anew(self) -> None:
        self._state, self._early, self._first = None, [], None
        self._silence = _SilenceTracker()
        self._fail_asked(Unavailable(f"group {self.group} was truncated faster than this process has read"))
        self._wake()

    def _end(self, error: TidewalError) -> None:
        if self.ended is not None:
            return
        if isinstance(error, ChannelNotFound):
            error = Fenced(f"group {self.group} was dropped")
        self.ended = error
        self._fail_asked(error)
        self._wake()
        for event in self.local.values():
            event.set()

    def _fail_asked(self, error: TidewalError) -> None:
        """Fail the calls that wait: their records may be in the log, and take effect."""
        error = of_unknown_outcome(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: the caller may not wait for it yet

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._wal.timeout_s):
                while not condition():
                    if self.ended is not None:
                        raise self.ended
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable(f"the log of group {self.group} is not read in time") from None

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
                self.propose(EvictMember(member, state.last_beats[joined.process]))
        wanted = state.revoking()
        self._silence.keep({epoch for _, _, epoch in wanted})
        for member, channel, epoch in wanted:
            if self._silence.of(epoch) > state.members[member].session_timeout_s:
                self.propose(Release(member, channel, epoch))

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _is_snapshot_due(self, state: GroupState) -> bool:
        """Whether this process has to store the next snapshot."""
        first = min(state.members, default=None)
        idle = self._snapshotting is None or self._snapshotting.done()
        return idle and first is not None and state.members[first].process == self._wal.process

    async def _store_snapshot(self, state: GroupState) -> None:
        """Store a snapshot and truncate the records before its base. The next snapshot makes up for a failure."""
        base = self._base
        record = encode_record(b"", GroupSnapshot(base, state.to_wire()))
        if len(record) > SNAPSHOT_BYTES:
            log.warning("the state of group %s takes %d bytes: no snapshot of it now", self.group, len(record))
            return
        try:
            await self._wal.append_many([Append(self.topic, record)])
            await self._wal.hold(self.topic, HOLDER, base)
            await self._wal.truncate(self.topic, base)
        except TidewalError as error:
            log.warning("no snapshot of group %s: %s", self.group, error)


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


def new_token() -> bytes:
    return os.urandom(12)


def _ignore(_: object) -> None:
    pass
