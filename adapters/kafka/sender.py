"""Appending to one partition: batch by batch, each exactly once, with a known outcome wherever possible."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from ...runtime.errors import TidewalError, Unavailable, of_unknown_outcome
from ...runtime.log.stalls import Waiting
from . import faults
from .batch import ProducerBatch
from .cluster import PARTITION, PAUSE_S, Cluster
from .options import CODECS
from .positions import Row
from .requests import NO_ID, ProduceById

APPEND = faults.Operation.APPEND
ACKS_ALL, ACKS_LEADER = -1, 1
NOT_TRANSACTIONAL: Any = None
LONGEST_MS = 2**31 - 1
SEQUENCES = 2**31  # they begin again at 0


class Sender:
    """The idempotent producer of one partition. One `send` at a time, so order is kept.

    Brokers recognise a batch by producer id and sequence number. So it may be sent again until it is answered, and a
    refused batch uses up no sequence number: the batches after it do not fail. When `send` ends with an attempt of
    unknown outcome, the producer id is given up, and the next batch is sent under a new one.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        connection: int,
        ready: Callable[[], Awaitable[None]],
        acks: int = ACKS_ALL,
        channel: str = "",
        topic_id: Callable[[], bytes | None] = lambda: NO_ID,
        partition: int = PARTITION,
    ) -> None:
        """`ready` is called where the `topic_id` is not known yet, and where the topic may be gone: it creates the
        topic, or raises that it is gone for good. Stalls are reported under `channel`, or the topic's name."""
        self._cluster, self._topic, self._connection = cluster, topic, connection
        self._ready, self._acks, self._topic_id = ready, acks, topic_id
        self._channel, self._partition = channel or topic, partition
        self._producer: tuple[int, int] | None = None  # id and epoch
        self._sequence = self._next_sequence = 0  # of the batch in flight, and of the one after it

    def batch(self, rows: Iterable[Row] = ()) -> ProducerBatch:
        """A new batch for the topic, with `rows`."""
        return ProducerBatch(rows, codec=CODECS[self._cluster.options.compression])

    def prepare(self, batch: ProducerBatch) -> None:
        """Build a batch with the numbers that it gets if the one in flight is appended, so that it can be sent as soon
        as that one is answered."""
        if self._producer is not None:
            batch.build(self._producer, self._next_sequence)

    async def send(self, batch: ProducerBatch) -> int:
        """Append a batch and return the offset of its first record. Raises `Unavailable` and what `ready` and
        `faults.mapped` have, with `outcome_unknown` where the batch may be in the log all the same."""
        waiting = self._cluster.stalls.begin("append", self._channel)
        try:
            return await self._send(batch, waiting)
        finally:
            self._cluster.stalls.end(waiting)

    async def _send(self, batch: ProducerBatch, waiting: Waiting) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._cluster.options.delivery_timeout_s
        built: Any = None
        unknown = False  # whether an attempt may have been written
        try:
            while True:
                before = unknown
                try:
                    if built is None:
                        if self._topic_id() is None:
                            await self._ready()
                        built = batch.build(await self._identity(), self._sequence)
                        self._next_sequence = (self._sequence + batch.count) % SEQUENCES
                    unknown = True  # until there is an answer
                    offset = await self._attempt(built)
                    self._sequence, unknown = self._next_sequence, False
                    return offset
                except faults.Foreign as error:
                    unknown = before or (unknown and faults.outcome(error, APPEND) is faults.Outcome.UNKNOWN)
                    lost = faults.sequence_lost(error)
                    if lost:
                        self._producer = built = None
                    forgotten = isinstance(error, kafka_errors.DuplicateSequenceNumber)  # it is in the log
                    if faults.final(error) or loop.time() > deadline or forgotten or (lost and unknown):
                        raise faults.mapped(error, f"append to {self._topic}", outcome_unknown=unknown) from error
                    self._cluster.stalls.retry(waiting, error)
                    gone = faults.topic_unknown(error)
                await self._pause(deadline, gone=gone)
        except TidewalError as error:
            if not unknown:
                raise
            self._cluster.stalls.outcome_unknown(self._channel, batch.count)
            raise of_unknown_outcome(error) from error.__cause__
        finally:
            if unknown:  # the brokers may have the sequence: the next batch under it would be taken for this one
                self._producer = None

    async def _identity(self) -> tuple[int, int]:
        """The producer's id and epoch, requested where there is none."""
        if self._producer is None:
            response = await self._cluster.ask(None, InitProducerIdRequest(NOT_TRANSACTIONAL, LONGEST_MS))
            if response.error_code:
                raise faults.for_code(response.error_code)
            self._producer, self._sequence = (response.producer_id, response.producer_epoch), 0
        return self._producer

    async def _attempt(self, batch: bytes) -> int:
        timeout_ms = int(self._cluster.options.request_timeout_s * 1000)
        topic_id = self._topic_id() or NO_ID
        if topic_id == NO_ID:
            topics = [(self._topic, [(self._partition, batch)])]
            request: Any = ProduceRequest(NOT_TRANSACTIONAL, self._acks, timeout_ms, topics)
        else:
            request = ProduceById(self._acks, timeout_ms, self._topic, topic_id, batch, self._partition)
        response = await self._cluster.ask_leader(self._topic, request, self._connection, self._partition)
        return written_at(response)

    async def _pause(self, deadline: float, *, gone: bool) -> None:
        """Wait, refresh the leader of the topic, and check whether the topic is `gone`. Errors are ignored: the next
        attempt will fail with them too."""
        with contextlib.suppress(TimeoutError, Unavailable, *faults.Foreign):
            async with asyncio.timeout_at(deadline + PAUSE_S):
                await asyncio.sleep(PAUSE_S)
                await self._cluster.refresh()
                if gone or self._cluster.leader(self._topic, self._partition) is None:
                    await self._ready()


def written_at(response: Any) -> int:
    """The offset of the first record, from the answer to an append. Raises the library's errors."""
    code, offset = response.topics[0][1][0][1:3]
    if code:
        raise faults.for_code(code)
    if offset < 0:
        raise kafka_errors.DuplicateSequenceNumber
    return offset
