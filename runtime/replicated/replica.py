"""Propose records to a replicated state, and store snapshots of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import BadRecord, Fenced, InvalidRequest, TidewalError, Unavailable, of_unknown_outcome
from ..log.record import RecordType, stamp
from ..log.wal import ControlAppend, Entry, OnAppended
from ..loop_bridge import promise
from .fold import Applied, Fold, State
from .follower import Follower, ReplicatedLog
from .records import (
    BEGIN,
    LEVEL,
    LEVELS,
    NOOP,
    Claim,
    Event,
    FeatureLevels,
    beginning_level,
    claim_event,
    encode_event,
    pages_of,
)

CLAIMS_MAX = 10
CLAIM_PAUSE_S = 0.1  # after a claim that the log refused; twice as long after each further one
CLAIM_PAUSE_S_MAX = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotPacing:
    """When a snapshot is due: once the log since the last one has `records` records, and `factor` times its bytes.
    After one that failed, `retry_records` later."""

    records: int = 1_000
    retry_records: int = 100
    factor: float = 2.0


@dataclass(slots=True)
class _Pending:
    """A record of this replica whose outcome is awaited."""

    number: int
    claim: bytes | None
    outcome: Applied | TidewalError | None = None  # None: not known yet


class _Submitted(NamedTuple):
    """Records on their way into the log."""

    pending: Sequence[_Pending]
    ids: asyncio.Future[list[bytes]]


class Replica(Follower[State]):
    """A follower that also proposes, under the name `author`. Belongs to one event loop; only `submit` may be called
    from any thread.

    In a state without leader every replica's records count, so `author` must never be used again. Where the state has a
    leader, records count on its claim alone, so the name need not be new: `claim` takes the node's name. A replica that
    also writes own records there (`propose_own`) has an `author` that is never used again, and claims under it.
    """

    def __init__(
        self,
        log: ReplicatedLog,
        channel: str,
        create: Callable[[], State],
        type: RecordType,
        *,
        led: bool,
        author: str = "",
        now: Callable[[], int] = lambda: 0,
        holder: str | None = None,
        levels: FeatureLevels = LEVELS,
        pacing: SnapshotPacing | None = None,
        on_bad: Callable[[str, Entry, BadRecord], object] | None = None,
    ) -> None:
        """`now` returns the timestamps of the records. `holder` keeps what is in no snapshot from retention; None where
        the channel has none. `levels` are the feature levels that this process knows."""

        def create_fold(on_bad: Callable[[Entry, BadRecord], None]) -> Fold[State]:
            return Fold(create, type, led=led, levels=levels, on_bad=on_bad)

        super().__init__(log, channel, create_fold, on_bad=on_bad)
        self.pacing: SnapshotPacing = pacing or SnapshotPacing()
        self.snapshots_failed: int = 0
        self._type, self._led = type, led
        self._author, self._now, self._holder = author, now, holder
        self._standing: Claim | None = None  # the claim that this replica's records stand on
        self._number = 0
        self._submitting = threading.Lock()  # so that records lie in the log in the order of their numbers
        self._pending: dict[int, _Pending] = {}  # by number
        self._standings: set[bytes | None] = {None}  # all claims that this replica has won; None: without one
        self._unresolved: set[bool] = set()  # whether a record on a claim, and one without, may still count unnoticed
        self._snapshotting = asyncio.Lock()
        self._records = self._records_at_snapshot = self._bytes_at_snapshot = 0

    async def open(self) -> None:
        """`Follower.open`; the log of a state without leader gets its first record where it is empty."""
        await super().open()
        pause_s = CLAIM_PAUSE_S
        for attempt in range(1, CLAIMS_MAX + 1):
            if self._led or self.fold.begun:
                self.fold.check_not_too_old()  # it may be another process that has begun it
                return
            try:
                await self.propose({"kind": BEGIN, **beginning_level(self.fold.levels)})
            except TidewalError as error:  # another process may have begun it meanwhile
                if not error.retryable or attempt == CLAIMS_MAX:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, CLAIM_PAUSE_S_MAX)

    # ---- proposing --------------------------------------------------------------------------------------------------

    async def propose(self, *events: Event) -> None:
        """Write events, one after another; when this returns they are durable, count, and are in the state.

        Raises the error with which the first one is refused: `Fenced` where another node leads, `PreconditionFailed`,
        or what the state machine raises; the ones behind it may count. Raises `Unavailable` and other errors of the
        log; with the field `outcome_unknown` where a record may be in the log, or may still come into it. That is
        looked up before: behind a record of unknown outcome another one is written and read back."""
        await self._propose(events, self._led)

    async def propose_own(self, *events: Event) -> None:
        """`propose`, without a claim, events that any author may write where the state has a leader."""
        if not self.fold.begun:  # or the record of a next one would not show that this one is lost
            raise Unavailable(f"nothing counts in {self.channel} before a node leads")
        for event in events:
            if not self.fold.is_own_kind(event["kind"]):
                raise InvalidRequest(f"an event {event['kind']!r} is for the leader to write")
        await self._propose(events, False)

    async def _propose(self, events: Sequence[Event], claimed: bool) -> None:
        if claimed in self._unresolved:
            await self._resolve(claimed)
        submitted = self._submit(events, claimed)
        try:
            await self._read_back(submitted, claimed)
            for pending in submitted.pending:
                self._raise_refusal(pending)
        finally:
            self._forget(submitted)

    def submit(self, event: Event) -> None:
        """Write an event without waiting for it. From any thread. Raises what has ended following, and what
        `Wal.submit` raises."""
        self._send([event], lambda _: None, self._present_claim(self._led))

    async def raise_level(self, level: int) -> None:
        """Let the log have records of this feature level from here on. Processes that do not know it stop following
        with `FormatTooNew`: to be called when all know it. Raises `PreconditionFailed` where the log has it, or the
        state refuses it."""
        await self.propose({"kind": LEVEL, "level": level})

    def _present_claim(self, claimed: bool) -> Claim | None:
        """What a record stands on that is `claimed` to be the leader's."""
        if claimed and self._standing is None:
            self.check_following()
            raise Fenced("this node does not lead; claim first", term=self.fold.claim.term)
        return self._standing if claimed else None

    def _submit(self, events: Sequence[Event], claimed: bool) -> _Submitted:
        return self._submit_on(self._present_claim(claimed), events)

    def _submit_on(self, claim: Claim | None, events: Sequence[Event]) -> _Submitted:
        ids, done = promise()
        return _Submitted(self._send(events, done, claim, awaited=True), ids)

    def _send(
        self, events: Sequence[Event], done: OnAppended, standing: Claim | None, *, awaited: bool = False
    ) -> Sequence[_Pending]:
        self.check_following()
        leveled = [{**event, "v": self.fold.level_of(event)} for event in events]
        with self._submitting:
            first = max(self._number, self.fold.number_of(self._author)) + 1
            claim = None if standing is None else standing.id
            pending = [_Pending(number, claim) for number, _ in enumerate(events, first)]
            ts = self._now()
            entries = [
                self._entry(event, each.number, standing, ts) for event, each in zip(leveled, pending, strict=True)
            ]
            if awaited:  # before the records can be read back
                self._pending.update((each.number, each) for each in pending)
            self._number = pending[-1].number
            try:
                self._log.submit(entries, done)
            except BaseException:
                for each in pending:
                    self._pending.pop(each.number, None)
                raise
        return pending

    def _entry(self, event: Event, number: int, standing: Claim | None, ts: int) -> ControlAppend:
        record = encode_event(self._type, event, self._author, number, standing)
        return ControlAppend(self.channel, stamp(record, ts, record.term, 0), ts)

    def _forget(self, submitted: _Submitted) -> None:
        for pending in submitted.pending:
            del self._pending[pending.number]

    async def _read_back(self, submitted: _Submitted, claimed: bool) -> None:
        try:
            ids = await submitted.ids
        except TidewalError as error:
            if not error.fields.get("outcome_unknown"):
                raise
            self._unresolved.add(claimed)
            with suppress(TidewalError):
                await self._resolve(claimed)
            if claimed in self._unresolved:
                raise
        else:
            try:
                await self.until(lambda: self.fold.position >= ids[-1])
            except TidewalError as error:  # the records are in the log, and may count
                raise of_unknown_outcome(error) from None

    async def _resolve(self, claimed: bool) -> None:
        """Write a record and read it back: what was sent before it, on a claim or without one as this one is, is in the
        log, or never counts."""
        submitted = self._submit([{"kind": NOOP}], claimed)
        try:
            ids = await submitted.ids
            await self.until(lambda: self.fold.position >= ids[-1])
        finally:
            self._forget(submitted)
        self._unresolved.discard(claimed)

    def _raise_refusal(self, pending: _Pending) -> None:
        outcome = pending.outcome or self._removed_unread()
        error = outcome if isinstance(outcome, TidewalError) else outcome.error
        if error is not None:
            raise error

    def _removed_unread(self) -> TidewalError:
        return Unavailable(
            f"truncation of {self.channel} was faster than its reader: check whether the record counts",
            outcome_unknown=True,
        )

    def on_applied(self, applied: Applied) -> None:
        self._records += 1
        record, claim = applied.proposed.record, applied.proposed.event.get("claim")
        if record.producer != self._author:
            return
        own = self._pending.get(record.pseq)
        if own is not None and own.claim == claim:
            own.outcome = own.outcome or applied
        if claim in self._standings:
            for pending in self._pending.values():
                alike = (pending.claim is None) == (claim is None)
                if alike and pending.number < record.pseq and pending.outcome is None:
                    pending.outcome = Unavailable(
                        f"a record for {self.channel} was lost, and will not count: repeat it"
                    )

    def on_restored(self) -> None:
        for pending in self._pending.values():  # it may have counted among the records that were removed
            pending.outcome = pending.outcome or self._removed_unread()
        self._records = self._records_at_snapshot = self._bytes_at_snapshot = 0

    # ---- leadership -------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether the last claim that was read is this replica's."""
        return self._standing is not None and self._standing.id == self.fold.claim.id

    async def claim(self, node: str) -> Claim:
        """Become the leader under the name `node`, and return its claim. A claim names the last winning one; log order
        decides between claims that name the same one. Raises `Fenced` when other nodes won `CLAIMS_MAX` times; where
        the log refused the last claim, that error."""
        self._author = node
        error: TidewalError = Fenced("no election was held")
        pause_s = CLAIM_PAUSE_S
        for _ in range(CLAIMS_MAX):
            try:
                return await self._try_to_claim(node)
            except Fenced as lost:
                error = lost
            except TidewalError as refused:  # whether it won or not, the next claim names what was read after it
                if not refused.retryable:
                    raise
                error = refused
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, CLAIM_PAUSE_S_MAX)
        raise error

    async def _last_claim(self) -> Claim:
        await self.catch_up()
        return self.fold.claim

    async def _try_to_claim(self, node: str) -> Claim:
        previous = await self._last_claim()
        self._standing = None  # no event of this node may count under the claim that it is about to replace
        submitted = self._submit_on(
            Claim(b"", previous.term + 1, node), [claim_event(node, previous, self.fold.levels)]
        )
        try:
            ids = await submitted.ids
            await self.until(lambda: self.fold.position >= ids[-1])
            try:
                self._raise_refusal(submitted.pending[0])
            except Fenced:
                raise Fenced(f"{node} lost an election to {self.fold.claim.node}") from None
            if self.fold.claim.id != ids[-1]:  # another process's claim, under the same name, was read as this one
                raise Fenced(f"{node} lost an election to another {self.fold.claim.node}")
            self._standing = Claim(ids[-1], previous.term + 1, node)
            self._standings.add(ids[-1])
            return self._standing
        finally:
            self._forget(submitted)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    @property
    def snapshot_due(self) -> bool:
        """Whether the log is long enough for a snapshot, and is followed."""
        pacing, fold = self.pacing, self.fold
        if self.ended is not None:
            return False
        long_enough = self._records - self._records_at_snapshot >= pacing.records
        return long_enough and fold.read_bytes - self._bytes_at_snapshot >= pacing.factor * fold.snapshot_bytes

    async def snapshot_if_due(self, *, due: bool = False) -> None:
        """Store a snapshot where one is due, or is said to be. One that fails raises nothing: it is counted
        (`snapshots_failed`), logged, and tried again `SnapshotPacing.retry_records` later."""
        if not (due or self.snapshot_due) or self.ended is not None:
            return
        async with self._snapshotting:
            if not (due or self.snapshot_due):
                return
            try:
                await self._snapshot()
            except Exception as error:
                self.snapshots_failed += 1
                _log.warning(
                    "%s goes on without a new snapshot: %s", self.channel, error, extra={"channel": self.channel}
                )
                self._records_at_snapshot = self._records - self.pacing.records + self.pacing.retry_records

    async def move_on(self) -> None:
        """Let nothing of the state lie further back in the log than a record without effect that is written now, behind
        which a snapshot is stored: where channels share segments, a state that seldom changes would keep those of all.
        Raises errors of the log; a snapshot that fails raises nothing."""
        await self._resolve(False)
        await self.snapshot_if_due(due=True)

    async def snapshot(self) -> None:
        """Store the state as of the last record that was read, and truncate what lies before that. Raises what has
        ended following: this process may not know then what the log has come to."""
        async with self._snapshotting:
            await self._snapshot()

    async def _snapshot(self) -> None:
        self.check_following()
        if not self.fold.as_of:
            return
        records, read_bytes = self._records, self.fold.read_bytes
        as_of, pages = self.fold.as_of, pages_of(self.fold.snapshot(), self.fold.as_of, self.fold.level)
        for page in pages:
            stored, done = promise()
            self._log.submit([self._entry(page, 0, self._standing, self._now())], done)
            await stored
            self.check_following()
        if self._holder is not None:
            await self._log.hold(self.channel, self._holder, as_of)
        await self._log.truncate(self.channel, as_of)
        self._records_at_snapshot, self._bytes_at_snapshot = records, read_bytes
