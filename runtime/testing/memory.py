"""The memory WAL: the contract of `runtime/log/wal.py` in lists, with a fault plan. One process; nothing survives.

Several `MemoryWal`s may share one `MemoryLog`: that is how a test restarts a node over the same log.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..errors import ChannelNotFound, Unavailable
from ..groups.coordinator_client import GroupAcks
from ..groups.group_consumer import GroupConsumer
from ..groups.group_wal import GroupWal
from ..groups.local_coordinator_client import LocalCoordinatorClient
from ..groups.progress import Change
from ..log.checks import check_name, check_plain, check_size, not_found, other_policy
from ..log.payloads import as_bytes
from ..log.stamps import stamped
from ..log.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    FromId,
    FromTime,
    OnAppended,
    Start,
)
from ..loop_bridge import promise
from .faults import Fault, FaultPlan
from .memory_channel import InflightSubmit, MemoryChannel, sequence_id, write
from .memory_groups import MemoryGroups

READ_BATCH_ENTRIES = 256


class MemoryLog:
    """The content that several `MemoryWal`s may share: the channels, their entries, and the consumer groups."""

    def __init__(self) -> None:
        self.channels: dict[str, MemoryChannel] = {}
        self.lock: threading.Lock = threading.Lock()
        self.groups: MemoryGroups = MemoryGroups(self.channels, self.lock)

    def dump(self) -> list[tuple[str, bytes, bytes]]:
        """Every entry of the durable channels as (channel, id, payload): the trace that is equal for equal seeds."""
        return [
            (name, entry.id, bytes(entry.payload))
            for name, channel in sorted(self.channels.items())
            if not channel.policy.ephemeral
            for entry in channel.entries
        ]


class MemoryWal(GroupWal):
    """`Wal` over a `MemoryLog`. Must be used from one event loop, `submit` apart; `submit` acknowledges at once, on
    the caller's thread, unless the fault plan says otherwise."""

    name = "memory"
    capabilities: Capabilities = Capabilities(
        atomic_batches=True,
        seek_by_time=True,
        truncate=True,
        multi_process_write=False,
        one_node=True,
        groups=True,
        individual_acks=True,
        atomic_commits=True,
        atomic_acks=True,
        one_machine=True,
    )

    def __init__(self, log: MemoryLog | None = None, faults: FaultPlan | None = None) -> None:
        super().__init__("memory://")
        self.log: MemoryLog = log or MemoryLog()
        self.faults = faults
        self._close_waiters: set[asyncio.Future[None]] = set()
        self._delayed: list[InflightSubmit] = []  # in order: a delayed append delays those behind it
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop on which delays run
        self._members: list[GroupConsumer] = []

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_open()
        self._loop = asyncio.get_running_loop()
        check_name("channel name", channel)
        existing = self.log.channels.setdefault(channel, MemoryChannel(policy))
        if existing.policy != policy:
            raise other_policy(channel)
        self.log.groups.coordinator.channels_changed()

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
            self.log.groups.coordinator.channels_changed()

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._submit(entries, (), done)

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        self.log.groups.coordinator.commit(acks.group, acks.member, acks.acks, entries, done)

    def _submit(self, entries: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        self._check_open()
        channels = [self._channel(entry.channel) for entry in entries]
        check_plain([entry.key for entry in entries], [entry.headers for entry in entries])
        payloads = [as_bytes(entry.payload) for entry in entries]
        for entry, payload, channel in zip(entries, payloads, channels, strict=True):
            check_size(entry.channel, len(payload), channel.policy.max_message_bytes)
        submitted = InflightSubmit(
            [
                (channel, payload, entry.timestamp)
                for entry, payload, channel in zip(entries, payloads, channels, strict=True)
            ],
            [(self._channel(change.channel), change) for change in changes],
            done,
        )
        fault = Fault.NONE
        if self.faults is not None and entries:
            fault = self.faults.decide(entries[0].channel, ephemeral=channels[0].policy.ephemeral)
        self._apply(fault, submitted)

    def _apply(self, fault: Fault, submitted: InflightSubmit) -> None:
        entries, done = submitted.entries, submitted.done
        delayed = False
        match fault:
            case Fault.DROP:
                done([sequence_id(0)] * len(entries))
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

    def _queue(self, submitted: InflightSubmit, *, delayed: bool) -> None:
        with self.log.lock:
            if delayed or self._delayed:
                self._delayed.append(submitted)
                answers = None
            else:
                answers = write([submitted])
        if answers is not None:
            answers()
        elif delayed and self.faults is not None:
            delay_s = self.faults.delay_s()
            loop = self._loop or asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, delay_s, self._release)

    def _release(self) -> None:
        """Write all that was delayed so far: an append never overtakes an earlier one."""
        with self.log.lock:
            delayed, self._delayed = self._delayed, []
            answers = write(delayed)
        answers()

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        future, done = promise()
        self.submit(stamped(entries), done)
        return await future

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        found = self._channel(channel)
        at = self._first_sequence(channel, found, start)
        while not self._closed:
            if found.dropped:
                raise ChannelNotFound(f"channel {channel} was dropped", channel=channel)
            with self.log.lock:
                if at < found.first:
                    if not found.policy.ephemeral:
                        raise found.lost(channel, sequence_id(at))
                    at = found.first
                index = at - found.first
                batch = found.entries[index : index + READ_BATCH_ENTRIES]
            if batch:
                at += len(batch)
                yield batch
            else:
                await self._wait(found, at)

    async def _wait(self, channel: MemoryChannel, at: int) -> None:
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

    def _first_sequence(self, name: str, channel: MemoryChannel, start: Start) -> int:
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
                    raise channel.lost(name, id)
                return wanted

    async def latest_id(self, channel: str) -> bytes | None:
        found = self._channel(channel)
        return sequence_id(found.end - 1) if found.end > 1 else None

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return next((entry.id for entry in self._channel(channel).entries if entry.timestamp >= timestamp), None)

    async def truncate(self, channel: str, id: bytes) -> None:
        with self.log.lock:
            self._channel(channel).remove_before(id)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        holds = self._channel(channel).holds
        if id is None:
            holds.pop(holder, None)
        else:
            holds[holder] = id

    async def join(self, group: str, channels: Sequence[str], **options: Any) -> GroupConsumer:
        member = await super().join(group, channels, **options)
        self._members.append(member)
        return member

    async def _coordinator_client(self) -> LocalCoordinatorClient:
        self._check_open()
        self.log.groups.use(self._submit)
        return LocalCoordinatorClient(self.log.groups.coordinator)

    def _new_member(self) -> str:
        return self.log.groups.new_member()

    async def _close(self) -> None:
        for member in self._members:
            await member.aclose()
        self.log.groups.drop(self._submit)
        self._release()
        self._closed = True
        for waiter in self._close_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _channel(self, channel: str) -> MemoryChannel:
        self._check_open()
        try:
            return self.log.channels[channel]
        except KeyError:
            raise not_found(channel) from None
