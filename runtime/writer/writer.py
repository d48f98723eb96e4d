"""`Writer`: the one owner of some pchannels. It numbers and stamps records in log order, acknowledges them when they
are durable, and says how far time has come.

Thread-safe where it must be: `beat` runs on the heart thread while the loop may be blocked; everything that stamps
holds one lock until the WAL has taken the entries, so the order of stamps is the order of the log.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import msgpack

from ..channel_reader import ChannelReader
from ..clock import HybridClock, physical_ms
from ..errors import Closed, Fenced, Overloaded, TidewalError, Unavailable
from ..record import Record, RecordType, stamp
from ..wal import Append, From, FromId, Wal
from .acks import AckManager, Opened
from .observer import WriterObserver
from .producers import Outcome, ProducerTable

INFLIGHT_BYTES = 64 * 1024 * 1024
SNAPSHOT_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to own `channel`, from the catalog: the term, the limit of the previous owner's timestamps, one's own
    limit, and where the log must be read from to know what happened before."""

    channel: str
    term: int
    previous_limit: int
    limit: int
    checkpoint: bytes = b""
    fences: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


class Appended(NamedTuple):
    """What became of a batch. `repeated`: it had been appended before, by the same producer under the same number."""

    ts: int
    rows: int
    repeated: bool


class ChannelPoint(NamedTuple):
    """The last acknowledged record of a channel."""

    term: int
    cseq: int
    id: bytes


class SyncPoint(NamedTuple):
    """One time, and per channel the last record at or before it: everything acknowledged by now is in it."""

    time: int
    channels: dict[str, ChannelPoint]


@dataclass(slots=True)
class _Owned:
    channel: str
    term: int
    cseq: int = 0
    acked: ChannelPoint = field(default_factory=lambda: ChannelPoint(0, 0, b""))
    ticked: int = 0  # the cseq a stored tick covers
    since_snapshot: int = 0
    checkpoint: bytes = b""
    open: bool = False

    def next(self) -> int:
        self.cseq += 1
        self.since_snapshot += 1
        return self.cseq

    def ack(self, cseq: int, id: bytes) -> None:
        if cseq > self.acked.cseq:
            self.acked = ChannelPoint(self.term, cseq, id)


@dataclass(slots=True)
class _Batch:
    """One append on its way."""

    ts: int
    rows: int
    size: int  # bytes
    producer: str
    pseq: int
    records: list[tuple[_Owned, int]]
    ids: list[bytes] = field(default_factory=list[bytes])
    error: TidewalError | None = None
    waiters: list[asyncio.Future[Appended]] = field(default_factory=list["asyncio.Future[Appended]"])


class Writer:
    """Owns pchannels: `take` grants, `open` them once their fences are in the catalog, then `append`.

    `heartbeat_channel` is an ephemeral channel to which `beat` announces (channel, term, last cseq, T). Acknowledged
    means durable, in the order of timestamps. When an append's outcome is unknown the writer is `stalled`: nothing is
    acknowledged or ticked until the channels are taken again under a new term, which decides it.
    """

    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        *,
        heartbeat_channel: str = "",
        inflight_bytes: int = INFLIGHT_BYTES,
        snapshot_records: int = SNAPSHOT_RECORDS,
        observer: WriterObserver | None = None,
    ) -> None:
        self.stalled = False
        self._wal = wal
        self._clock = clock
        self._heartbeat_channel = heartbeat_channel
        self._inflight_limit = inflight_bytes
        self._snapshot_records = snapshot_records
        self._observer = observer or WriterObserver()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # a WAL may answer within `submit`
        self._owned: dict[str, _Owned] = {}
        self._limit = 0
        self._acks: AckManager[_Batch] = AckManager()
        self._producers = ProducerTable()
        self._pending: dict[tuple[str, int], _Batch] = {}
        self._inflight = 0
        self._failure: TidewalError | None = None
        self._tick_running = False
        self._tick_waiters: list[asyncio.Future[None]] = []
        self._resolved: deque[_Batch] = deque()
        self._resolving = False

    # ---- ownership --------------------------------------------------------------------------------------------------

    async def take(self, grants: Sequence[Grant]) -> dict[str, bytes]:
        """Write the fences of `grants`, read each channel up to its own fence, and return the fences' ids for the
        catalog. Appends open from a term before are decided by what stands below the fence. Until `open`, nothing is
        acknowledged."""
        for grant in grants:
            self._clock.observe(grant.previous_limit)
        with self._lock:
            self._limit = max(self._limit, *(grant.limit for grant in grants))
            taken = [_Owned(grant.channel, grant.term, checkpoint=grant.checkpoint) for grant in grants]
            ts = self._clock.now()
            fences = [Append(own.channel, stamp(_FENCE, ts, own.term, own.next()), ts) for own in taken]
            self._owned.update((own.channel, own) for own in taken)
        ids = await self._wal.append_many(fences)
        found: set[tuple[str, int, int]] = set()
        for own, grant, fence in zip(taken, grants, ids, strict=True):
            own.ack(own.cseq, fence)
            found |= await self._recover(own, grant, fence)
        self._decide({grant.channel for grant in grants}, found)
        return {own.channel: fence for own, fence in zip(taken, ids, strict=True)}

    async def _recover(self, own: _Owned, grant: Grant, fence: bytes) -> set[tuple[str, int, int]]:
        """Read what stands below the fence: the clock passes it, producers are remembered."""
        start = FromId(grant.checkpoint, inclusive=True) if grant.checkpoint else From.EARLIEST
        reader = ChannelReader(own.channel, fences=grant.fences)
        found: set[tuple[str, int, int]] = set()
        async for entries in self._wal.read(own.channel, start):
            for record in reader.accept([entry for entry in entries if entry.id < fence]):
                self._clock.observe(record.ts)
                found.add((own.channel, record.term, record.cseq))
                self._remember(record)
                self._observer.recovered(own.channel, record)
            if entries[-1].id >= fence:
                return found
        raise Closed(f"the log was closed while {own.channel} was being recovered")

    def _remember(self, record: Record) -> None:
        if record.type is RecordType.PRODUCERS:
            self._producers.merge(ProducerTable.from_bytes(memoryview(record.body)))
        elif record.producer:
            rows = record.tags.get("batch_rows")
            outcome = Outcome(record.ts, rows if isinstance(rows, int) else 0)
            self._producers.remember(record.producer, record.pseq, outcome, physical_ms(record.ts))

    def _decide(self, channels: set[str], found: set[tuple[str, int, int]]) -> None:
        """End the appends whose outcome was unknown: durable when below the fence, failed for good otherwise."""
        with self._lock:
            for batch in self._acks.items():
                if not all(own.channel in channels for own, _ in batch.records) or batch.error is None:
                    continue
                if any((own.channel, own.term, cseq) in found for own, cseq in batch.records):
                    batch.error = None
                else:
                    batch.error = Unavailable("the append did not happen: its owner lost the answer; retry")
            open_batches = self._acks.items()
            self._acks = AckManager()
            self.stalled = False
            self._resolve(open_batches)

    def open(self, channels: Sequence[str]) -> None:
        """The fences of `channels` are in the catalog: acknowledge from now on."""
        with self._lock:
            for channel in channels:
                self._owned[channel].open = True

    def extend(self, limit: int) -> None:
        """The lease was renewed: stamps and promises may go up to `limit`."""
        with self._lock:
            self._limit = max(self._limit, limit)

    def fence(self, error: Fenced) -> None:
        """Somebody else owns the channels now: refuse everything from here on."""
        with self._lock:
            self._failure = error

    @property
    def channels(self) -> list[str]:
        """The channels owned."""
        return list(self._owned)

    def checkpoints(self) -> dict[str, bytes]:
        """Per channel the id from where a next owner must read."""
        return {own.channel: own.checkpoint for own in self._owned.values()}

    # ---- appending --------------------------------------------------------------------------------------------------

    def append(
        self, records: Sequence[tuple[str, Record]], *, producer: str = "", pseq: int = 0, rows: int = 0
    ) -> asyncio.Future[Appended]:
        """Append (channel, record) pairs as one batch under one timestamp, atomic where the backend is.

        The future ends with the outcome, at once for a batch of a known (producer, pseq), together with the first
        attempt for one that is on its way. Raises, having changed nothing: `Overloaded` (limit
        `proxy.maxInflightBytes`), `Unavailable` (not the owner yet, or past the lease), `Fenced`, `OutcomeUnknown`
        and whatever `Wal.submit` raises."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            known = self._producers.find(producer, pseq) if producer else None
            pending = self._pending.get((producer, pseq)) if producer else None
            if known is not None:
                future.set_result(Appended(known.ts, known.rows, repeated=True))
            elif pending is not None:
                pending.waiters.append(future)
            else:
                batch = self._submit(records, producer, pseq, rows)
                batch.waiters.append(future)
        return future

    def _submit(self, records: Sequence[tuple[str, Record]], producer: str, pseq: int, rows: int) -> _Batch:
        size = sum(len(record.body) for _, record in records)
        owned = self._check(records, size)
        ts = self._stamp()
        numbered = [(own, own.next()) for own in owned]
        entries = [
            Append(own.channel, stamp(record, ts, own.term, cseq), ts)
            for (own, cseq), (_, record) in zip(numbered, records, strict=True)
        ]
        batch = _Batch(ts, rows, size, producer, pseq, numbered)
        opened = self._acks.begin(ts, batch)
        self._inflight += size
        if producer:
            self._pending[producer, pseq] = batch
        try:
            self._wal.submit(entries, partial(self._written, opened))
        except TidewalError:
            self._acks.withdraw(opened)
            self._inflight -= size
            self._pending.pop((producer, pseq), None)
            for own, _ in numbered:
                own.cseq -= 1
            raise
        return batch

    def _check(self, records: Sequence[tuple[str, Record]], size: int) -> list[_Owned]:
        if self._failure is not None:
            raise self._failure
        if self.stalled:
            raise Unavailable("an earlier append's outcome is being found out; retry")
        if self._inflight and self._inflight + size > self._inflight_limit:
            raise Overloaded(
                f"{self._inflight} bytes are on their way to the log, the limit is {self._inflight_limit}; retry",
                limit="proxy.maxInflightBytes",
            )
        owned = [self._owned.get(channel) for channel, _ in records]
        for own, (channel, _) in zip(owned, records, strict=True):
            if own is None or not own.open:
                raise Unavailable(f"this node does not own {channel} yet; retry", channel=channel)
        return cast("list[_Owned]", owned)

    def _stamp(self) -> int:
        ts = self._clock.now()
        if ts > self._limit:
            raise Unavailable("the lease's timestamp limit is reached and not renewed yet; retry")
        return ts

    def _written(self, opened: Opened[_Batch], result: list[bytes] | TidewalError) -> None:
        """The WAL's answer, on a thread of its choosing."""
        with self._lock:
            batch = opened.item
            if isinstance(result, TidewalError):
                batch.error = result
                if result.fields.get("outcome_unknown"):
                    self.stalled = True
                    self._observer.stalled(result)
                    return
            else:
                batch.ids = result
            self._resolve(self._acks.finish(opened))

    def _resolve(self, released: Sequence[_Batch]) -> None:
        """Account for decided batches and hand them to the loop, once for all that are decided meanwhile."""
        now_ms = self._clock.clock.wall_ms()
        for batch in released:
            self._inflight -= batch.size
            if batch.error is None:
                for (own, cseq), id in zip(batch.records, batch.ids or [b""] * len(batch.records), strict=True):
                    own.ack(cseq, id or own.acked.id)
                if batch.producer:
                    self._producers.remember(batch.producer, batch.pseq, Outcome(batch.ts, batch.rows), now_ms)
            self._pending.pop((batch.producer, batch.pseq), None)
        self._resolved.extend(released)
        if self._resolved and not self._resolving:
            self._resolving = True
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            self._resolving = False
            batches = list(self._resolved)
            self._resolved.clear()
        for batch in batches:
            for waiter in batch.waiters:
                if waiter.done():
                    continue
                if batch.error is not None:
                    waiter.set_exception(batch.error)
                else:
                    waiter.set_result(Appended(batch.ts, batch.rows, repeated=False))

    # ---- time -------------------------------------------------------------------------------------------------------

    def sync_point(self) -> SyncPoint:
        """A time, and the last record of each channel at or before it, both as of now. Raises `Unavailable` while
        nothing may be promised (stalled, or past the lease)."""
        with self._lock:
            return self._sync_point()

    def _sync_point(self) -> SyncPoint:
        if self._failure is not None:
            raise self._failure
        if self.stalled:
            raise Unavailable("an earlier append's outcome is being found out; retry")
        time = self._acks.watermark(self._stamp())
        return SyncPoint(time, {own.channel: own.acked for own in self._owned.values() if own.open})

    def beat(self) -> None:
        """Store ticks for channels that had records since their last tick, and announce all. Called periodically, on
        the heart thread; does nothing while nothing may be promised."""
        with self._lock:
            if not self._tick_running:
                self._tick()
            self._announce()
            self._snapshot_producers()

    def tick_now(self) -> asyncio.Future[None]:
        """Ends when a tick is stored, in every channel that needs one, that covers all acknowledged before this call.
        Calls during a running tick share the next one, which starts right after it."""
        future: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._tick_waiters.append(future)
            if not self._tick_running:
                self._tick()
        return future

    def _tick(self) -> None:
        waiters, self._tick_waiters = self._tick_waiters, []
        try:
            time = self._sync_point().time
        except TidewalError as error:
            self._end_tick(waiters, error)
            return
        due = [own for own in self._owned.values() if own.open and own.acked.cseq > own.ticked]
        if not due:
            self._end_tick(waiters, None)
            return
        numbered = [(own, own.next()) for own in due]
        entries = [Append(own.channel, stamp(_TICK, time, own.term, cseq), time) for own, cseq in numbered]
        self._tick_running = True
        try:
            self._wal.submit(entries, partial(self._ticked, numbered, waiters))
        except TidewalError as error:
            self._tick_running = False
            for own, _ in numbered:
                own.cseq -= 1
            self._end_tick(waiters, error)

    def _ticked(
        self,
        numbered: list[tuple[_Owned, int]],
        waiters: list[asyncio.Future[None]],
        result: list[bytes] | TidewalError,
    ) -> None:
        with self._lock:
            self._tick_running = False
            error = result if isinstance(result, TidewalError) else None
            if not isinstance(result, TidewalError):
                for (own, cseq), id in zip(numbered, result, strict=True):
                    own.ticked = cseq
                    own.ack(cseq, id)
                self._announce()
            self._observer.ticked(len(numbered), error)
            self._end_tick(waiters, error)
            if self._tick_waiters:
                self._tick()

    def _end_tick(self, waiters: list[asyncio.Future[None]], error: TidewalError | None) -> None:
        def end() -> None:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None) if error is None else waiter.set_exception(error)

        if waiters:
            self._loop.call_soon_threadsafe(end)

    def _announce(self) -> None:
        if not self._heartbeat_channel:
            return
        try:
            point = self._sync_point()
            self._observer.watermark(point.time)
            body = cast(bytes, msgpack.packb([(c, p.term, p.cseq, point.time) for c, p in point.channels.items()]))
            payload = stamp(Record(RecordType.HEARTBEAT, body=body), point.time, 0, 0)
            self._wal.submit([Append(self._heartbeat_channel, payload, point.time)], _ignore)
        except TidewalError as error:  # nothing can be promised now; the next beat tries again, readers see the lag
            self._observer.silent(error)

    def _snapshot_producers(self) -> None:
        """Bound what a next owner must read: store the producers' outcomes. Appends on their way are not in the table,
        so the checkpoint is not the snapshot itself but the last record that was acknowledged before it."""
        for own in self._owned.values():
            if not own.open or own.since_snapshot < self._snapshot_records:
                continue
            try:
                ts, checkpoint = self._stamp(), own.acked.id
                record = Record(RecordType.PRODUCERS, body=self._producers.to_bytes())
                cseq = own.next()
                entry = Append(own.channel, stamp(record, ts, own.term, cseq), ts)
                own.since_snapshot = 0
                self._wal.submit([entry], partial(self._snapshotted, own, cseq, checkpoint))
            except TidewalError as error:
                self._observer.silent(error)

    def _snapshotted(self, own: _Owned, cseq: int, checkpoint: bytes, result: list[bytes] | TidewalError) -> None:
        if not isinstance(result, TidewalError):
            with self._lock:
                own.checkpoint = checkpoint
                own.ack(cseq, result[0])

    async def close(self) -> int:
        """Wait until everything on its way is decided, store a last tick, stop. Returns the highest timestamp this
        owner has given out or promised: the limit that its successor must pass."""
        while self._pending or len(self._acks):
            waiters = [waiter for batch in self._acks.items() for waiter in batch.waiters]
            if not waiters or self.stalled:
                break
            await asyncio.wait(waiters)
        if not self.stalled and self._failure is None and self._owned:
            await self.tick_now()
        with self._lock:
            self._failure = self._failure or Closed("the writer is closed")
            return self._clock.last


_FENCE = Record(RecordType.FENCE)
_TICK = Record(RecordType.TIME_TICK)


def _ignore(_: list[bytes] | TidewalError) -> None:
    """A heartbeat that is lost is followed by another."""
