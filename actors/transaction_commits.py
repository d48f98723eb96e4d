"""Commit a transaction over several pchannels, as a door does: each owner prepares its part, what all have prepared is
decided in the state of the cluster's members, and each owner writes it.

A door that dies leaves nothing behind: what is prepared and not decided its owners have aborted, and what is decided
they write. A client that asks again does so under the same number, at any door: that begins another attempt, of which
each owner that has the transaction says so. Of all attempts of one write only one can be decided to be committed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import xxhash

from ..runtime.cluster.decided_positions import PositionMoves
from ..runtime.cluster.transaction_decisions import TransactionDecisions, decided
from ..runtime.errors import (
    DeadlineExceeded,
    Overloaded,
    PreconditionFailed,
    TidewalError,
    TopicEpochEnded,
    of_unknown_outcome,
)
from ..runtime.groups.coordinator_client import GroupAcks
from ..runtime.log.wal import Capabilities
from ..runtime.ownership import Appended
from ..runtime.ownership.prepared import TransactionId
from .cluster_member import ClusterMember
from .failed_attempts import FailedAttempts
from .local_owner import WritePart
from .write_requests import SendAgain

AGAIN_S = 0.05  # until a decision that the log has not taken is proposed again, and about until the second attempt
AGAIN_MAX_S = 5.0  # about until the next attempt behind many


class PrepareAt(Protocol):
    """Has one owner prepare what of a write is for its channels."""

    def __call__(
        self, owner: str, part: WritePart, channels: set[str], deadline_s: float, attempt: str
    ) -> asyncio.Future[Appended]: ...


class Settle(Protocol):
    """Waits until all of these channels that are still there have a transaction that is decided to be committed."""

    def __call__(
        self, transaction: TransactionId, channels: Sequence[str], *, deadline_s: float
    ) -> Awaitable[None]: ...


def is_prepared(channels: Collection[str], acks: GroupAcks | None, log: Capabilities) -> bool:
    """Whether a transaction for these pchannels is to be prepared: the log does not take it as one commit of one
    owner, or it acknowledges what a member has got, and that is a part of the decision."""
    decides_position = acks is not None and bool(acks.tokens)
    return decides_position or (len(channels) > 1 and not (log.atomic_batches and log.one_node))


class TransactionCommits:
    """The transactions that a door commits. `name` is its own, never used before."""

    def __init__(self, cluster: ClusterMember, name: str, prepare_at: PrepareAt, settle: Settle) -> None:
        self._cluster, self._name, self._prepare_at, self._settle = cluster, name, prepare_at, settle
        self._attempts = itertools.count(1)
        self._aborting: set[asyncio.Task[None]] = set()
        self._failed = FailedAttempts()

    @property
    def _decisions(self) -> TransactionDecisions:
        return self._cluster.state.transactions

    def commit(
        self, part: WritePart, owners: Mapping[str, Sequence[str]], deadline_s: float
    ) -> asyncio.Future[Appended]:
        """Commit `part` at its `owners`, by their channels. The future ends once all channels have it, with its
        timestamp. It raises `SendAgain` where this attempt is not committed, and another one may be; what an owner says
        where nothing is written; and `DeadlineExceeded` where it is not known in time (`outcome_unknown`). Raises,
        having changed nothing, what an owner in this process raises. Where it acknowledges what a member
        has got, the positions are a part of the decision; the future raises `Fenced`, and no attempt is ever committed,
        where the group has gone on without it."""
        id = TransactionId(part.producer, part.pseq, f"{self._name}-{next(self._attempts)}")
        moves = None if part.acks is None else PositionMoves.of(part.acks)
        began, until = self._decisions.count, asyncio.get_running_loop().time() + deadline_s
        here = self._cluster.incarnation
        # first the owner in this process: where it refuses, nothing is sent to others
        ordered = sorted(owners.items(), key=lambda each: each[0] != here)
        prepares = [
            self._prepare_at(owner, part, set(channels), deadline_s, attempt=id.attempt) for owner, channels in ordered
        ]
        channels = sorted(channel for _, theirs in ordered for channel in theirs)
        commit = self._commit(id, part, moves, channels, prepares, began, until)
        return asyncio.ensure_future(self._backing_off(id, commit))

    async def _backing_off(self, id: TransactionId, attempt: Coroutine[object, object, Appended]) -> Appended:
        """The outcome of an attempt. Where it comes to nothing the next one is put off, twice as long as the last time:
        attempts that follow at once are in the way of each other, and of the writes that wait for their channels."""
        write = id[:2]
        try:
            appended = await attempt
        except SendAgain:
            pause_s = self._failed.doubled_s(write, AGAIN_S, AGAIN_MAX_S)
            self._failed.add(write)
            await asyncio.sleep(pause_s * _spread(id))
            raise
        self._failed.forget(write)
        return appended

    async def _commit(
        self,
        id: TransactionId,
        part: WritePart,
        moves: PositionMoves | None,
        channels: Sequence[str],
        prepares: Sequence[asyncio.Future[Appended]],
        began: int,
        until: float,
    ) -> Appended:
        results = await asyncio.gather(*prepares, return_exceptions=True)
        prepared = [each for each in results if isinstance(each, Appended)]
        if len(prepared) == len(results) and all(each.repeated for each in prepared):
            return prepared[0]  # an earlier attempt was committed
        if len(prepared) < len(results) or any(each.repeated for each in prepared):
            self._abort_aside(id)
            error = _why([each for each in results if isinstance(each, BaseException)])
            committed = any(each.repeated for each in prepared)  # an earlier attempt, which others write yet
            raise of_unknown_outcome(error) if committed and isinstance(error, TidewalError) else error
        try:
            ts = await self._decide(id, max(each.ts for each in prepared), moves, channels, began, until)
            if ts:
                left_s = max(0.0, until - asyncio.get_running_loop().time())
                await self._settle(id, channels, deadline_s=left_s)
                return Appended(ts, part.rows, repeated=False)
        except TidewalError as error:  # whatever it says, the transaction is committed, or may be
            raise of_unknown_outcome(error) from None
        if moves is not None and not self._decisions.is_committed(part.producer, part.pseq):
            self._decisions.positions.check(moves)
        raise _again("its owners have aborted it", unknown=False)

    async def _decide(
        self,
        id: TransactionId,
        ts: int,
        moves: PositionMoves | None,
        channels: Sequence[str],
        began: int,
        until: float,
    ) -> int:
        """Have it decided; returns the timestamp of the commit, 0 where it is aborted. While the log says no more than
        that it does not know, an abort is proposed: the first decision counts. Raises `DeadlineExceeded`."""
        event = decided(id, ts, list(channels), began, moves)
        while True:
            try:
                await self._cluster.log.propose(event)
            except PreconditionFailed:
                pass
            except TidewalError as error:
                if not error.retryable:
                    raise
                if asyncio.get_running_loop().time() >= until:
                    raise DeadlineExceeded(
                        f"whether {id} is committed was not decided in time: {error}", outcome_unknown=True
                    ) from None
                await asyncio.sleep(AGAIN_S)
            if (found := self._decisions.outcome_of(id)) is not None:
                return found
            event = decided(id, 0, [], began)

    def _abort_aside(self, id: TransactionId) -> None:
        """Let what is prepared go as soon as possible: its owners would abort it by themselves, later."""
        task = asyncio.create_task(self._abort(id), name=f"abort {id}")
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, id: TransactionId) -> None:
        with suppress(TidewalError):  # it is decided by now, or its owners do it
            await self._cluster.log.propose(decided(id, 0, [], self._decisions.count))


def _spread(id: TransactionId) -> float:
    """A factor from 0.5 to 1.5 that is another one for each attempt: two that were in each other's way are not so for
    ever."""
    return 0.5 + xxhash.xxh3_64_intdigest(id.attempt.encode()) / 2**64


def _again(why: str, *, unknown: bool) -> SendAgain:
    return SendAgain(f"the transaction is tried again: {why}", outcome_unknown=unknown)


def _why(errors: Sequence[BaseException]) -> BaseException:
    """Why a transaction was not prepared. This attempt is certainly not committed: its door alone has that decided."""
    for kind in (TopicEpochEnded, Overloaded):
        if found := next((each for each in errors if isinstance(each, kind)), None):
            return found
    for error in errors:
        if not isinstance(error, TidewalError) or not error.retryable:
            return error
    if not errors:
        return _again("an earlier attempt is written in some of its channels", unknown=True)
    return _again(str(errors[0]), unknown=False)
