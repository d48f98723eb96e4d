"""`ChannelOwner`: the one owner of some pchannels. It numbers and stamps records in log order, acknowledges them when
they are durable, and announces how far time has come.

Thread-safe where it must be: `tick_all` runs on the heartbeat thread while the loop may be blocked; all code that
stamps holds one lock until the WAL has taken the entries, so the order of stamps is the order of the log.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import cast

from ..arguments import checked
from ..clock import HybridClock, physical_ms
from ..errors import Closed, DeadlineExceeded, Fenced, InvalidRequest, Overloaded, TidewalError, Unavailable
from ..log.checks import check_framed
from ..log.record import CONTROL_TYPES, Record, RecordType, stamp
from ..log.wal import Append, ControlAppend, From, FromId, Wal
from ..streams.channel_reader import ChannelReader, Granted, Grants
from ..streams.stream_base import reading
from .acks import AckManager
from .batch import AppendBatch, Appended, RecordKey, missing, prepared, recorded_outcome
from .observer import ChannelOwnerObserver
from .owned_channel import ChannelGrant, ChannelPoint, OwnedChannel, SyncPoint
from .producers import BatchOutcome, ProducerTable, given_up
from .snapshots import Snapshots
from .ticker import Ticker

INFLIGHT_BYTES = 64 * 1024 * 1024
SNAPSHOT_RECORDS = 10_000

FENCE_NAME = "name"  # tag of a fence: the name of the producer that wrote it


class ChannelOwner:
    """Owns pchannels: `acquire` grants, `activate` the channels once their fences are in the catalog, then `append`.

    `heartbeat_channel` is an ephemeral channel to which `tick_all` announces (channel, term, last cseq, T).
    Acknowledged means durable, in the order of timestamps. At most `inflight_bytes` are in flight. A channel's producer
    table is stored after `snapshot_records` records. `lease_holds` is called after an append's result has arrived and
    before it is acknowledged (guarantee 3). When an append's outcome is unknown, or the lease was over when it came,
    the owner is `stalled`: nothing is acknowledged or ticked until all channels are acquired again under a new term,
    which decides it.

    `grants` is the catalog that terms come from. With it, a record under a term that was never granted is a bad record.
    Without it the log alone knows which terms were used, and `acquire` refuses one that is not above them. Its fences
    carry `name`.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        *,
        heartbeat_channel: str = "",
        inflight_bytes: int = INFLIGHT_BYTES,
        snapshot_records: int = SNAPSHOT_RECORDS,
        observer: ChannelOwnerObserver | None = None,
        lease_holds: Callable[[], bool] | None = None,
        grants: Grants | None = None,
        name: str = "",
    ) -> None:
        check_framed(wal, "a channel owner")
        self.stalled: bool = False
        self._wal = wal
        self._clock = clock
        self._inflight_limit = inflight_bytes
        self._observer = observer or ChannelOwnerObserver()
        self._lease_holds = lease_holds or (lambda: True)
        self._grants = grants
        self._fence = Record(RecordType.FENCE, tags={FENCE_NAME: name} if name else {})
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # a WAL may call `done` within `submit`
        self._owned: dict[str, OwnedChannel] = {}
        self._limit = 0  # the lowest of the open channels: nothing is stamped or promised above it
        self._acks: AckManager[AppendBatch] = AckManager()
        self._producers = ProducerTable()
        self._pending: dict[tuple[str, int], AppendBatch] = {}
        self._inflight = 0
        self._closed = False
        self._resolved: deque[AppendBatch] = deque()
        self._resolving = False
        self._settled = asyncio.Event()
        self._ticker = Ticker(wal, self._lock, self._owned, self._sync_point, heartbeat_channel, self._observer)
        self._snapshots = Snapshots(
            wal, self._lock, self._owned, self._producers, self._timestamp, snapshot_records, self._observer
        )

    # ---- ownership --------------------------------------------------------------------------------------------------

    @checked
    async def acquire(self, grants: Sequence[ChannelGrant]) -> dict[str, bytes]:
        """Write the fences of `grants`, read each channel up to its own fence, and return the fences' ids for the
        catalog. Appends open from a term before are decided by what stands below the fence. Until `activate`, nothing
        is acknowledged. When it raises, the channels are not owned: acquire them again under a new term. Raises
        `Fenced` when a term was used before or a higher one was granted (`channel`, `term`: acquire it again above
        that), `Unavailable` when a grant's limit has passed."""
        if not grants:
            return {}
        terms = {grant.channel: grant.term for grant in grants}
        for grant in grants:
            self._clock.observe(grant.previous_limit)
        with self._lock:
            acquired = [OwnedChannel(grant.channel, grant.term, grant.limit, grant.checkpoint) for grant in grants]
            ts = self._clock.now()
            if ts > min(grant.limit for grant in grants):
                raise Unavailable("the limit of the grant's timestamps has passed; ask for another grant")
            fences = [ControlAppend(own.channel, stamp(self._fence, ts, own.term, own.next()), ts) for own in acquired]
            self._owned.update((own.channel, own) for own in acquired)
            self._set_limit()
            undecided = {
                key for batch in self._acks.items() for key in batch.record_keys()
            }  # none can be added meanwhile
        ids = await self._wal.append_many(fences)
        found: set[RecordKey] = set()
        for own, grant, fence in zip(acquired, grants, ids, strict=True):
            found |= await self._recover(own, grant, fence, undecided)
            with self._lock:
                own.ack(1, fence, ts)
                own.ticked = ts  # a fence announces its time, as a tick does
        self._resolve_recovered(terms, found)
        return {own.channel: fence for own, fence in zip(acquired, ids, strict=True)}

    async def _recover(
        self, own: OwnedChannel, grant: ChannelGrant, fence: bytes, undecided: Set[RecordKey]
    ) -> set[RecordKey]:
        """Read what stands below the fence: the clock passes it, and producers are remembered. Returns those of the
        `undecided` records that are there."""
        first = (await self._wal.describe(own.channel)).first_id or b""
        # a checkpoint that retention has passed is older than any producer that is still known; one behind the fence is
        # of a channel that was dropped, and made again
        there = grant.checkpoint and first <= grant.checkpoint < fence
        start = FromId(grant.checkpoint, inclusive=True) if there else From.EARLIEST
        reader = self._recovery_reader(grant, fence)
        found: set[RecordKey] = set()
        async with reading(self._wal, own.channel, start) as batches:
            async for entries in batches:
                for record in reader.accept([entry for entry in entries if entry.id < fence]):
                    self._clock.observe(record.ts)
                    key = (own.channel, record.term, record.cseq)
                    if key in undecided:
                        found.add(key)
                    with self._lock:
                        own.since_checkpoint += 1
                        self._remember_producer(own.channel, record)
                    self._observer.recovered(own.channel, record)
                if entries[-1].id >= fence:
                    self._check_highest_term(own, reader.term)
                    return found
        raise Closed(f"the log was closed while {own.channel} was being recovered")

    def _recovery_reader(self, grant: ChannelGrant, fence: bytes) -> ChannelReader:
        granted = None
        if self._grants is not None:
            limit = max(grant.limit, grant.previous_limit)
            granted = Granted(grant.term, limit, {**grant.fences, grant.term: fence})
        return ChannelReader(grant.channel, fences=grant.fences, on_bad=self._observer.bad, granted=granted)

    def _check_highest_term(self, own: OwnedChannel, below: int) -> None:
        """Raise `Fenced` unless the term is above all others: readers drop what comes under a lower one, so nothing may
        be acknowledged under it."""
        if self._grants is not None:
            below = max(below, self._grants.granted(own.channel).term - 1)
        if below >= own.term:
            raise Fenced(
                f"{own.channel} was owned under term {below} already, and readers would drop all that is written under "
                f"term {own.term}: acquire it under a higher term than {below}",
                channel=own.channel,
                term=below,
            )

    def _remember_producer(self, channel: str, record: Record) -> None:
        if record.type is RecordType.PRODUCERS:
            self._producers.merge(ProducerTable.from_bytes(memoryview(record.body)))
        elif record.producer:
            outcome = recorded_outcome(channel, record)
            self._producers.remember(record.producer, record.pseq, outcome, physical_ms(record.ts))

    def _resolve_recovered(self, terms: dict[str, int], found: Set[RecordKey]) -> None:
        """End the appends that the fences decide: durable when below them, failed for good otherwise."""
        with self._lock:
            for batch in self._acks.items():
                if not batch.decided and batch.resolve(terms, found):
                    self._decide(batch)
            self.stalled = any(batch.unknown for batch in self._acks.items() if not batch.decided)

    @checked
    def activate(self, channels: Sequence[str]) -> None:
        """Acknowledge appends to `channels` from now on: their fences are in the catalog. Raises `InvalidRequest`
        unless all were acquired."""
        with self._lock:
            if not set(channels) <= self._owned.keys():
                raise InvalidRequest("channels are acquired before they are activated")
            for channel in channels:
                own = self._owned[channel]
                own.open = True
                self._observer.opened(channel, own.term)
            self._set_limit()

    @checked
    def renew(self, limit: int) -> None:
        """Stamp and promise timestamps up to `limit`: the lease was renewed."""
        with self._lock:
            for own in self._owned.values():
                own.limit = max(own.limit, limit)
            self._set_limit()

    def _set_limit(self) -> None:
        self._limit = min((own.limit for own in self._owned.values() if own.open), default=0)

    @property
    def channels(self) -> list[str]:
        """The channels that are owned."""
        return list(self._owned)

    @property
    def limit(self) -> int:
        """The timestamp up to which the lease of the open channels goes; 0 while none is open."""
        return self._limit

    @property
    def inflight_bytes(self) -> int:
        """Bytes accepted and not yet decided."""
        return self._inflight

    def checkpoints(self) -> dict[str, bytes]:
        """Per channel, the id from which a next owner must read."""
        return {own.channel: own.checkpoint for own in self._owned.values()}

    @checked
    def last_sequence(self, producer: str, known_to: int = 0) -> int:
        """The highest number of `producer`, which counts its batches from 1, up to which all are in the log; those up
        to `known_to` are known to be."""
        with self._lock:
            return self._producers.last(producer, known_to)

    @checked
    def highest_sequence(self, producer: str) -> int:
        """The highest number of `producer` of which anything is in the log; 0 for none."""
        with self._lock:
            return self._producers.highest(producer)

    @checked
    def note_appended(self, producer: str, upto: int) -> None:
        """All batches of `producer` up to the number `upto` are known to have been in the log: one whose outcome is not
        there any more raises `OutcomeUnknown`, and is not written again."""
        with self._lock:
            self._producers.forget(producer, upto)

    # ---- appending --------------------------------------------------------------------------------------------------

    @checked
    def append(
        self,
        records: Sequence[tuple[str, Record]],
        *,
        producer: str = "",
        pseq: int = 0,
        rows: int = 0,
        digest: int = 0,
    ) -> asyncio.Future[Appended]:
        """Append (channel, record) pairs as one batch under one timestamp, atomic where the backend is. Records get
        the producer's identity, and those that share a channel become parts of one whole, where they are not yet.
        `rows` and `digest` are kept with the identity, and returned to a retry.

        The future ends with the outcome: at once for a batch of a known (producer, pseq), together with the first
        attempt for one that is in flight. A batch that some channels have and others do not is written to the others,
        under a timestamp of their own. Raises, having changed nothing: `Overloaded` (limit
        `proxy.maxInflightBytes`), `Unavailable` (not the owner yet, or past the lease), `Fenced`, `OutcomeUnknown`
        and what `Wal.submit` raises. Call it on the loop."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            known = self._producers.find(producer, pseq) if producer else None
            pending = self._pending.get((producer, pseq)) if producer else None
            if known is not None and (not known.present or known.digest != digest):
                future.set_result(Appended(known.ts, known.rows, repeated=True, digest=known.digest))
                self._observer.repeated()
            elif pending is not None:
                pending.waiters.append(future)
                self._observer.repeated()
            else:
                channels = len({channel for channel, _ in records}) if len(records) > 1 else 1
                rest = records if known is None else missing(records, known, channels)
                self._submit(rest, producer, pseq, rows, digest, channels).waiters.append(future)
        return future

    @checked
    def give_up(self, channel: str, producer: str, pseq: int) -> asyncio.Future[Appended]:
        """Let the number `pseq` of `producer` be done with, by a record in `channel`: its batch is not appended any
        more, and a retry gets an outcome of 0 rows, as the future does. One that is in the log, or in flight to it,
        stays, and its outcome is the future's; what only some channels have of it stays there, too. Raises as `append`
        does."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            known = self._producers.find(producer, pseq)
            pending = self._pending.get((producer, pseq))
            if known is not None and not known.present:
                future.set_result(Appended(known.ts, known.rows, repeated=True, digest=known.digest))
            elif pending is not None:
                pending.waiters.append(future)
            else:
                records = [(channel, Record(RecordType.PRODUCERS, body=given_up(producer, pseq)))]
                self._submit(records, producer, pseq, 0, 0, 1).waiters.append(future)
        return future

    def _submit(
        self,
        records: Sequence[tuple[str, Record]],
        producer: str,
        pseq: int,
        rows: int,
        digest: int,
        channels: int,
    ) -> AppendBatch:
        size = sum(len(record.body) for _, record in records)
        owned = self._check(records, size)
        ts = self._timestamp()
        batch = AppendBatch(ts, rows, size, producer, pseq, [(own, own.next()) for own in owned], digest)
        batch.opened = self._acks.begin(ts, batch)
        self._account(batch, 1)
        try:
            whole = prepared(records, ts, producer, pseq, rows, digest, channels)
            kind = ControlAppend if all(record.type in CONTROL_TYPES for _, record in records) else Append
            entries = [
                kind(own.channel, stamp(record, ts, own.term, cseq), ts)
                for (own, cseq), record in zip(batch.records, whole, strict=True)
            ]
            self._wal.submit(entries, partial(self._on_appended, batch))
        except BaseException:
            self._acks.withdraw(batch.opened)
            self._account(batch, -1)
            for own in owned:
                own.take_back()
            raise
        return batch

    def _check(self, records: Sequence[tuple[str, Record]], size: int) -> list[OwnedChannel]:
        self._check_promising()
        if self._inflight and self._inflight + size > self._inflight_limit:
            raise Overloaded(
                f"{self._inflight} bytes are in flight to the log, the limit is {self._inflight_limit}; retry",
                limit="proxy.maxInflightBytes",
            )
        owned = [self._owned.get(channel) for channel, _ in records]
        for own, (channel, _) in zip(owned, records, strict=True):
            if own is None or not own.open:
                raise Unavailable(f"this node does not own {channel} yet; retry", channel=channel)
        return cast("list[OwnedChannel]", owned)

    def _account(self, batch: AppendBatch, sign: int) -> None:
        """Count a batch that is in flight (`sign` 1), or not any more (-1)."""
        self._inflight += sign * batch.size
        for own, _ in batch.records:
            own.pending += sign
        if batch.producer and sign > 0:
            self._pending[batch.producer, batch.pseq] = batch
        elif batch.producer:
            self._pending.pop((batch.producer, batch.pseq), None)

    def _check_promising(self) -> None:
        if self._closed:
            raise Closed("the channel owner is closed")
        if self.stalled:
            raise Unavailable("an earlier append's outcome is being determined; retry")

    def _timestamp(self) -> int:
        """A new timestamp, to be stamped or promised."""
        self._check_promising()
        ts = self._clock.now()
        if ts > self._limit:
            raise Unavailable("the lease's timestamp limit is reached and not renewed yet; retry")
        return ts

    def _on_appended(self, batch: AppendBatch, result: list[bytes] | TidewalError) -> None:
        """The WAL's result, on any thread. For a batch that a new fence or this owner's end has decided it is
        ignored."""
        with self._lock:
            if batch.decided:
                return
            if not isinstance(result, TidewalError):
                batch.ids = result
                if self._lease_holds():
                    self._decide(batch)
                    return
                result = Unavailable("the lease was over when the log answered", outcome_unknown=True)
            batch.error = result
            if result.fields.get("outcome_unknown"):
                batch.unknown = self.stalled = True
                self._loop.call_soon_threadsafe(self._settled.set)
                self._observer.stalled(result)
            else:
                self._decide(batch)

    def _decide(self, batch: AppendBatch) -> None:
        batch.decided = True
        assert batch.opened is not None
        self._resolve(self._acks.finish(batch.opened))

    def _resolve(self, released: Iterable[AppendBatch]) -> None:
        """Account for decided batches and hand them to the loop, once for all that are decided meanwhile."""
        now_ms = self._clock.clock.wall_ms()
        for batch in released:
            self._account(batch, -1)
            if batch.error is None:
                for (own, cseq), id in zip(batch.records, batch.ids, strict=False):  # no ids: found below a fence
                    own.ack(cseq, id, batch.ts)
                if batch.producer:
                    outcome = BatchOutcome(batch.ts, batch.rows, batch.digest)
                    self._producers.remember(batch.producer, batch.pseq, outcome, now_ms)
            self._observer.decided(batch)
            self._resolved.append(batch)
        if self._resolved and not self._resolving:
            self._resolving = True
            self._loop.call_soon_threadsafe(self._publish_results)

    def _publish_results(self) -> None:
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
                    waiter.set_result(
                        Appended(batch.ts, batch.rows, repeated=False, ids=tuple(batch.ids), digest=batch.digest)
                    )
        self._settled.set()

    # ---- time -------------------------------------------------------------------------------------------------------

    def sync_point(self) -> SyncPoint:
        """A time, and the last record of each channel at or before it, both as of now. Raises `Unavailable` while
        nothing may be promised (stalled, or past the lease)."""
        with self._lock:
            return self._sync_point()

    def _sync_point(self) -> SyncPoint:
        now = self._timestamp()
        if not self._lease_holds():
            raise Unavailable("the lease is over and not renewed yet; retry")
        points: dict[str, ChannelPoint] = {own.channel: own.acked for own in self._owned.values() if own.open}
        return SyncPoint(self._acks.watermark(now), points)

    def tick_all(self) -> None:
        """Store ticks for channels that had records since their last tick, and announce all. Called periodically, on
        the heartbeat thread; does nothing while nothing may be promised."""
        with self._lock:
            self._ticker.tick()
            self._ticker.announce()
            self._snapshots.store_due()

    @checked
    def tick_now(self, *, everywhere: bool = False) -> asyncio.Future[None]:
        """Ends when a tick is stored, in every channel that needs one, that covers all acknowledged before this call.
        Calls during a running tick share the next one, which starts right after it. `everywhere`: in every channel, so
        that readers need no heartbeat to get as far in each."""
        return self._ticker.tick_now(everywhere=everywhere)

    @checked
    async def close(self, *, tick_everywhere: bool = False) -> int:
        """Wait until everything in flight is decided, store a last tick (`tick_everywhere`: in every channel), stop.
        Appends of unknown outcome end with `DeadlineExceeded`. Returns the highest timestamp this owner has given out
        or promised: the limit that its successor must pass."""
        while len(self._acks) and not self.stalled:
            self._settled.clear()
            await self._settled.wait()
        if not self._closed and not self.stalled and any(own.open for own in self._owned.values()):
            try:
                await self.tick_now(everywhere=tick_everywhere)
            except TidewalError as error:  # the successor's fence announces the time as well
                self._observer.silent(error)
        with self._lock:
            self._closed = True
            self._fail_undecided()
            return self._clock.last

    def _fail_undecided(self) -> None:
        for batch in self._acks.items():
            if not batch.decided:
                batch.error = DeadlineExceeded("the owner of the channel is gone before it knew the outcome; retry")
                self._decide(batch)
