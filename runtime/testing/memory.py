"""The memory WAL: the whole contract of `runtime/wal.py` in lists, with a fault plan. One process, nothing survives.

Several `MemoryWal`s may share one `MemoryLog`: that is how a test restarts a node over the same log.
"""

from __future__ import annotations

import asyncio
import bisect
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from ..errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    InvalidRequest,
    MessageTooLarge,
    PositionLost,
    TidewalError,
    Unavailable,
)
from ..wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    FromId,
    FromTime,
    OnAppended,
    Payload,
    Start,
)
from .faults import Fault, FaultPlan

_NAME = re.compile(r"[A-Za-z0-9._-]{1,250}")
READ_BATCH_ENTRIES = 256


def _id(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


@dataclass(slots=True)
class _Channel:
    policy: ChannelPolicy
    entries: list[Entry] = field(default_factory=list[Entry])
    first: int = 1  # sequence of entries[0]
    size: int = 0  # bytes
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    holds: dict[str, bytes] = field(default_factory=dict[str, bytes])
    dropped: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.entries)

    def add(self, payload: bytes, timestamp: int) -> bytes:
        id = _id(self.end)
        self.entries.append(Entry(id, timestamp, payload))
        self.size += len(payload)
        if self.policy.ephemeral and self.size > self.policy.ephemeral_bytes:
            self._forget()
        return id

    def _forget(self) -> None:
        """Let go of the oldest, and of some more than needed, so that it does not happen at every append."""
        count = 0
        while self.size > self.policy.ephemeral_bytes * 7 // 8 and count < len(self.entries) - 1:
            self.size -= len(self.entries[count].payload)
            count += 1
        del self.entries[:count]
        self.first += count

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    """Wake a reader, from whatever thread."""

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop = waiter.get_loop()
    if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage] -- get_running_loop raises elsewhere
        wake()
    elif not loop.is_closed():
        loop.call_soon_threadsafe(wake)


class MemoryLog:
    """What several `MemoryWal`s share: the channels and their entries."""

    def __init__(self) -> None:
        self.channels: dict[str, _Channel] = {}
        self.lock = threading.Lock()

    def dump(self) -> list[tuple[str, bytes, bytes]]:
        """Every entry of the durable channels as (channel, id, payload): the trace that equal seeds make equal."""
        return [
            (name, entry.id, bytes(entry.payload))
            for name, channel in sorted(self.channels.items())
            if not channel.policy.ephemeral
            for entry in channel.entries
        ]


@dataclass(slots=True)
class _Submitted:
    """Entries on their way, and what will be said of them: their ids, or an error."""

    entries: list[tuple[_Channel, bytes, int]]
    done: OnAppended
    written: bool = True
    error: TidewalError | None = None


class MemoryWal:
    """`Wal` over a `MemoryLog`. Must be used from one event loop, `submit` apart; `submit` acknowledges at once, on
    the caller's thread, unless the fault plan says otherwise."""

    name = "memory"
    capabilities = Capabilities(atomic_batches=True, seek_by_time=True, truncate=True, multi_process_write=False)

    def __init__(self, log: MemoryLog | None = None, faults: FaultPlan | None = None) -> None:
        self.log = log or MemoryLog()
        self.faults = faults
        self._closed = False
        self._close_waiters: set[asyncio.Future[None]] = set()
        self._delayed: list[_Submitted] = []  # in order: a delayed append delays those behind it
        self._loop: asyncio.AbstractEventLoop | None = None  # where delays run

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_open()
        self._loop = asyncio.get_running_loop()
        if not _NAME.fullmatch(channel):
            raise InvalidRequest(f"channel name {channel!r} is not 1-250 characters of A-Z a-z 0-9 . _ -")
        existing = self.log.channels.setdefault(channel, _Channel(policy))
        if existing.policy != policy:
            raise ChannelExists(f"channel {channel} exists with another policy", channel=channel)

    async def channels(self) -> list[str]:
        self._check_open()
        return sorted(self.log.channels)

    async def describe(self, channel: str) -> ChannelInfo:
        found = self._channel(channel)
        first = found.entries[0].id if found.entries else None
        return ChannelInfo(channel, found.policy, first, await self.latest_id(channel))

    async def drop_channel(self, channel: str) -> None:
        self._check_open()
        dropped = self.log.channels.pop(channel, None)
        if dropped is not None:
            dropped.dropped = True
            dropped.wake()

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._check_open()
        channels = [self._channel(entry.channel) for entry in entries]
        for entry, channel in zip(entries, channels, strict=True):
            limit = channel.policy.max_message_bytes
            if len(entry.payload) > limit:
                raise MessageTooLarge(
                    f"a message of {len(entry.payload)} bytes for {entry.channel} is over its limit of {limit}",
                    size=len(entry.payload),
                    limit=limit,
                )
        copied = [
            (channel, bytes(entry.payload), entry.timestamp) for entry, channel in zip(entries, channels, strict=True)
        ]
        fault = Fault.NONE
        if self.faults is not None and entries:
            fault = self.faults.decide(entries[0].channel, ephemeral=channels[0].policy.ephemeral)
        self._apply(fault, copied, done)

    def _apply(self, fault: Fault, entries: list[tuple[_Channel, bytes, int]], done: OnAppended) -> None:
        submitted = _Submitted(entries, done)
        delayed = False
        match fault:
            case Fault.DROP:
                done([_id(0)] * len(entries))
                return
            case Fault.FAIL:
                submitted.written = False
                submitted.error = Unavailable("the memory WAL was told to fail this append")
            case Fault.UNKNOWN:
                submitted.error = Unavailable("the memory WAL was told to lose this answer", outcome_unknown=True)
            case Fault.LOST:
                submitted.written = False
                submitted.error = Unavailable("the memory WAL was told to lose this append", outcome_unknown=True)
            case Fault.DUPLICATE:
                submitted.entries = entries * 2
                submitted.done = lambda result: done(result[: len(entries)] if isinstance(result, list) else result)
            case Fault.DELAY:
                delayed = True
            case Fault.NONE:
                pass
        self._queue(submitted, delayed=delayed)

    def _queue(self, submitted: _Submitted, *, delayed: bool) -> None:
        with self.log.lock:
            if delayed or self._delayed:
                self._delayed.append(submitted)
                answers = None
            else:
                answers = _write([submitted])
        if answers is not None:
            answers()
        elif delayed and self.faults is not None:
            delay_s = self.faults.delay_s()
            loop = self._loop or asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, delay_s, self._release)

    def _release(self) -> None:
        """Let everything delayed so far happen: an append never overtakes an earlier one."""
        with self.log.lock:
            delayed, self._delayed = self._delayed, []
            answers = _write(delayed)
        answers()

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        return (await self.append_many([Append(channel, payload, timestamp)]))[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

        def done(result: list[bytes] | TidewalError) -> None:
            if future.done():
                return
            if isinstance(result, TidewalError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.submit(entries, done)
        return await future

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        found = self._channel(channel)
        at = self._first_sequence(found, start)
        while not self._closed:
            if found.dropped:
                raise ChannelNotFound(f"channel {channel} was dropped", channel=channel)
            with self.log.lock:
                if at < found.first:
                    if not found.policy.ephemeral:
                        raise _lost(_id(at), found)
                    at = found.first
                index = at - found.first
                batch = found.entries[index : index + READ_BATCH_ENTRIES]
            if batch:
                at += len(batch)
                yield batch
            else:
                await self._wait(found, at)

    async def _wait(self, channel: _Channel, at: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self.log.lock:
            if at < channel.end:  # another thread appended meanwhile
                return
            channel.waiters.append(waiter)
        self._close_waiters.add(waiter)
        try:
            await waiter
        finally:
            self._close_waiters.discard(waiter)
            if waiter in channel.waiters:
                channel.waiters.remove(waiter)

    def _first_sequence(self, channel: _Channel, start: Start) -> int:
        match start:
            case From.EARLIEST:
                return channel.first
            case From.LATEST:
                return channel.end
            case FromTime(timestamp):
                index = next((i for i, entry in enumerate(channel.entries) if entry.timestamp >= timestamp), None)
                return channel.end if index is None else channel.first + index
            case FromId(id, inclusive):
                sequence = int.from_bytes(id, "big")
                wanted = sequence if inclusive else sequence + 1
                if len(id) != 8 or wanted < channel.first or sequence >= channel.end:
                    raise _lost(id, channel)
                return wanted

    async def latest_id(self, channel: str) -> bytes | None:
        found = self._channel(channel)
        return _id(found.end - 1) if found.end > 1 else None

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return next((entry.id for entry in self._channel(channel).entries if entry.timestamp >= timestamp), None)

    async def truncate(self, channel: str, id: bytes) -> None:
        found = self._channel(channel)
        keep = min([id, *found.holds.values()])
        count = bisect.bisect_left(found.entries, keep, key=lambda entry: entry.id)
        found.size -= sum(len(entry.payload) for entry in found.entries[:count])
        del found.entries[:count]
        found.first += count

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        holds = self._channel(channel).holds
        if id is None:
            holds.pop(holder, None)
        else:
            holds[holder] = id

    async def close(self) -> None:
        if self._closed:
            return
        self._release()
        self._closed = True
        for waiter in self._close_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _channel(self, channel: str) -> _Channel:
        self._check_open()
        try:
            return self.log.channels[channel]
        except KeyError:
            raise ChannelNotFound(f"no channel {channel}; create it first", channel=channel) from None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the memory WAL is closed")


def _write(queue: Sequence[_Submitted]) -> Callable[[], None]:
    """Write what is to be written, under the log's lock. Call what comes back without it: an answer may append."""
    answers: list[tuple[OnAppended, list[bytes] | TidewalError]] = []
    for submitted in queue:
        entries = submitted.entries if submitted.written else []
        ids = [channel.add(payload, timestamp) for channel, payload, timestamp in entries]
        for channel, _, _ in entries:
            channel.wake()
        answers.append((submitted.done, ids if submitted.error is None else submitted.error))

    def answer() -> None:
        for done, result in answers:
            done(result)

    return answer


def _lost(requested: bytes, channel: _Channel) -> PositionLost:
    first = _id(channel.first)
    return PositionLost(
        f"position {requested.hex()} is not in the channel, its first is {first.hex()}",
        requested=requested,
        first_available=first,
    )
