"""A transaction of Kafka: entries of some channels and positions of a group, all of them or none.

Each has a name made of the group and the input channel, so the next member with the channel ends the transaction that
was left open under it, and fences a member that wrongly believes to have the channel. All data is ready when a
transaction begins, so it is open for a few round trips only; meanwhile readers of its output channels wait at its first
entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from ....runtime.errors import TidewalError, Unavailable, of_unknown_outcome
from .. import faults
from ..batch import ProducerBatch
from ..cluster import Cluster
from ..positions import Row
from ..sender import ACKS_ALL, written_at
from ..topics import place_of
from .coordinator_broker import Code, CoordinatorBroker, CoordinatorType
from .requests import by_topic

OPEN_MS = 60_000  # after that Kafka aborts an open transaction
FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.1  # pauses between checks whether a commit is visible

_ENDED = frozenset(
    {
        Code.INVALID_PRODUCER_EPOCH,
        Code.INVALID_TRANSACTION_STATE,
        Code.INVALID_PRODUCER_MAPPING,
        Code.PRODUCER_FENCED,
    }
)

_log = logging.getLogger(__name__)


class Aborted(Exception):
    """Kafka or another producer has aborted the transaction: none of it took effect."""


class TransactionalProducer:
    """Commits under one transactional name, one transaction after the other. Belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self._cluster = cluster
        self._coordinator = CoordinatorBroker(cluster, CoordinatorType.TRANSACTION, name)
        self._identity: tuple[int, int] | None = None
        self._sequences: dict[str, int] = {}
        self._lock = asyncio.Lock()

    async def fence(self) -> None:
        """Abort the open transaction of this name, and fence the producer that began it. Raises what
        `Cluster.retrying` does."""
        async with self._lock:
            await self._begin()

    async def _begin(self) -> tuple[int, int]:
        """Begin under a new epoch. Returns the producer's id and epoch."""

        async def attempt() -> tuple[int, int]:
            response = await self._coordinator.ask(InitProducerIdRequest(self.name, OPEN_MS))
            self._coordinator.check(response.error_code)
            return response.producer_id, response.producer_epoch

        identity = self._identity = await self._cluster.retrying("begin a transaction", attempt)
        self._sequences = {}
        return identity

    async def commit(
        self,
        group_id: str,
        batches: Mapping[str, Sequence[Sequence[Row]]],
        connections: Mapping[str, int],
        store: Callable[[str, tuple[int, int]], Awaitable[None]],
    ) -> dict[str, list[int]]:
        """Append the batches by channel's key, over `connections` by key, and call `store` with the name and the
        producer's id and epoch, in one transaction. Returns the offsets of the batches by key once readers may see
        them. Raises `Aborted`, what `store` raises, and what `Cluster.retrying` does: then none of it took effect,
        unless the error says `outcome_unknown`."""
        async with self._lock:
            identity = self._identity or await self._begin()
            try:
                await self._open(identity, group_id, list(batches))
                await store(self.name, identity)
                offsets = await asyncio.gather(
                    *(self._append(key, identity, each, connections[key]) for key, each in batches.items())
                )
            except BaseException as error:
                self._identity = None
                if isinstance(error, Exception) and not isinstance(error, Aborted):
                    await self._abort(identity)
                raise
            await self._end(identity)
            return dict(zip(batches, offsets, strict=True))

    async def _abort(self, identity: tuple[int, int]) -> None:
        """Abort after a failure, so that readers need not wait until Kafka aborts the transaction."""

        async def attempt() -> None:
            response = await self._coordinator.ask(EndTxnRequest(self.name, *identity, False))
            with contextlib.suppress(Aborted):
                self._check(response.error_code)

        try:
            await self._cluster.retrying("abort a transaction", attempt)
        except TidewalError as error:
            _log.warning("the transaction %s stays open until Kafka aborts it: %s", self.name, error)

    async def _open(self, identity: tuple[int, int], group_id: str, keys: Sequence[str]) -> None:
        async def add_topics() -> None:
            request = AddPartitionsToTxnRequest(self.name, *identity, _partitions(keys))
            response = await self._coordinator.ask(request)
            self._check(*(code for _, partitions in response.errors for _, code in partitions))

        async def add_group() -> None:
            response = await self._coordinator.ask(AddOffsetsToTxnRequest(self.name, *identity, group_id))
            self._check(response.error_code)

        await self._cluster.retrying("add channels to a transaction", add_topics)
        await self._cluster.retrying("add a group to a transaction", add_group)

    async def _append(
        self, key: str, identity: tuple[int, int], batches: Sequence[Sequence[Row]], connection: int
    ) -> list[int]:
        offsets: list[int] = []
        topic, number = place_of(key)
        for rows in batches:
            sequence = self._sequences.get(key, 0)
            built = ProducerBatch(rows, transactional=True).build(identity, sequence)

            async def attempt(built: Any = built) -> int:
                timeout_ms = int(self._cluster.options.request_timeout_s * 1000)
                request = ProduceRequest(self.name, ACKS_ALL, timeout_ms, [(topic, [(number, built)])])
                response = await self._cluster.ask_leader(topic, request, connection, number)
                if response.topics[0][1][0][1] in _ENDED:
                    raise Aborted
                return written_at(response)

            offsets.append(await self._cluster.retrying(f"append to {key}", attempt))
            self._sequences[key] = sequence + len(rows)
        return offsets

    async def _end(self, identity: tuple[int, int]) -> None:
        """Commit, which no failure can undo once it is decided; then wait until readers may see it."""
        unsure = False

        async def attempt() -> int:
            nonlocal unsure
            try:
                response = await self._coordinator.ask(EndTxnRequest(self.name, *identity, True))
                self._check(response.error_code)
            except Aborted:
                if unsure:
                    raise Unavailable(
                        "whether a transaction was committed is not known", outcome_unknown=True
                    ) from None
                raise
            except faults.Foreign as error:
                unsure |= faults.outcome(error, faults.Operation.COMMIT) is faults.Outcome.UNKNOWN
                raise
            return response.error_code

        try:
            await self._cluster.retrying("commit a transaction", attempt)
        except TidewalError as error:
            self._identity = None
            raise of_unknown_outcome(error) if unsure else error from error.__cause__
        except BaseException:
            self._identity = None
            raise
        await self._visible(identity)

    async def _visible(self, identity: tuple[int, int]) -> None:
        """Wait until the end is written to all topics: Kafka tells it in the answer to another commit request."""
        pause_s = FIRST_LOOK_S
        deadline = asyncio.get_running_loop().time() + self._cluster.options.request_timeout_s
        while asyncio.get_running_loop().time() < deadline:
            try:
                response = await self._coordinator.ask(EndTxnRequest(self.name, *identity, True))
            except faults.Foreign as error:
                _log.debug("whether %s is visible yet is not known: %r", self.name, error)
                return
            if response.error_code != Code.CONCURRENT_TRANSACTIONS:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    def _check(self, *codes: int) -> None:
        if any(code in _ENDED for code in codes):
            raise Aborted
        self._coordinator.check(*codes)


def _partitions(keys: Sequence[str]) -> list[tuple[str, list[int]]]:
    return [(topic, [number for (number,) in numbers]) for topic, numbers in by_topic((key, ()) for key in keys)]
