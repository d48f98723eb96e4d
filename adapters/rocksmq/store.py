"""`RocksMQ`: the owner of a directory, as a `Wal`.

Three threads beside the callers': the journal's writer, the keeper (segments, retention, free space) and, when served,
the socket's. Callers share one short lock for what orders appends: ids are given out under it, in the order in which
the journal writes.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...runtime.clock import Clock, SystemClock
from ...runtime.disk import Disk, RealDisk
from ...runtime.errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    DirectoryUnwritable,
    DiskFull,
    DiskPressure,
    JournalFailed,
    MessageTooLarge,
    Overloaded,
    TidewalError,
)
from ...runtime.metrics import Metrics
from ...runtime.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Durability,
    Entry,
    OnAppended,
    Payload,
    Start,
)
from . import channels as records
from .channels import LIFE_SHIFT, ChannelState, check_name, decode_id, encode_id
from .directory import Directory
from .frame import ROW_BYTES
from .history import Gone, History
from .index import Index
from .journal import PENDING_BYTES, Groups, Journal, Write, control
from .keeper import Keeper
from .live import Channel, TailBudget, channel_of, make_batch, trim_ephemeral
from .measures import Measures
from .reader import Reader
from .recovery import Recovered, Recovery, RecoveryReport
from .retention import expendable
from .segments import Segments
from .server import Server
from .wakeup import Hub, Hubs

T = TypeVar("T")

SEGMENT_BYTES = 32 * 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
FREE_SPACE_BYTES = 256 * 1024 * 1024
SPARE_SEGMENTS = 1
READ_THREADS = 2
CAPABILITIES = Capabilities(atomic_batches=True, seek_by_time=True, truncate=True, multi_process_write=False)


class RocksMQ:
    """An owned journal. Open with `RocksMQ.open`; everything public is thread-safe unless it is a coroutine."""

    name = "rocksmq"
    capabilities = CAPABILITIES

    @classmethod
    async def open(
        cls,
        directory: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        spare_segments: int = SPARE_SEGMENTS,
        tail_bytes: int = TAIL_BYTES,
        pending_bytes: int = PENDING_BYTES,
        free_space_bytes: int = FREE_SPACE_BYTES,
        disk: Disk | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        serve: bool = True,
    ) -> RocksMQ:
        """Own `directory`, created if absent, and recover what it holds.

        `segment_bytes` may differ from one opening to the next. `spare_segments` recycled files are kept beside the one
        made ready ahead of need. `tail_bytes` of the newest entries stay in memory. Over `pending_bytes` of appends not
        yet written, `submit` raises `Overloaded`; below `free_space_bytes` of free space, `DiskPressure`. With `serve`,
        other processes may read through a Unix socket in the directory.

        Raises `DirectoryInUse`, `DirectoryUnwritable`, `FormatTooNew`, `CorruptLog`, `DiskFull`, `JournalFailed`.
        """
        store = cls(tail_bytes, pending_bytes, free_space_bytes, disk or RealDisk(), clock or SystemClock(), metrics)
        return await asyncio.to_thread(store._open, directory, segment_bytes, spare_segments, serve)

    def __init__(
        self,
        tail_bytes: int,
        pending_bytes: int,
        free_space_bytes: int,
        disk: Disk,
        clock: Clock,
        metrics: Metrics | None,
    ) -> None:
        """Use `open`."""
        self._budget = TailBudget(tail_bytes)
        self._pending_limit, self._free_space_bytes = pending_bytes, free_space_bytes
        self._disk, self._clock, self._measures = disk, clock, Measures(metrics)
        self._lock = threading.Lock()
        self._retention_lock = threading.Lock()
        self._hubs = Hubs()
        self._names: dict[str, Channel] = {}
        self._live: dict[int, Channel] = {}
        self._pressure = False
        self._ephemeral_floor = 0
        self._closing = False
        self._closed = threading.Event()
        self._server: Server | None = None

    # ---- opening and closing -----------------------------------------------------------------------------------------

    def _open(self, directory: str, segment_bytes: int, spare_segments: int, serve: bool) -> RocksMQ:
        self._directory = Directory(directory)
        self._reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="tidewal-read")
        opened: list[Callable[[], None]] = [self._directory.close]
        try:
            self._index = Index(self._directory.index)
            opened.append(self._index.close)
            self._segments = Segments(self._disk, self._directory.journal, segment_bytes, spare_segments)
            opened.append(self._segments.close)
            recovered = Recovery(self._disk, self._segments, self._index).run()
            if recovered.current is None and self._segments.wants_spare:
                self._segments.prepare_spare()
            self._adopt(recovered)
            opened += [self._keeper.stop, self._journal.stop]
            self._keeper.start()
            self._journal.start()
            self._begin_life()
            if serve:
                self._server = Server(self, self._directory.path)
                self._server.start()
        except BaseException as error:
            for undo in reversed(opened):
                undo()
            if isinstance(error, OSError):
                raise _opening_failed(self._directory.path, error) from error
            raise
        return self

    def _adopt(self, recovered: Recovered) -> None:
        self.recovery: RecoveryReport = recovered.report
        self._history = History(self._segments, self._index)
        self._keeper = Keeper(lambda: self._segments.wants_spare, self._segments.prepare_spare, self._tick)
        self._journal = Journal(
            self._disk,
            self._segments,
            self._index,
            recovered,
            clock=self._clock,
            deliver=self._deliver,
            hubs=self._hubs,
            trim=self._budget.trim,
            need_spare=self._keeper.need_spare,
            keep_ready=self._keeper.wake,
            measures=self._measures,
        )
        table = recovered.table
        self._boot, self._floor, self._next_number = table.boot + 1, table.floor, table.next_number
        self._ephemeral_floor = self._boot << LIFE_SHIFT
        for number, state in table.by_number.items():
            forgetful = state.policy.ephemeral or state.policy.acks is not Durability.ALL
            base = self._boot << LIFE_SHIFT if forgetful else 0
            channel = channel_of(state, base, recovered.removed_to.get(number, state.floor))
            self._live[number] = self._names[state.name] = channel

    def _begin_life(self) -> None:
        """Count this life in the journal; it proves that the journal takes writes, too."""
        done = threading.Event()
        outcome: list[TidewalError] = []

        def settled(result: list[bytes] | TidewalError) -> None:
            if isinstance(result, TidewalError):
                outcome.append(result)
            done.set()

        self._journal.put(control(records.boot(self._boot), self._clock.wall_ms(), settled))
        done.wait()
        if outcome:
            raise outcome[0]
        self.check_space()

    async def close(self) -> None:
        with self._lock:
            first, self._closing = not self._closing, True
        for channel in list(self._live.values()):
            channel.wake()
        await asyncio.to_thread(self._close if first else self._closed.wait)

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._journal.stop()
        self._keeper.stop()
        for channel in list(self._live.values()):
            channel.wake()
        self._reads.shutdown(wait=True)
        self._journal.mark_end()
        self._index.close()
        self._segments.close()
        self._directory.close()
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def directory(self) -> str:
        return self._directory.path

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        check_name(channel)
        hub = self._hubs.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        with self._lock:
            self._check_writable()
            existing = self._names.get(channel)
            if existing is not None and existing.policy != policy:
                raise ChannelExists(f"channel {channel} exists with another policy", channel=channel)
            if existing is not None and existing.created:
                return
            if existing is not None:  # somebody else is creating it; wait behind that
                self._journal.put(Write(lambda result: hub.settle(future, result)))
            else:
                self._check_space_for(policy)
                self._create(channel, policy, lambda result: hub.settle(future, result))
        await future
        if channel not in self._names:
            raise ChannelNotFound(f"channel {channel} was dropped while it was created", channel=channel)

    def _create(self, name: str, policy: ChannelPolicy, done: OnAppended) -> None:
        floor = 0 if policy.ephemeral else self._floor
        state = ChannelState(self._next_number, name, policy, floor, last_id=floor)
        channel = channel_of(state, self._ephemeral_floor if policy.ephemeral else 0, floor)
        channel.created = False
        self._next_number += 1
        self._names[name] = self._live[state.number] = channel

        def created(result: list[bytes] | TidewalError) -> None:
            channel.created = True
            if isinstance(result, TidewalError):
                with self._lock:
                    self._remove(channel)
            done(result)

        self._journal.put(control(records.create(state), self._clock.wall_ms(), created, creates=state.number))

    def _remove(self, channel: Channel) -> None:
        channel.dropped = True
        if self._names.get(channel.name) is channel:
            del self._names[channel.name]
        del self._live[channel.number]
        channel.wake()

    async def channels(self) -> list[str]:
        self._check_open()
        return sorted(self._names)

    async def describe(self, channel: str) -> ChannelInfo:
        found = self.find(channel)
        first = await self.blocking(lambda: self._first_entry(found))
        latest = encode_id(found.visible_to) if found.visible_to > found.floor else None
        return ChannelInfo(channel, found.policy, first, latest)

    def _first_entry(self, channel: Channel) -> bytes | None:
        while (first := self.first_visible(channel)) <= channel.visible_to:
            entries = channel.tail.take(first)
            if entries is None:
                try:
                    entries, _ = self._history.read(channel.number, first, channel.tail.forgotten_to)
                except Gone:
                    continue
                entries = entries or channel.tail.take(channel.tail.forgotten_to + 1)
            return entries[0].id if entries else None
        return None

    async def drop_channel(self, channel: str) -> None:
        hub = self._hubs.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        with self._lock:
            self._check_writable()
            found = self._names.get(channel)
            if found is None:
                return
            self._remove(found)
            if found.policy.ephemeral:
                self._ephemeral_floor = max(self._ephemeral_floor, found.next_id)
            else:
                self._floor = max(self._floor, found.next_id)

            def dropped(result: list[bytes] | TidewalError) -> None:
                found.tail.forget(len(found.tail.batches))
                hub.settle(future, result)

            self._journal.put(control(records.drop(found.number), self._clock.wall_ms(), dropped))
        await future

    async def truncate(self, channel: str, id: bytes) -> None:
        found = self.find(channel)
        number = min(decode_id(id), found.visible_to + 1)
        if found.policy.ephemeral or number <= found.truncated_to:
            return
        found.truncated_to = number
        await self._control(records.truncate(found.number, number))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        found = self.find(channel)
        if found.policy.ephemeral:
            return
        number = None if id is None else decode_id(id)
        if number is not None:
            found.holds[holder] = number
        await self._control(records.hold(found.number, holder, number))
        if number is None:
            found.holds.pop(holder, None)  # only now: until it is durable, a crash would bring it back

    async def _control(self, record: bytes) -> None:
        hub = self._hubs.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        with self._lock:
            self._check_writable()
            self._journal.put(control(record, self._clock.wall_ms(), lambda result: hub.settle(future, result)))
        await future

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        ids: list[bytes] | None = None
        with self._lock:
            self._check_writable()
            rows: list[tuple[Channel, bytes | memoryview, int]] = []
            durable_bytes = 0
            busy = False
            for name, payload, timestamp in entries:
                channel = self._found(name)
                content = payload if type(payload) is bytes else _frozen(payload)
                if len(content) > channel.policy.max_message_bytes:
                    raise _too_large(channel, len(content))
                if not channel.policy.ephemeral:
                    durable_bytes += len(content) + ROW_BYTES
                elif channel.queued:
                    busy = True
                rows.append((channel, content, timestamp))
            if durable_bytes:
                self._check_room(durable_bytes)
            if durable_bytes or busy:
                write = self._queue(rows, done)
                if write.done is not done:
                    ids = write.ids
            else:
                ids = self._publish(rows)
        if ids is not None:
            done(ids)

    def _queue(self, rows: list[tuple[Channel, bytes | memoryview, int]], done: OnAppended) -> Write:
        """Make the rows part of the next commit."""
        write = Write(done)
        synced = written = False  # the strongest durability that any of the channels asks for
        for channel, payload, timestamp in rows:
            number, id = channel.number, channel.next_id
            channel.next_id = id + 1
            entry = Entry(encode_id(id), timestamp, payload)
            write.ids.append(entry.id)
            if channel.policy.ephemeral:
                channel.queued += 1
                write.loose.append((number, entry))
            else:
                synced = synced or channel.policy.acks is Durability.ALL
                written = written or channel.policy.acks is Durability.ONE
                write.entries.append((number, entry))
                write.table += (number, len(payload), id, timestamp)
                write.bodies.append(payload)
                write.body_bytes += len(payload)
        if write.entries and not synced:
            write.early = True
            if not written:
                write.done = _unheard
        self._journal.put(write)
        return write

    def _publish(self, rows: list[tuple[Channel, bytes | memoryview, int]]) -> list[bytes]:
        """Deliver entries of ephemeral channels at once."""
        ids: list[bytes] = []
        groups: dict[Channel, list[Entry]] = {}
        for channel, payload, timestamp in rows:
            id = encode_id(channel.next_id)
            channel.next_id += 1
            ids.append(id)
            groups.setdefault(channel, []).append(Entry(id, timestamp, payload))
        for channel, entries in groups.items():
            channel.deliver(make_batch(entries))
            trim_ephemeral(channel)
        return ids

    def _deliver(self, durable: Groups, loose: Groups) -> None:
        """Called by the journal: these entries are durable now."""
        for number, entries in durable.items():
            channel = self._live.get(number)
            if channel is not None:
                batch = make_batch(entries)
                self._budget.added(channel, batch)
                channel.deliver(batch)
        if loose:
            with self._lock:
                for number, entries in loose.items():
                    channel = self._live.get(number)
                    if channel is not None:
                        channel.queued -= len(entries)
                        channel.deliver(make_batch(entries))
                        trim_ephemeral(channel)

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        hub = self._hubs.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        self.submit((Append(channel, payload, timestamp),), lambda result: hub.settle(future, result))
        return (await future)[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        hub = self._hubs.current()
        future: asyncio.Future[list[bytes]] = hub.loop.create_future()
        self.submit(entries, lambda result: hub.settle(future, result))
        return await future

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self._check_open()
        return Reader(self, channel, start)

    async def latest_id(self, channel: str) -> bytes | None:
        found = self.find(channel)
        return encode_id(found.visible_to) if found.visible_to > found.floor else None

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        found = self.find(channel)
        number = await self.blocking(lambda: self.find_timestamp(found, timestamp))
        return None if number is None else encode_id(number)

    def find(self, channel: str) -> Channel:
        """The open channel of that name. Raises `Closed` and `ChannelNotFound`."""
        self._check_open()
        return self._found(channel)

    def first_visible(self, channel: Channel) -> int:
        """The id at which `From.EARLIEST` starts."""
        if channel.policy.ephemeral:
            return channel.tail.forgotten_to + 1
        return min(channel.first_id, channel.visible_to + 1)

    def find_timestamp(self, channel: Channel, timestamp: int) -> int | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`. Blocks."""
        while True:
            batches, first = channel.tail.batches, self.first_visible(channel)
            forgotten_to, reaches = channel.tail.forgotten_to, channel.tail.forgotten_timestamp >= timestamp
            if reaches and first <= forgotten_to and not channel.policy.ephemeral:
                try:
                    found = self._history.id_at(channel.number, timestamp, first)
                except Gone:
                    continue
                if found is not None:
                    return found if found <= channel.visible_to else None
            for batch in batches:
                if batch.max_timestamp >= timestamp and batch.last_id >= first:
                    for entry in batch.entries:
                        if entry.timestamp >= timestamp and (id := decode_id(entry.id)) >= first:
                            return id
            return None

    @property
    def history(self) -> History:
        return self._history

    def hub(self) -> Hub:
        return self._hubs.current()

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run a blocking read on one of the read threads."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, call)
        except RuntimeError:
            if self._closing:
                raise Closed(f"the log {self._directory.path} is closed") from None
            raise

    # ---- upkeep ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.check_space()
        self.retain_now()

    def check_space(self) -> bool:
        """Look at the free space; whether appends to durable channels are accepted. Runs twice a second by itself."""
        free = self._disk.free_bytes(self._directory.journal)
        self._pressure = free < self._free_space_bytes
        self._measures.space(free, self._segments.size, len(self._segments.epochs), self._segments.spares)
        return not self._pressure

    def retain_now(self) -> int:
        """Apply retention; how many segments went. Runs twice a second by itself."""
        with self._retention_lock:
            sealed = sorted(self._journal.sealed.copy().items())
            epochs = expendable(sealed, dict(self._journal.extents), dict(self._live), self._clock.wall_ms())
            for epoch in epochs:
                summary = self._journal.sealed.pop(epoch)
                for number, (last_id, _) in summary.channels.items():
                    channel = self._live.get(number)
                    if channel is not None:
                        channel.removed_to = max(channel.removed_to, last_id)
                self._segments.recycle_first()
                self._index.forget(epoch, list(summary.channels))
                self._measures.removed(summary.end)
            return len(epochs)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _found(self, name: str) -> Channel:
        try:
            return self._names[name]
        except KeyError:
            raise ChannelNotFound(f"no channel {name}; create it first", channel=name) from None

    def _check_open(self) -> None:
        if self._closing:
            raise Closed(f"the log {self._directory.path} is closed")

    def _check_writable(self) -> None:
        self._check_open()
        failure = self._journal.failure
        if failure is not None:
            raise type(failure)(failure.message)

    def _check_space_for(self, policy: ChannelPolicy) -> None:
        if self._pressure and not policy.ephemeral:
            raise self._too_little_space()

    def _too_little_space(self) -> DiskPressure:
        return DiskPressure(
            f"less than {self._free_space_bytes} bytes are free for {self._directory.path}", limit="free_space_bytes"
        )

    def _check_room(self, size: int) -> None:
        if self._pressure:
            raise self._too_little_space()
        if size > self._segments.capacity:
            raise MessageTooLarge(
                f"one commit of {size} bytes is over what a segment holds ({self._segments.capacity})",
                size=size,
                limit=self._segments.capacity,
            )
        if self._journal.pending_bytes + size > self._pending_limit:
            raise Overloaded(f"{self._pending_limit} bytes wait for the disk already", limit="pending_bytes")


def _frozen(payload: Payload) -> bytes | memoryview:
    """The payload as something nobody else writes into, copied only where that is not sure."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, memoryview) and payload.readonly and payload.c_contiguous:
        return payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
    return bytes(payload)


def _unheard(_: list[bytes] | TidewalError) -> None:
    """The callback of a write that was acknowledged when it was handed over."""


def _too_large(channel: Channel, size: int) -> MessageTooLarge:
    limit = channel.policy.max_message_bytes
    return MessageTooLarge(
        f"a message of {size} bytes for {channel.name} is over its limit of {limit}", size=size, limit=limit
    )


def _opening_failed(path: str, error: OSError) -> TidewalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{path} cannot be opened: no space", path=path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryUnwritable(f"{path} cannot be written: {error.strerror}", path=path)
    return JournalFailed(f"{path} cannot be opened: {error}", path=path)
