"""The log of one group, followed by each process that has a member in it: an own topic, and the state that it makes.

What a member wants is appended, and decided where it lies: `ask` returns when this process has read it back. Sessions
are judged by the log as well: each process appends beats, and notes which of its own beats lie behind the last it heard
of another. So no clocks are compared, and who was busy or stopped for a while reads first what came meanwhile.

The log is kept short by pictures: once one is stored, what lies before its base is let go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

from ...runtime.errors import (
    ChannelNotFound,
    Closed,
    CorruptLog,
    Fenced,
    PositionLost,
    TidewalError,
    Unavailable,
    of_unknown_outcome,
)
from ...runtime.groups.link import Shares
from ...runtime.wal import Append, Entry, From, FromId, OnAppended, Start
from .group_records import Beat, Command, Expel, Join, Leave, Picture, Release, decode_record, encode_record
from .group_state import GroupState

log = logging.getLogger("tidewal.pulsar")

BEATS_PER_TIMEOUT = 3  # so that two may come late
RECORDS_PER_PICTURE = 2_000
PICTURE_BYTES = 4 * 1024 * 1024  # a larger one waits until commits are done
MOST_BEATS_UNDER_WAY = 1_000
PAUSE_S = 0.5  # before following again
HOLDER = "group"  # holds what is not in a picture


class Log(Protocol):
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
    """Open it with `open`, and `close` it. Belongs to one event loop; only `beat` may be called from elsewhere."""

    def __init__(self, wal: Log, group: str, topic: str) -> None:
        self.group = group
        self.topic = topic
        self.local: dict[str, asyncio.Event] = {}  # members that live here, and who waits for their shares
        self.ended: TidewalError | None = None
        self.on_applied: Callable[[bytes, Command], None] | None = None
        self.on_restored: Callable[[], None] | None = None
        self.beat_every_s = 10.0
        self._wal = wal
        self._state: GroupState | None = None
        self._early: list[tuple[bytes, bytes, Command]] = []  # read before there was a picture to begin from
        self._first: bytes | None = None
        self._applied = b""
        self._base = b""  # the last record that changed something
        self._since_picture = 0
        self._drawing: asyncio.Task[None] | None = None
        self._asked: dict[bytes, asyncio.Future[None]] = {}
        self._moved = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._silence = _Silence()
        self._beats = 0
        self._beaten: dict[int, float] = {}  # when the beats on their way were sent

    # ---- its life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Follow the log, and catch up with it. Raises `ChannelNotFound`, `Unavailable`."""
        self._follower = asyncio.create_task(self._follow(), name=f"group log {self.group}")
        await self.catch_up()

    async def catch_up(self) -> None:
        """Return when everything is applied that is in the log now."""
        last = await self._wal.latest_id(self.topic)
        if last is None:
            record = Append(self.topic, encode_record(b"", Picture(b"", {})))
            (last,) = await self._wal.append_many([record])
        await self._until(lambda: self._applied >= last)
        if self._state is None:
            raise CorruptLog(f"the log of group {self.group} has no beginning", path=self.topic, offset=0)

    async def close(self) -> None:
        """Follow no more."""
        self._end(Closed("the log of this group is not followed any more"))
        tasks = [task for task in (self._follower, self._drawing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def state(self) -> GroupState:
        """Raises what has ended it, and `Unavailable` while it begins anew."""
        if self.ended is not None:
            raise self.ended
        if self._state is None:
            raise Unavailable(f"the log of group {self.group} is being read from its beginning")
        return self._state

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(self, *commands: Command, token: bytes | None = None) -> None:
        """Append the commands and return when the last one has taken effect. Raises what it is refused with, `Fenced`
        when the group is dropped, and `Unavailable` with `outcome_unknown` when it does not come back in time."""
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
        """Append it without waiting; when that fails, whoever sees the same reason will propose it again."""
        with suppress(TidewalError):
            self._wal.submit([Append(self.topic, encode_record(b"", command))], _ignore)

    def beat(self) -> None:
        """Say that this process lives. From any thread."""
        self._beats += 1
        self._beaten[self._beats] = time.monotonic()
        self._beaten.pop(self._beats - MOST_BEATS_UNDER_WAY, None)
        self.propose(Beat(self._wal.process, self._beats))

    async def shares(self, member: str, seen: int | None, wait_s: float) -> Shares:
        """`GroupLink.shares`."""
        changed = self.local.setdefault(member, asyncio.Event())
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                while True:
                    changed.clear()
                    if self._state is not None or self.ended is not None:
                        shares = self.state.shares(member)
                        if shares.version != seen or wait_s <= 0:
                            return shares
                    await changed.wait()
        except TimeoutError:
            return self.state.shares(member)

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
            except PositionLost as error:  # pictures were made faster than this process has read
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
            log.warning("a message in %s is not of this group: passed over", self.topic)
        else:
            token, command = decoded
            if self._first is None:
                self._first = entry.id
            if self._state is not None:
                self._apply(entry.id, token, command)
            elif isinstance(command, Picture) and self._fits(entry.id, command):
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

    def _fits(self, id: bytes, picture: Picture) -> bool:
        """Whether everything behind the picture's base was read: one from long ago may come late."""
        assert self._first is not None
        return picture.base >= self._first if picture.base else id == self._first

    def _apply(self, id: bytes, token: bytes, command: Command) -> None:
        state = self.state
        error: TidewalError | None = None
        try:
            state.apply(token, command)
        except TidewalError as refused:
            error = refused
        except Exception as broken:  # nobody of ours writes such; everybody passes over it
            log.exception("a record of group %s cannot be applied", self.group)
            error = CorruptLog(f"a record of group {self.group} cannot be applied: {broken}", path=self.topic, offset=0)
        if isinstance(command, Picture):
            self._since_picture = 0
        else:
            self._base = id
            self._since_picture += 1
        if error is None and self.on_applied is not None:
            self.on_applied(token, command)
        self._observe(state, command)
        asked = self._asked.get(token)
        if asked is not None and not asked.done():
            asked.set_result(None) if error is None else asked.set_exception(error)
        if self._since_picture >= RECORDS_PER_PICTURE and self._draws(state):
            self._drawing = asyncio.create_task(self._draw(state), name=f"picture of group {self.group}")

    def _changed(self, member: str) -> None:
        event = self.local.get(member)
        if event is not None:
            event.set()

    def _begin_anew(self) -> None:
        self._state, self._early, self._first = None, [], None
        self._silence = _Silence()
        self._fail_asked(Unavailable(f"group {self.group} moved on faster than this process has read"))
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
        """The records of those who wait may lie in the log, and count."""
        error = of_unknown_outcome(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it yet

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

    # ---- who is silent ----------------------------------------------------------------------------------------------

    def _observe(self, state: GroupState, command: Command) -> None:
        match command:
            case Beat(process, number) if process == self._wal.process:
                sent = self._beaten.pop(number, None)
                if sent is not None:
                    self._silence.own_beat(sent, 2 * self.beat_every_s)
                    self._judge(state)
            case Beat(process) | Join(process=process):
                self._silence.heard(process)
            case _:
                pass
        if isinstance(command, Join | Leave | Expel) and state.members:
            shortest_s = min(joined.session_timeout_s for joined in state.members.values())
            self.beat_every_s = shortest_s / BEATS_PER_TIMEOUT

    def _judge(self, state: GroupState) -> None:
        for member, joined in state.members.items():
            silent_s = self._silence.of(joined.process)
            if joined.process != self._wal.process and silent_s > joined.session_timeout_s:
                log.warning("member %s of group %s is silent: its channels go to others", member, self.group)
                self.propose(Expel(member, state.last_beats[joined.process]))
        wanted = state.wanted_back()
        self._silence.keep({lease for _, _, lease in wanted})
        for member, channel, lease in wanted:
            if self._silence.of(lease) > state.members[member].session_timeout_s:
                self.propose(Release(member, channel, lease))

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def _draws(self, state: GroupState) -> bool:
        """Whether drawing the next picture is this process's turn."""
        first = min(state.members, default=None)
        idle = self._drawing is None or self._drawing.done()
        return idle and first is not None and state.members[first].process == self._wal.process

    async def _draw(self, state: GroupState) -> None:
        """Store a picture and let go what lies before its base. What fails is done again by the next."""
        base = self._base
        record = encode_record(b"", Picture(base, state.picture()))
        if len(record) > PICTURE_BYTES:
            log.warning("the state of group %s takes %d bytes: no picture of it now", self.group, len(record))
            return
        try:
            await self._wal.append_many([Append(self.topic, record)])
            await self._wal.hold(self.topic, HOLDER, base)
            await self._wal.truncate(self.topic, base)
        except TidewalError as error:
            log.warning("no picture of group %s: %s", self.group, error)


class _Silence:
    """For how long nothing was heard, in the time of one's own beats as they lie in the log."""

    def __init__(self) -> None:
        self._now: float | None = None  # when the last of our beats that we have read was sent
        self._heard: dict[str | int, float] = {}

    def own_beat(self, sent: float, most_s: float) -> None:
        """Time that lies between two of our beats, and is more than `most_s`, counts against nobody: we were stopped,
        and do not know in which order the others came before that."""
        if self._now is not None and sent - self._now > most_s:
            excused = sent - self._now
            self._heard = {name: heard + excused for name, heard in self._heard.items()}
        self._now = sent

    def heard(self, name: str) -> None:
        if self._now is not None:
            self._heard[name] = self._now

    def of(self, name: str | int) -> float:
        """How long; none when this is the first time that it is asked for."""
        if self._now is None:
            return 0.0
        return self._now - self._heard.setdefault(name, self._now)

    def keep(self, leases: set[int]) -> None:
        """Forget all other leases."""
        self._heard = {name: at for name, at in self._heard.items() if isinstance(name, str) or name in leases}


def new_token() -> bytes:
    return os.urandom(12)


def _ignore(_: object) -> None:
    pass
