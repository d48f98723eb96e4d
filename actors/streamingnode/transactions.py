"""Transactions over several pchannels, at an owner of some of these: it writes what is decided, has those decided that
wait for too long, and says what is written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.cluster.transaction_decisions import WRITTEN, TransactionDecisions, decided
from ...runtime.errors import OutcomeUnknown, PreconditionFailed, TidewalError, Unavailable
from ...runtime.log.record import Record
from ...runtime.ownership import Appended, ChannelOwner
from ...runtime.ownership.prepared import PreparedTransaction, TransactionId
from ...runtime.waiting import begun, ended
from ..failed_attempts import FailedAttempts
from ..node import Node

UNDECIDED_S: Final = 0.5  # after which a participant has a transaction aborted: of a write the first attempt
UNDECIDED_MAX_S: Final = 8.0  # and one behind many that were aborted so
LOOK_S: Final = 0.1  # between two looks at what is prepared
REPORT_S: Final = 1.0  # between two reports of what is written
PREPARED, DECIDED = "streamingnode_prepared_transaction_num", "streamingnode_decided_transaction_total"

_log = logging.getLogger("tidewal.streamingnode")

OnWritten = Callable[[Sequence[Record], int], None]


class TransactionParticipant:
    """What an owner does with the transactions that are prepared in its channels. `written` is called with the records
    of each that is committed, and their timestamp."""

    def __init__(self, node: Node, catalog: CatalogLog, owner: ChannelOwner, written: OnWritten) -> None:
        self._node, self._catalog, self._owner, self._written = node, catalog, owner, written
        self._changed = asyncio.Event()
        self._proposing: dict[TransactionId, asyncio.Task[None]] = {}
        self._undecided = FailedAttempts()  # those that were not decided in time
        self._lost: dict[tuple[str, TransactionId], bool] = {}  # by channel, of what is not prepared there
        self._reported_s = 0.0
        node.metrics.gauge(PREPARED).set_function(lambda: sum(map(len, owner.prepared().values())))

    @property
    def _decisions(self) -> TransactionDecisions:
        return self._node.cluster.state.transactions

    async def run(self) -> None:
        """Do what is decided, until cancelled."""
        try:
            while True:
                waits = self._node.cluster.changed(), self._changed.wait(), self._node.local_owner.changed()
                async with begun(*waits) as changes:
                    busy = self._look()
                    await self._report()
                    await asyncio.wait(changes, timeout=LOOK_S if busy else None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(*self._proposing.values())

    def wake(self) -> None:
        """Something was prepared, or is written."""
        self._changed.set()
        self._changed = asyncio.Event()

    def check_not_lost(self, channels: Iterable[str], producer: str, pseq: int) -> None:
        """Raise `OutcomeUnknown` where a write of which an attempt is committed is not in one of these channels, and
        will not be: what was prepared there is gone."""
        if not self._decisions.is_committed(producer, pseq):
            return
        if lost := sorted(channel for channel in channels if self._owner.lacks(channel, producer, pseq)):
            raise OutcomeUnknown(
                f"the transaction {pseq} of {producer} is committed, and {', '.join(lost)} has lost what was prepared "
                "there: other channels have their part; read before writing again"
            )

    async def settled(self, channels: Sequence[str], transaction: TransactionId) -> Appended:
        """The outcome of a transaction that is to be committed, once it is written to all these `channels`. Raises
        `Unavailable` where one is not owned here, and `OutcomeUnknown` where one has lost what was prepared there."""
        while True:
            changed = self._changed
            known = await self._owner.settled(channels, transaction.producer, transaction.pseq)
            if len(known) == len(channels):
                outcome = next(iter(known.values()))
                return Appended(outcome.ts, outcome.rows, repeated=False)
            if not self._decisions.find(transaction):
                raise Unavailable(f"this node has not read yet how {transaction} was decided; retry")
            self.check_not_lost(channels, transaction.producer, transaction.pseq)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()

    # ---- what is decided --------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Do what is decided; returns whether there is more to come."""
        prepared = self._owner.prepared()
        for channel, transactions in prepared.items():
            self._look_at(channel, transactions)
        self._find_lost()
        return any(self._owner.prepared().values()) or self._is_unreported()

    def _look_at(self, channel: str, transactions: Sequence[PreparedTransaction]) -> None:
        commits: dict[TransactionId, int] = {}
        for each in transactions:
            ts = self._decisions.outcome_of(each.id)
            if ts:
                commits[each.id] = ts
            elif ts == 0:
                self._owner.abort(channel, each.id)
                self._node.metrics.counter(DECIDED, outcome="aborted").inc()
                self._let_in(channel)
            elif each.id not in self._proposing and self._is_overdue(each):
                self._proposing[each.id] = asyncio.create_task(self._propose_abort(each.id), name=f"abort {each.id}")
        if commits:
            self._commit_next(channel, commits, transactions)

    def _is_overdue(self, transaction: PreparedTransaction) -> bool:
        """Whether it should have been decided. Where other owners, or the log, take longer than that, each attempt of a
        write would be aborted: the next one is given twice the time."""
        patience_s = self._undecided.doubled_s(transaction.id[:2], UNDECIDED_S, UNDECIDED_MAX_S)
        return asyncio.get_running_loop().time() - transaction.since >= patience_s

    def _commit_next(
        self, channel: str, commits: dict[TransactionId, int], transactions: Sequence[PreparedTransaction]
    ) -> None:
        try:
            committing = self._owner.commit_next(channel, commits)
        except TidewalError as error:  # the log does not take it now
            _log.info("what a transaction writes to %s waits: %s", channel, error)
            return
        if committing is not None:
            records = {commits[each.id]: each.records for each in transactions if each.id in commits}
            committing.add_done_callback(partial(self._committed, channel, records))

    def _let_in(self, channel: str) -> None:
        """Tell the doors of this process, where they hold other writes for the channel."""
        if self._owner.turns_away(channel):
            self._node.local_owner.wake()

    def _committed(self, channel: str, records: dict[int, list[Record]], committing: asyncio.Future[Appended]) -> None:
        if committing.cancelled():
            return
        if (error := committing.exception()) is not None:
            _log.info("what a transaction writes to %s was not taken: %s", channel, error)
            return  # the next look tries again
        ts = committing.result().ts
        self._written(records.get(ts, ()), ts)
        self._node.metrics.counter(DECIDED, outcome="committed").inc()
        self.wake()
        self._let_in(channel)

    async def _propose_abort(self, id: TransactionId) -> None:
        try:
            await self._node.cluster.log.propose(decided(id, 0, [], self._decisions.count))
            _log.info("%s was not decided in time, and is aborted", id)
            self._undecided.add(id[:2])
        except PreconditionFailed:  # it is decided by now
            pass
        except TidewalError as error:
            _log.warning("whether %s is committed is not decided yet: %s", id, error)
            await asyncio.sleep(LOOK_S)
        finally:
            del self._proposing[id]
            self.wake()

    # ---- what is written --------------------------------------------------------------------------------------------

    def _unreported(self) -> dict[str, list[TransactionId]]:
        """By channel the transactions that are written there, or lost, and not known to be."""
        found: dict[str, list[TransactionId]] = {}
        if not self._decisions.open:
            return found
        for channel, transactions in self._owner.prepared().items():
            there = {each.id for each in transactions}
            if missing := [id for id in self._decisions.unwritten(channel) if id not in there]:
                found[channel] = missing
        return found

    def _find_lost(self) -> None:
        """Note of each transaction, as soon as it is seen that it is not prepared in a channel, whether it is lost
        there: its client may write so much later on that the channel forgets what it has of it."""
        missing = [(channel, id) for channel, ids in self._unreported().items() for id in ids]
        self._lost = {
            each: self._lost[each] if each in self._lost else self._owner.lacks(each[0], *each[1][:2])
            for each in missing
        }

    async def _of_dropped(self) -> dict[str, list[TransactionId]]:
        """By channel the transactions that waited for it when its topic was dropped: nothing is written there."""
        awaited = self._decisions.awaited_channels
        if awaited <= self._catalog.catalog.channels.keys():
            return {}
        try:  # owned before it was prepared there: who has read so far, and does not find it, knows that it is gone
            there = (await self._catalog.catch_up()).channels
        except TidewalError as error:
            _log.info("which channels are gone is looked at later: %s", error)
            return {}
        return {channel: self._decisions.unwritten(channel) for channel in awaited.difference(there)}

    def _is_unreported(self) -> bool:
        return bool(self._unreported())

    async def _report(self) -> None:
        """Say what is written, now and then: the decisions are kept until all is."""
        now_s = asyncio.get_running_loop().time()
        if not self._decisions.open or now_s - self._reported_s < REPORT_S:
            return
        found = self._unreported() | await self._of_dropped()
        if not found:
            return
        self._reported_s = now_s
        lost = [(id, channel) for channel, ids in found.items() for id in ids if self._lost.get((channel, id))]
        channels = {channel: [list(id) for id in ids] for channel, ids in found.items()}
        try:
            await self._node.cluster.log.propose(
                {"kind": WRITTEN, "incarnation": self._node.incarnation, "channels": channels}
            )
        except TidewalError as error:  # it is said again
            _log.info("what transactions have written is said later: %s", error)
            return
        for id, channel in lost:
            self._node.metrics.counter(DECIDED, outcome="lost").inc()
            _log.error(
                "%s is committed, and %s has lost what was prepared there: that part of it is missing", id, channel
            )
