"""`ChannelOwner`: the one owner of some pchannels. It numbers and stamps records in log order, acknowledges them when
they are durable, and announces how far time has come.

Thread-safe where it must be: `tick_all` runs on the heartbeat thread while the loop may be blocked; all code that
stamps holds one lock until the WAL has taken the entries, so the order of stamps is the order of the log.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from ..arguments import checked
from ..clock import HybridClock, physical_ms
from ..errors import Closed, InvalidRequest, PreconditionFailed, TidewalError, Unavailable
from ..groups.coordinator_client import GroupAcks
from ..log.checks import check_framed
from ..log.record import Record, RecordType, Tags, stamp
from ..log.wal import ControlAppend, Wal
from ..streams.channel_reader import Grants
from .appends import Appends
from .batch import AppendBatch, Appended, RecordKey, channels_of, recorded_outcome, recorded_source, repeated
from .loop_calls import LoopCalls
from .observer import ChannelOwnerObserver
from .owned_channel import ChannelGrant, ChannelPoint, OwnedChannel, ReleasedChannel, SyncPoint, promising_channel
from .prepared import PreparedTransaction, TransactionId
from .producers import BatchOutcome, ProducerTable, given_up
from .recovery import records_below
from .snapshots import Snapshots
from .ticker import Ticker

INFLIGHT_BYTES = 64 * 1024 * 1024
SNAPSHOT_RECORDS = 10_000
SNAPSHOT_BYTES = 64 * 1024 * 1024

FENCE_NAME = "name"  # tag of a fence: the name of the producer that wrote it


class ChannelOwner:
    """Owns pchannels, each by itself: `acquire` a grant, `activate` the channel once its fence is in the catalog, then
    `append`.

    `heartbeat_channel` is an ephemeral channel to which `tick_all` announces (channel, term, last cseq, T).
    Acknowledged means durable, in each channel in the order of timestamps. At most `inflight_bytes` are in flight,
    and one batch a channel above that; a refusal names the limit as `limit_name`. What a next owner must know of a
    channel is stored in it after `snapshot_records` records, or `snapshot_bytes`, and when it is released.
    `snapshot_tags` returns what more is to be stored of a channel than its producers: the next owner finds these tags
    at a record that it recovers (`ChannelOwnerObserver.recovered`). It is called on any thread, under the lock, and
    says what is known of the records that were acknowledged by then.

    `lease_holds` is called after an append's result has arrived and before it is acknowledged (guarantee 3): a result
    that comes later waits for `renew`, or for a new term. When an append's outcome is unknown its channels are
    `stalled`: nothing of them is acknowledged or ticked until they are acquired again under a new term, which decides
    it. Other channels go on.

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
        limit_name: str = "inflight_bytes",
        snapshot_records: int = SNAPSHOT_RECORDS,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        observer: ChannelOwnerObserver | None = None,
        lease_holds: Callable[[], bool] | None = None,
        grants: Grants | None = None,
        name: str = "",
        snapshot_tags: Callable[[str], Tags] = lambda channel: {},
    ) -> None:
        check_framed(wal, "a channel owner")
        self._wal = wal
        self._clock = clock
        self._observer = observer or ChannelOwnerObserver()
        self._lease_holds = lease_holds or (lambda: True)
        self._grants = grants
        self._fence = Record(RecordType.FENCE, tags={FENCE_NAME: name} if name else {})
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # a WAL may call `done` within `submit`
        self._owned: dict[str, OwnedChannel] = {}
        self._closed = False
        self._calls = LoopCalls(self._lock)
        self._appends = Appends(
            wal,
            clock,
            self._lock,
            self._owned,
            timestamp=self._timestamp,
            lease_holds=self._lease_holds,
            limit=inflight_bytes,
            limit_name=limit_name,
            observer=self._observer,
            calls=self._calls,
        )
        self._ticker = Ticker(wal, self._lock, self._promising, heartbeat_channel, self._observer)
        self._snapshots = Snapshots(
            wal, self._lock, self._promising, snapshot_records, snapshot_bytes, self._observer, snapshot_tags
        )

    # ---- ownership --------------------------------------------------------------------------------------------------

    @checked
    async def acquire(self, grant: ChannelGrant) -> bytes:
        """Write the fence of `grant`, read the channel up to it, and return its id for the catalog. Appends open from a
        term before are decided by what stands below the fence. Until `activate`, nothing of the channel is
        acknowledged. When it raises, the channel is not owned: acquire it again under a new term. Raises `Fenced` when
        the term was used before or a higher one was granted (`channel`, `term`: acquire it again above that),
        `Unavailable` when the grant's limit has passed."""
        channel = grant.channel
        self._clock.observe(grant.previous_limit)
        with self._lock:
            ts = self._clock.now()
            if ts > grant.limit:
                raise Unavailable("the limit of the grant's timestamps has passed; ask for another grant")
            before = self._owned.get(channel) or OwnedChannel(channel, 0, 0)
            own = before.successor(grant.term, grant.limit, grant.checkpoint)
            self._owned[channel] = own
            fence = ControlAppend(channel, stamp(self._fence, ts, own.term, own.next()), ts)
            # none can be added meanwhile
            undecided = {key for part in own.acks.items() if part.present is None for key in part.keys}
        [id] = await self._wal.append_many([fence])
        found: set[RecordKey] = set()
        async for records in records_below(self._wal, grant, id, self._grants, self._observer.bad):
            found.update(key for record in records if (key := (record.term, record.cseq)) in undecided)
            self._read(own, records)
        with self._lock:
            own.ack(1, id, ts)  # a fence announces no time: a tick does, once the channel is open
            own.fenced = True
            for part in own.acks.items():
                if part.present is None:
                    self._appends.decide(part, sum(key in found for key in part.keys))
        return id

    @checked
    async def acquire_all(self, grants: Sequence[ChannelGrant]) -> dict[str, bytes]:
        """`acquire` grants side by side; returns the fences' ids by channel. Raises the error of the first that has
        failed, once all have ended; the others are acquired."""
        acquired = await asyncio.gather(*map(self.acquire, grants), return_exceptions=True)
        fences: dict[str, bytes] = {}
        for grant, result in zip(grants, acquired, strict=True):
            if isinstance(result, BaseException):
                raise result
            fences[grant.channel] = result
        return fences

    def _read(self, own: OwnedChannel, records: Iterable[Record]) -> None:
        """Take over what records below the fence say: the clock passes them, producers are remembered, and so are
        transactions that are prepared."""
        before = own.checkpoint
        for record in records:
            self._clock.observe(record.ts)
            with self._lock:
                own.unsave(1, len(record.body))
                of_transaction = own.prepared.recover(record, before)
                before = record.id
                if of_transaction:
                    pass
                elif record.type is RecordType.PRODUCERS:
                    own.producers.merge(ProducerTable.from_bytes(memoryview(record.body), own.channel))
                elif record.producer:
                    outcome = recorded_outcome(record)
                    own.producers.remember(record.producer, record.pseq, outcome, physical_ms(record.ts))
                if (source := recorded_source(record)) is not None:
                    own.producers.reach(*source)
            self._observer.recovered(own.channel, record)

    @checked
    def activate(self, channel: str, term: int) -> None:
        """Acknowledge appends to `channel` from now on: its fence of `term` is in the catalog. Raises `InvalidRequest`
        unless it was acquired under that term, and under no other since."""
        with self._lock:
            own = self._owned.get(channel)
            if own is None or own.term != term or not own.fenced:
                raise InvalidRequest(f"{channel} is acquired under term {term} before it is activated")
            own.open = True
            self._observer.opened(channel, term)

    @checked
    def renew(self, limit: int = 0, terms: Mapping[str, int] | None = None) -> None:
        """The lease was renewed: acknowledge what was answered after the last one. Stamp and promise timestamps up to
        `limit`, in all channels or in those that still have the terms of `terms`."""
        with self._lock:
            for own in self._owned.values():
                if terms is None or terms.get(own.channel) == own.term:
                    own.limit = max(own.limit, limit)
            if self._lease_holds():
                self._appends.acknowledge_late()

    @checked
    def lose(self, channel: str) -> None:
        """The channel was given up, and others may have it by now. Appends to it whose outcome is unknown end with
        `Unavailable` (`outcome_unknown`): no fence of this owner will decide them."""
        with self._lock:
            self._appends.fail_undecided_in(channel)

    @checked
    async def release(self, channel: str) -> ReleasedChannel:
        """Give an open channel up in good order: take and promise nothing more, wait until all that is in flight is
        decided, and store what the next owner must know. The channel is not owned then. Raises `Unavailable` where it
        is not open, and where the outcome of an append is unknown: a new term decides that."""
        with self._lock:
            own = self._owned.get(channel)
            if own is None or not own.open:
                raise Unavailable(f"this node does not own {channel} yet, or any more", channel=channel)
            own.open = False  # for appends, syncs, ticks and heartbeats
        await self._wait_while(lambda: own.undecided and not own.stalled)
        if own.unsaved and not own.stalled:
            with suppress(TidewalError):  # then the next owner reads more
                await self._snapshots.store_last(own, self._promised())
        with self._lock:
            if own.stalled:
                raise Unavailable(f"the outcome of an append to {channel} is unknown", channel=channel)
            own.give_up_awaited()
            if self._owned.get(channel) is own:
                del self._owned[channel]
            return ReleasedChannel(self._clock.last, own.checkpoint)

    @property
    def channels(self) -> list[str]:
        """The channels that are owned."""
        return list(self._owned)

    @property
    def stalled(self) -> list[str]:
        """The channels in which an append's outcome is unknown: they must be acquired again."""
        return [own.channel for own in self._owned.values() if own.stalled]

    @property
    def is_over_limit(self) -> bool:
        """Whether the time lies above the limit of a channel, which takes nothing until that is raised (`renew`)."""
        return any(own.open and own.limit < self._clock.last for own in self._owned.values())

    @property
    def inflight_bytes(self) -> int:
        """Bytes accepted and not yet decided."""
        return self._appends.inflight_bytes

    @checked
    def is_open(self, channel: str) -> bool:
        """Whether the channel takes appends."""
        own = self._owned.get(channel)
        return own is not None and own.open and not own.stalled

    def checkpoints(self) -> dict[str, bytes]:
        """Per channel, the id from which a next owner must read."""
        return {own.channel: own.checkpoint for own in self._owned.values()}

    def written_bytes(self) -> dict[str, int]:
        """Per channel, the bytes of the records that were appended under its present term. From any thread."""
        with self._lock:
            return {own.channel: own.written_bytes for own in self._owned.values()}

    # ---- producers --------------------------------------------------------------------------------------------------

    @checked
    def last_sequence(self, producer: str, known_to: int = 0) -> int:
        """The highest number of `producer`, which counts its batches from 1, up to which all are in the log; those up
        to `known_to` are known to be."""
        with self._lock:
            tables = [own.producers for own in self._owned.values()]
            last = max([known_to, *(table.forgotten(producer) for table in tables)])
            while _everywhere([table.remembered(producer, last + 1) for table in tables]):
                last += 1
            return last

    @checked
    def highest_sequence(self, producer: str) -> int:
        """The highest number of `producer` of which anything is in the log; 0 for none."""
        with self._lock:
            return max((own.producers.highest(producer) for own in self._owned.values()), default=0)

    @checked
    def recorded(self, producer: str, pseq: int) -> BatchOutcome | None:
        """What any channel has of (producer, pseq), that of one which was given up first; None for nothing."""
        with self._lock:
            found = [own.producers.remembered(producer, pseq) for own in self._owned.values()]
            return min((each for each in found if each is not None), key=lambda each: each.rows, default=None)

    @checked
    def knows(self, producer: str, pseq: int) -> bool:
        """Whether (producer, pseq) is in flight, or any channel has something of it."""
        with self._lock:
            tables = (own.producers for own in self._owned.values())
            in_flight = self._appends.pending(producer, pseq) is not None
            return in_flight or any(each.remembered(producer, pseq) for each in tables)

    @checked
    async def settled(self, channels: Sequence[str], producer: str, pseq: int) -> dict[str, BatchOutcome]:
        """What those of `channels` that have (producer, pseq) have of it, once nothing of it is in flight: what is not
        in the others then will only come there by a later `append`, of this owner or of one whose fence comes after
        this. Raises `Unavailable` where one is not owned, or the lease does not hold, or where the outcome of what was
        in flight will not be known here (`outcome_unknown`), and `OutcomeUnknown` for what is forgotten."""
        while True:
            waiter: asyncio.Future[Appended] = self._loop.create_future()
            with self._lock:
                now, pending = self._promised(), self._appends.pending(producer, pseq)
                if pending is None:
                    for channel in channels:
                        promising_channel(self._owned, channel, now)
                    return self._known(channels, producer, pseq)
                pending.waiters.append(waiter)
            try:
                await waiter
            except TidewalError as error:
                if error.fields.get("outcome_unknown"):
                    raise

    @checked
    def note_appended(self, producer: str, upto: int) -> None:
        """All batches of `producer` up to the number `upto` are known to have been in the log: one whose outcome is not
        there any more raises `OutcomeUnknown`, and is not written again."""
        with self._lock:
            for own in self._owned.values():
                own.producers.forget(producer, upto)

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
        channels: int = 0,
        in_order: bool = False,
        acks: GroupAcks | None = None,
    ) -> asyncio.Future[Appended]:
        """Append (channel, record) pairs as one batch under one timestamp, atomic where the backend is. Records get
        the producer's identity, and those that share a channel become parts of one whole, where they are not yet.
        `rows` and `digest` are kept with the identity, and returned to a retry. `channels` counts those of the whole
        batch where these `records` are a part, and other owners have the rest; 0: they are all. With `in_order` the
        producer's numbers rise in each channel: a batch is not written behind a later one, but raises `OutcomeUnknown`.
        With `acks` a group's positions are stored in the commit that writes it: see `Wal.submit_with_acks`.

        The future ends with the outcome: at once for a batch of a known (producer, pseq), together with the first
        attempt for one that is in flight. Each channel knows for itself: a batch that some channels have and others do
        not is written to the others, under a timestamp of their own. Raises, having changed nothing: `Overloaded`
        (`limit_name`), `Unavailable` (not the owner yet, stalled, past the lease, or only a part of these `records` is
        in flight), `Fenced`, `OutcomeUnknown` and what `Wal.submit` raises, or with `acks` `Wal.submit_with_acks`. Call
        it on the loop."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            named = channels_of(records) if len(records) > 1 else [channel for channel, _ in records]
            count = channels or len(named)
            known = self._known(named, producer, pseq) if producer else {}
            pending = self._appends.pending(producer, pseq) if producer else None
            answer = repeated(known, named, digest, count) if known else None
            if answer is not None:
                future.set_result(_repeated(answer))
                self._observer.repeated()
            elif pending is not None:
                if pending.outcome.digest == digest:  # else another batch, or one that is given up: the caller compares
                    _check_in_flight(pending, set(named).difference(known))
                pending.waiters.append(future)
                self._observer.repeated()
            elif not records:
                future.set_result(Appended(self._timestamp(), rows, repeated=False, digest=digest))
            else:
                rest = [each for each in records if each[0] not in known] if known else records
                batch = self._appends.submit(rest, producer, pseq, rows, digest, count, in_order=in_order, acks=acks)
                batch.waiters.append(future)
        return future

    @checked
    def append_from(
        self, source: str, channel: str, records: Sequence[tuple[bytes, Record]], *, after: bytes
    ) -> asyncio.Future[Appended]:
        """Append to `channel` what a source has for it: (offset, record) pairs, whose offsets rise, over all batches
        and all owners. `after` is the offset of the record before the first one in this channel, b"" for none. Those
        that the channel has are not written again, however the source divides its records into batches; each is in the
        log once. One batch of a source may be in flight to a channel at a time.

        The future ends as that of `append` does; after `Unavailable` or `OutcomeUnknown` ask `source_offset` and go on
        behind it. Raises, having changed nothing: `PreconditionFailed` (`offset`: the highest that the channel has)
        where the record at `after` is missing, and what `append` raises. Call it on the loop."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            reached = promising_channel(self._owned, channel, 0).producers.source_offset(source)
            if reached < after:
                raise PreconditionFailed(
                    f"{channel} has nothing of the source {source} behind {reached.hex()!r}: send what follows that",
                    channel=channel,
                    offset=reached,
                )
            rest = [each for each in records if each[0] > reached]
            if rest:
                self._appends.submit_from(source, channel, rest).waiters.append(future)
            else:
                future.set_result(Appended(self._timestamp(), len(records), repeated=True))
        return future

    @checked
    def source_offset(self, source: str, channel: str) -> bytes:
        """The highest offset of `source` that is known to be in `channel`; b"" for none, or where it is not owned."""
        with self._lock:
            own = self._owned.get(channel)
            return own.producers.source_offset(source) if own is not None else b""

    def _known(self, channels: Iterable[str], producer: str, pseq: int) -> dict[str, BatchOutcome]:
        known: dict[str, BatchOutcome] = {}
        for channel in channels:
            own = self._owned.get(channel)
            outcome = None if own is None else own.producers.find(producer, pseq)
            if outcome is not None:
                known[channel] = outcome
        return known

    @checked
    def give_up(self, channel: str, producer: str, pseq: int) -> asyncio.Future[Appended]:
        """Let the number `pseq` of `producer` be done with, by a record in `channel`: its batch is not appended any
        more, and a retry gets an outcome of 0 rows, as the future does. One that is in the log, or in flight to it,
        stays, and its outcome is the future's; what only some channels have of it stays there, too. Raises as `append`
        does."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            known = [own.producers.remembered(producer, pseq) for own in self._owned.values()]
            whole = next((each for each in known if each is not None), None) if _everywhere(known) else None
            pending = self._appends.pending(producer, pseq)
            if whole is not None:
                future.set_result(_repeated(whole))
            elif pending is not None:
                pending.waiters.append(future)
            else:
                records = [(channel, Record(RecordType.PRODUCERS, body=given_up(producer, pseq)))]
                self._appends.submit(records, producer, pseq, 0, 0, 1).waiters.append(future)
        return future

    # ---- transactions over several channels -------------------------------------------------------------------------

    @checked
    def prepare(
        self,
        records: Sequence[tuple[str, Record]],
        *,
        producer: str,
        pseq: int,
        attempt: str,
        rows: int = 0,
        channels: int = 0,
    ) -> asyncio.Future[Appended]:
        """Prepare an `attempt` to write (channel, record) pairs as a part of a transaction, of which other owners may
        have the rest: these channels take no other writes until `commit` or `abort`. The future ends once that is
        durable, with the timestamp of the PREPARE, or as `repeated` with the outcome of an attempt that these channels
        have. `rows` and `channels` as for `append`. Raises, having changed nothing: `Unavailable`, also where an
        earlier attempt is not decided, and where other writes wait for transactions that are; `OutcomeUnknown` where it
        would come behind a later batch of its producer; and what `append` raises. Call it on the loop."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            named = channels_of(records)
            for channel in named:
                own = promising_channel(self._owned, channel, 0)
                if own.prepared.of(producer, pseq) is not None:
                    raise Unavailable(f"an earlier attempt is not decided in {channel} yet; retry", channel=channel)
            count = channels or len(named)
            known = self._known(named, producer, pseq)
            answer = repeated(known, named, 0, count)
            if answer is not None:
                future.set_result(_repeated(answer))
                self._observer.repeated()
            elif known:
                raise Unavailable(f"an earlier attempt is written to {', '.join(sorted(known))} and is to go on; retry")
            else:
                id = TransactionId(producer, pseq, attempt)
                batch = self._appends.prepare(records, id, rows, count, self._loop.time())
                batch.waiters.append(future)
        return future

    def prepared(self) -> dict[str, list[PreparedTransaction]]:
        """Per channel that takes appends, the transactions that are prepared and not decided there, in their order."""
        with self._lock:
            return {own.channel: own.prepared.all for own in self._owned.values() if self.is_open(own.channel)}

    @checked
    def lacks(self, channel: str, producer: str, pseq: int) -> bool:
        """Whether `channel`, which takes appends, has nothing of (producer, pseq): it is neither prepared nor written
        there. False where that is not known: not owned here, or forgotten."""
        with self._lock:
            own = self._owned.get(channel)
            if own is None or not self.is_open(channel) or own.prepared.of(producer, pseq) is not None:
                return False
            return own.producers.remembered(producer, pseq) is None and own.producers.forgotten(producer) < pseq

    @checked
    def turns_away(self, channel: str) -> bool:
        """Whether other writes were refused for what is, or was, prepared in `channel`, and have not come since."""
        own = self._owned.get(channel)
        return own is not None and own.prepared.turned_away_s is not None

    @checked
    def commit_next(self, channel: str, decided: Mapping[TransactionId, int]) -> asyncio.Future[Appended] | None:
        """Write what the next transaction is to write to `channel`, of those that are `decided`, with their timestamps:
        they are written in the order of these. Returns its outcome to come; None where none can be written now, as
        while another one is, or while the timestamp lies above the owner's limit. One that the log has refused is
        prepared as before. Raises what `Wal.submit` raises. Call it on the loop."""
        future: asyncio.Future[Appended] = self._loop.create_future()
        with self._lock:
            own = self._owned.get(channel)
            transaction = None if own is None else own.prepared.next_commit(decided)
            if own is None or transaction is None:
                return None
            ts = decided[transaction.id]
            self._clock.observe(ts)  # what is written behind it is later
            if not own.promises(ts):
                return None
            self._appends.commit(own, transaction, ts).waiters.append(future)
        return future

    @checked
    def abort(self, channel: str, transaction: TransactionId) -> None:
        """The transaction, which may be prepared in `channel`, writes nothing there. Call it on the loop."""
        with self._lock:
            own = self._owned.get(channel)
            if own is not None and own.prepared.find(transaction) is not None:
                self._appends.abort(own, transaction)

    # ---- time -------------------------------------------------------------------------------------------------------

    @checked
    async def sync(self, channels: Iterable[str] | None = None, *, at: int = 0, exact: bool = False) -> SyncPoint:
        """One time, and the last record of each of the `channels` (by default all that are open) at or before it:
        everything acknowledged to them before this call is in it. It waits for no append, unless a later one to another
        of the channels was acknowledged already. Raises `Unavailable` while nothing may be promised for one of them.

        `at` is the time for which other owners are asked, too; the result is for the earliest time from there on for
        which there is one, and which sees what was acknowledged before this call. `exact`: what the question is to see
        lies at or before `at`, so what was acknowledged behind it since need not be seen."""
        self._clock.observe(at)
        with self._lock:
            now = self._promised()
            if channels is None:
                channels = [own.channel for own in self._owned.values() if own.promises(now)]
            owned = [promising_channel(self._owned, channel, now) for channel in channels]
            passed = [own.acked_ts for own in owned if not (exact and own.point_at(at))]
            reached = max([at, *passed])
            time = max(min((own.watermark(now) for own in owned), default=now), reached)
            time = reached if at else time
            late = {own.channel: self._reached(own, time) for own in owned if own.watermark(time) < time}
            points = {own.channel: own.point_at(time) or own.acked for own in owned}
        if late:
            points.update(zip(late, await asyncio.gather(*late.values()), strict=True))
            with self._lock:
                self._promised()  # still
        return SyncPoint(time, points)

    def _reached(self, own: OwnedChannel, time: int) -> asyncio.Future[ChannelPoint]:
        """The last record of a channel at or before `time`, once nothing at or before it is open."""
        future: asyncio.Future[ChannelPoint] = self._loop.create_future()
        own.await_time(time, lambda point: self._calls.call(partial(_reach, future, own.channel, point)))
        return future

    def _promised(self) -> int:
        """A new timestamp, up to which may be promised. Raises `Unavailable` past the lease."""
        if not self._lease_holds():
            raise Unavailable("the lease is over and not renewed yet; retry")
        return self._timestamp()

    def _timestamp(self) -> int:
        """A new timestamp."""
        if self._closed:
            raise Closed("the channel owner is closed")
        return self._clock.now()

    def _promising(self) -> list[tuple[OwnedChannel, int]]:
        """The channels for which a time may be promised, and these times. Raises `Unavailable` past the lease."""
        now = self._promised()
        return [(own, own.watermark(now)) for own in self._owned.values() if own.promises(now)]

    def tick_all(self) -> None:
        """Store ticks for channels that had records since their last tick, and announce all. Called periodically, on
        the heartbeat thread; does nothing where nothing may be promised."""
        with self._lock:
            self._ticker.tick_all()
            self._snapshots.store_due()

    @checked
    def tick_now(self, channels: Iterable[str] | None = None, *, everywhere: bool = False) -> asyncio.Future[None]:
        """Ends when a tick is stored, in each of the `channels` that needs one, that covers all acknowledged before
        this call. By default in all, but for those for which nothing may be promised now; one that is named raises
        `Unavailable` then. Calls during a running tick share the next one, which starts right after it. `everywhere`:
        also where none is needed, so that readers need no heartbeat to get as far in each."""
        return self._ticker.tick_now(channels, everywhere=everywhere)

    @checked
    async def close(self, *, tick_everywhere: bool = False) -> int:
        """Wait until everything in flight is decided, store a last tick (`tick_everywhere`: in every channel), stop.
        Appends of unknown outcome end with `DeadlineExceeded`. Returns the highest timestamp this owner has given out
        or promised: the limit that its successor must pass."""
        await self._wait_while(self._appends.awaited)
        if not self._closed:
            try:
                await self.tick_now(everywhere=tick_everywhere)
            except TidewalError as error:  # the successor's first tick announces the time as well
                self._observer.silent(error)
        with self._lock:
            self._closed = True
            for own in self._owned.values():
                own.give_up_awaited()
            self._appends.fail_undecided()
            return self._clock.last

    async def _wait_while(self, awaited: Callable[[], bool]) -> None:
        """Return once `awaited`, which is called under the lock, is false: looked at after each answer of the log."""
        while True:
            with self._lock:
                if not awaited():
                    return
            self._calls.called.clear()
            await self._calls.called.wait()


def _everywhere(outcomes: Sequence[BatchOutcome | None]) -> bool:
    """Whether all channels of a batch have it, by its `outcomes` in all channels."""
    known = [each for each in outcomes if each is not None]
    return bool(known) and len(known) >= min(each.channels for each in known)


def _check_in_flight(pending: AppendBatch, channels: set[str]) -> None:
    """Raise `Unavailable` unless a batch in flight is for all these `channels`: it may be the part of the channels that
    were here when it came, and others have come since."""
    if absent := channels.difference(part.own.channel for part in pending.parts):
        raise Unavailable(
            f"the rest of this batch is in flight, without what is for {', '.join(sorted(absent))}; retry"
        )


def _repeated(outcome: BatchOutcome) -> Appended:
    return Appended(outcome.ts, outcome.rows, repeated=True, digest=outcome.digest)


def _reach(future: asyncio.Future[ChannelPoint], channel: str, point: ChannelPoint | None) -> None:
    if future.done():
        return
    if point is not None:
        future.set_result(point)
    else:
        future.set_exception(Unavailable(f"the outcome of an append to {channel} is unknown; retry", channel=channel))
