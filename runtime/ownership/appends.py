"""Appends of a channel owner: submitted in the order of their timestamps, and released as the log answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..clock import HybridClock
from ..errors import DeadlineExceeded, OutcomeUnknown, Overloaded, TidewalError, Unavailable
from ..groups.coordinator_client import GroupAcks
from ..log.record import CONTROL_TYPES, BatchPart, Record, stamp
from ..log.wal import Append, ControlAppend, Wal
from .batch import AppendBatch, Appended, AppendPart, number, prepared, recorded_outcome, sourced
from .loop_calls import LoopCalls
from .observer import ChannelOwnerObserver
from .owned_channel import OwnedChannel, promising_channel
from .prepared import ATTEMPT, PreparedTransaction, TransactionId, aborted, as_prepared
from .producers import BatchOutcome


class Appends:
    """What is in flight to the log. All methods are called under the channel owner's lock, but for those that the log
    calls, which take it.

    `timestamp` gives out a new timestamp. `inflight_bytes` were accepted and are not decided yet."""

    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        lock: threading.RLock,
        owned: Mapping[str, OwnedChannel],
        *,
        timestamp: Callable[[], int],
        lease_holds: Callable[[], bool],
        limit: int,
        limit_name: str,
        observer: ChannelOwnerObserver,
        calls: LoopCalls,
    ) -> None:
        self.inflight_bytes: int = 0
        self._pending: dict[str, dict[int, AppendBatch]] = {}  # in flight, by producer and pseq; none is empty
        self._wal = wal
        self._clock = clock
        self._lock = lock
        self._owned = owned
        self._timestamp = timestamp
        self._lease_holds = lease_holds
        self._limit = limit
        self._limit_name = limit_name
        self._observer = observer
        self._calls = calls
        self._late: list[AppendBatch] = []  # answered after the lease
        self._sources: set[tuple[str, str]] = set()  # with the channel for which they have a batch in flight

    def pending(self, producer: str, pseq: int) -> AppendBatch | None:
        """The batch (producer, pseq), where it is in flight."""
        return self._pending.get(producer, {}).get(pseq)

    def submit(
        self,
        records: Sequence[tuple[str, Record]],
        producer: str,
        pseq: int,
        rows: int,
        digest: int,
        channels: int,
        *,
        in_order: bool = False,
        acks: GroupAcks | None = None,
    ) -> AppendBatch:
        """Number and stamp the records of one batch, and submit them, with the acknowledgements `acks`. `channels`
        counts the channels of the whole batch, of which `records` may be the rest. Raises as `ChannelOwner.append`
        does, having changed nothing."""
        size = sum(len(record.body) for _, record in records)
        owned, ts = self._admit(records, size)
        if in_order:
            self._check_order(producer, pseq, owned)
        batch = AppendBatch(size, producer, pseq, BatchOutcome(ts, rows, digest, channels))
        whole = prepared(records, ts, producer, pseq, rows, digest, channels)
        return self._submit(batch, owned, records, whole, acks)

    def submit_from(self, source: str, channel: str, records: Sequence[tuple[bytes, Record]]) -> AppendBatch:
        """Submit the (offset, record) pairs of a source that are next in `channel`, where it has nothing in flight.
        Each is a whole of its own: of a batch that came to its end in part, the first ones are there."""
        if (source, channel) in self._sources:
            raise Unavailable(f"a batch of the source {source} is in flight to {channel}; retry", channel=channel)
        pairs = [(channel, sourced(source, offset, record)) for offset, record in records]
        size = sum(len(record.body) for _, record in pairs)
        owned, ts = self._admit(pairs, size)
        batch = AppendBatch(size, "", 0, BatchOutcome(ts, len(pairs)), source=source, source_offset=records[-1][0])
        return self._submit(batch, owned, pairs, [record for _, record in pairs])

    # ---- transactions over several channels -------------------------------------------------------------------------

    def prepare(
        self, records: Sequence[tuple[str, Record]], id: TransactionId, rows: int, channels: int, since: float
    ) -> AppendBatch:
        """Submit the PREPARE of a transaction in the channels of `records`, which take nothing else until it is
        committed or aborted there. Raises as `ChannelOwner.prepare` does, having changed nothing."""
        size = sum(len(record.body) for _, record in records)
        owned, ts = self._admit(records, size, hold=True)
        self._check_order(id.producer, id.pseq, owned)
        by_channel = {own.channel: own for own in owned}
        self._check_prepared(by_channel.values(), size)
        whole = prepared(records, ts, id.producer, id.pseq, rows, channels=channels)
        promised: dict[str, list[Record]] = {channel: [] for channel in by_channel}
        for (channel, _), record in zip(records, whole, strict=True):
            promised[channel].append(replace(record, tags={**record.tags, ATTEMPT: id.attempt}))
        order = {channel: iter(as_prepared(theirs, id, ts)) for channel, theirs in promised.items()}
        batch = AppendBatch(size, "", 0, BatchOutcome(ts, rows), prepares=id, control=True)
        for channel, own in by_channel.items():  # before the log may answer
            own.prepared.add(PreparedTransaction(id, ts, promised[channel], own.acked.id, since=since))
        try:
            return self._submit(batch, owned, records, [next(order[channel]) for channel, _ in records])
        except BaseException:
            for own in by_channel.values():
                own.prepared.remove(id)
            raise

    def _check_prepared(self, owned: Iterable[OwnedChannel], size: int) -> None:
        for own in owned:
            if own.prepared.is_awaited(self._clock.clock.monotonic()):
                raise Unavailable(
                    f"other writes wait for the transactions that are prepared in {own.channel}, or a snapshot; retry",
                    channel=own.channel,
                )
        held = sum(own.prepared.size for own in self._owned.values())
        if held and held + size > self._limit:
            raise Overloaded(
                f"{held} bytes of transactions are prepared and not decided, the limit is {self._limit}; retry",
                limit=self._limit_name,
            )

    def commit(self, own: OwnedChannel, transaction: PreparedTransaction, ts: int) -> AppendBatch:
        """Submit what a prepared transaction writes, at `ts`. Raises `Unavailable` where that may not be stamped now,
        and what `Wal.submit` raises."""
        promising_channel(self._owned, own.channel, ts)
        id, records = transaction.id, [(own.channel, record) for record in transaction.records]
        parts = [
            replace(record, part=BatchPart(ts, number, len(records)) if len(records) > 1 else None)
            for number, (_, record) in enumerate(records)
        ]
        outcome = recorded_outcome(replace(parts[0], ts=ts))
        batch = AppendBatch(transaction.size, id.producer, id.pseq, outcome, commits=id)
        transaction.committing = True
        try:
            return self._submit(batch, [own] * len(parts), records, parts)
        except BaseException:
            transaction.committing = False
            raise

    def abort(self, own: OwnedChannel, id: TransactionId) -> AppendBatch | None:
        """The transaction writes nothing in the channel, which takes other writes again. That the log has a record of
        it spares the next owner a question, and no more: None where it does not take it now."""
        own.prepared.remove(id)
        own.reach(own.watermark(own.limit))
        batch = AppendBatch(0, "", 0, BatchOutcome(self._timestamp(), 0), control=True)
        records = [(own.channel, aborted(id))]
        try:
            promising_channel(self._owned, own.channel, batch.outcome.ts)
            return self._submit(batch, [own], records, [record for _, record in records])
        except TidewalError as error:
            self._observer.silent(error)
            return None

    # ---- how a batch goes to the log --------------------------------------------------------------------------------

    def _submit(
        self,
        batch: AppendBatch,
        owned: Sequence[OwnedChannel],
        records: Sequence[tuple[str, Record]],
        whole: Sequence[Record],
        acks: GroupAcks | None = None,
    ) -> AppendBatch:
        """Number, stamp and submit the records of a batch, which are `whole` as the log must have them."""
        ts, cseqs = batch.outcome.ts, number(batch, owned, records)
        self._begin(batch)
        try:
            kind = ControlAppend if all(record.type in CONTROL_TYPES for record in whole) else Append
            # of an entry, by which it is looked up: what is committed lies behind others, perhaps behind a later fence
            entry_ts = self._timestamp() if batch.commits else ts
            entries = [
                kind(own.channel, stamp(record, ts, own.term, cseq), entry_ts)
                for own, record, cseq in zip(owned, whole, cseqs, strict=True)
            ]
            done = partial(self._on_appended, batch)
            if acks is None:
                self._wal.submit(entries, done)
            else:
                self._wal.submit_with_acks(entries, acks, done)
        except BaseException:
            self._withdraw(batch)
            raise
        return batch

    def _admit(
        self, records: Sequence[tuple[str, Record]], size: int, *, hold: bool = False
    ) -> tuple[list[OwnedChannel], int]:
        """The channels of `records`, and a timestamp for them. With `hold` they may have prepared transactions."""
        owned: list[OwnedChannel] = []
        ts = self._timestamp()
        own: OwnedChannel | None = None
        for channel, _ in records:
            if own is not None and own.channel == channel:
                owned.append(own)
                continue
            own = promising_channel(self._owned, channel, ts)
            if own.prepared and not hold:
                own.prepared.turned_away_s = self._clock.clock.monotonic()
                raise Unavailable(f"a transaction is being decided in {channel}; retry", channel=channel)
            # a channel may take as much as it leaves free: one that the log does not answer for leaves room to others
            if own.acks.bytes and own.acks.bytes + size > self._limit - self.inflight_bytes:
                raise Overloaded(
                    f"{self.inflight_bytes} bytes are in flight to the log, {own.acks.bytes} of them to {channel}; the "
                    f"limit is {self._limit}, and a channel gets as much as it leaves free; retry",
                    limit=self._limit_name,
                    channel=channel,
                )
            owned.append(own)
        if not hold:
            for own in owned:
                own.prepared.turned_away_s = None
        return owned, ts

    def _check_order(self, producer: str, pseq: int, owned: Iterable[OwnedChannel]) -> None:
        """Raise `OutcomeUnknown` where a channel has a later batch of `producer`, or it is in flight there."""
        later = [batch for number, batch in self._pending.get(producer, {}).items() if number > pseq]
        ahead = {part.own.channel for batch in later for part in batch.parts}
        for own in owned:
            if own.channel in ahead or own.producers.highest(producer) > pseq:
                raise OutcomeUnknown(
                    f"batch {pseq} of {producer} is not in {own.channel}, where a later one is, and is not written "
                    "behind that; other channels may have a part of it: read before writing again"
                )

    def _begin(self, batch: AppendBatch) -> None:
        for part in batch.parts:
            part.opened = part.own.acks.begin(batch.outcome.ts, part, part.size)
        self.inflight_bytes += batch.size
        if batch.producer and batch.commits is None:  # of several channels each is committed by itself
            self._pending.setdefault(batch.producer, {})[batch.pseq] = batch
        if batch.source:
            self._sources.update((batch.source, part.own.channel) for part in batch.parts)

    def _withdraw(self, batch: AppendBatch) -> None:
        """The batch was not submitted: its numbers, the newest of their channels, were not used."""
        for part in batch.parts:
            assert part.opened is not None
            part.own.acks.withdraw(part.opened)
            part.own.take_back(len(part.cseqs), part.size)
        self._end(batch)

    def _end(self, batch: AppendBatch) -> None:
        self.inflight_bytes -= batch.size
        if batch.producer and batch.commits is None:
            pending = self._pending[batch.producer]
            del pending[batch.pseq]
            if not pending:
                del self._pending[batch.producer]
        if batch.source:
            self._sources.difference_update((batch.source, part.own.channel) for part in batch.parts)

    # ---- outcomes ---------------------------------------------------------------------------------------------------

    def _on_appended(self, batch: AppendBatch, result: list[bytes] | TidewalError) -> None:
        """The WAL's result, on any thread. For what a new fence or this owner's end has decided it is ignored."""
        with self._lock:
            if not isinstance(result, TidewalError):
                batch.ids = result
                if self._lease_holds():
                    self._succeed(batch)
                else:
                    self._late.append(batch)
                    self._calls.wake()
            elif not (undecided := batch.undecided()):
                pass
            elif result.fields.get("outcome_unknown"):
                self._stall([part.own for part in undecided], result)
            else:
                batch.refusal = result
                for part in undecided:
                    self.decide(part, 0)

    def _succeed(self, batch: AppendBatch) -> None:
        for part in batch.parts:
            # where the channel has stalled a new fence decides, perhaps another owner's: the record may lie behind it
            if part.present is None and not part.own.stalled:
                self.decide(part, len(part.cseqs))

    def _stall(self, owned: Iterable[OwnedChannel], error: TidewalError) -> None:
        stalled = [own for own in owned if not own.stalled]  # by this append: not before, nor under a term that is over
        for own in stalled:
            own.stalled = True
            own.give_up_awaited()
        self._observer.stalled([own.channel for own in stalled], error)
        self._calls.wake()

    def decide(self, part: AppendPart, present: int) -> None:
        """So many records of `part` are in the log. What its channel had to wait for is released, in order."""
        part.present = present
        assert part.opened is not None
        own = part.own
        for released in own.acks.finish(part.opened):
            self._settle_transaction(released)
            own.reach(min(released.batch.outcome.ts, own.prepared.first_ts) - 1)
            self._release(released)
        own.reach(own.watermark(own.limit))
        if part.batch.unreleased:  # for `close`, which waits for answers only: what they release may come later
            self._calls.wake()

    def _release(self, part: AppendPart) -> None:
        batch = part.batch
        if part.durable:
            part.ack()
            part.own.written_bytes += part.size
            if batch.producer:
                now_ms = self._clock.clock.wall_ms()
                part.own.producers.remember(batch.producer, batch.pseq, batch.outcome, now_ms)
            if batch.source:
                part.own.producers.reach(batch.source, batch.source_offset)
        batch.unreleased -= 1
        if not batch.unreleased:
            self._end(batch)
            self._observer.decided(batch)
            self._calls.call(partial(_publish, batch))

    def _settle_transaction(self, part: AppendPart) -> None:
        """What has become of a PREPARE, or of a commit: one that has failed for certain is tried again."""
        prepared, batch = part.own.prepared, part.batch
        if batch.prepares is not None and (transaction := prepared.find(batch.prepares)) is not None:
            transaction.durable = part.durable
            if not part.durable:
                prepared.remove(batch.prepares)
        if batch.commits is not None and (transaction := prepared.find(batch.commits)) is not None:
            transaction.committing = False
            if part.durable:
                prepared.remove(batch.commits)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def acknowledge_late(self) -> None:
        """The lease was renewed: acknowledge what was answered after the last one."""
        late, self._late = self._late, []
        for batch in late:
            self._succeed(batch)

    def awaited(self) -> bool:
        """Whether the log will still answer for an append."""
        return any(not part.own.stalled and part.batch not in self._late for part in self._undecided())

    def fail_undecided(self) -> None:
        """The channels are not owned any more: what has become of these appends is not learned here."""
        self._lose(
            self._undecided(), DeadlineExceeded("the owner of the channel is gone before it knew the outcome; retry")
        )

    def fail_undecided_in(self, channel: str) -> None:
        """The same for one channel, while the owner goes on: the next one is to be asked."""
        gone = Unavailable("the channel has changed hands before the outcome was known; retry", outcome_unknown=True)
        self._lose([part for part in self._undecided() if part.own.channel == channel], gone)

    def _lose(self, parts: Iterable[AppendPart], error: TidewalError) -> None:
        for part in parts:
            part.batch.lost = error
            self.decide(part, 0)

    def _undecided(self) -> list[AppendPart]:
        return [part for own in self._owned.values() for part in own.acks.items() if part.present is None]


def _publish(batch: AppendBatch) -> None:
    """Tell those who wait for a batch its outcome, on the loop."""
    error = batch.error
    for waiter in batch.waiters:
        if waiter.done():
            continue
        if error is not None:
            waiter.set_exception(error)
        else:
            ts, rows, digest, _ = batch.outcome
            waiter.set_result(Appended(ts, rows, repeated=False, ids=tuple(batch.ids), digest=digest))
