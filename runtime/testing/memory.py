"""The memory WAL: the whole contract of `runtime/wal.py` in lists, with a fault plan. One process, nothing survives.

Several `MemoryWal`s may share one `MemoryLog`: that is how a test restarts a node over the same log.
"""

from __future__ import annotations

import asyncio
import bisect
import re
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
        while self.policy.ephemeral and self.size > self.policy.ephemeral_bytes and len(self.entries) > 1:
            self.size -= len(self.entries.pop(0).payload)
            self.first += 1
        return id

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class MemoryLog:
    """What several `MemoryWal`s share: the channels and their entries."""

    def __init__(self) -> None:
        self.channels: dict[str, _Channel] = {}

    def dump(self) -> list[tuple[str, bytes, bytes]]:
        """Every entry of the durable channels as (channel, id, payload): the trace that equal seeds make equal."""
        return [
            (name, entry.id, bytes(entry.payload))
            for name, channel in sorted(self.channels.items())
            if not channel.policy.ephemeral
            for entry in channel.entries
        ]


class MemoryWal:
    """`Wal` over a `MemoryLog`. Must be used from one event loop; `submit` acknowledges at once unless the fault plan
    says otherwise."""

    name = "memory"
    capabilities = Capabilities(atomic_batches=True, seek_by_time=True, truncate=True, multi_process_write=False)

    def __init__(self, log: MemoryLog | None = None, faults: FaultPlan | None = None) -> None:
        self.log = log or MemoryLog()
        self.faults = faults
        self._closed = False
        self._close_waiters: set[asyncio.Future[None]] = set()
        self._delayed: list[Callable[[], None]] = []  # in order: a delayed append delays those behind it

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_open()
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
        def write(answer: TidewalError | None = None) -> None:
            ids = [channel.add(payload, timestamp) for channel, payload, timestamp in entries]
            for channel, _, _ in entries:
                channel.wake()
            done(ids if answer is None else answer)

        match fault:
            case Fault.DROP:
                done([_id(0)] * len(entries))
            case Fault.FAIL:
                self._in_order(lambda: done(Unavailable("the memory WAL was told to fail this append")))
            case Fault.UNKNOWN:
                unknown = Unavailable("the memory WAL was told to lose this answer", outcome_unknown=True)
                self._in_order(lambda: write(unknown))
            case Fault.DUPLICATE:
                entries = entries * 2
                self._in_order(lambda: write())
            case Fault.DELAY:
                assert self.faults is not None
                self._delayed.append(write)
                asyncio.get_running_loop().call_later(self.faults.delay_s(), self._release)
            case Fault.NONE:
                self._in_order(write)

    def _in_order(self, write: Callable[[], None]) -> None:
        if self._delayed:
            self._delayed.append(write)
        else:
            write()

    def _release(self) -> None:
        """Let everything delayed so far happen: an append never overtakes an earlier one."""
        delayed, self._delayed = self._delayed, []
        for write in delayed:
            write()

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
            if at < found.first:
                if not found.policy.ephemeral:
                    raise _lost(_id(at), found)
                at = found.first
            if at < found.end:
                index = at - found.first
                batch = found.entries[index : index + READ_BATCH_ENTRIES]
                at += len(batch)
                yield batch
            else:
                await self._wait(found)

    async def _wait(self, channel: _Channel) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel.waiters.append(waiter)
        self._close_waiters.add(waiter)
        try:
            await waiter
        finally:
            self._close_waiters.discard(waiter)

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


def _lost(requested: bytes, channel: _Channel) -> PositionLost:
    first = _id(channel.first)
    return PositionLost(
        f"position {requested.hex()} is not in the channel, its first is {first.hex()}",
        requested=requested,
        first_available=first,
    )
