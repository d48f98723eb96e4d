"""Record batches to be appended to a topic, encoded while they are filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiokafka.record import MemoryRecords
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from .positions import Row

MAGIC = 2  # the format of batches
NO_PRODUCER = -1, -1  # producer id and epoch of a batch that is not numbered yet
UNNUMBERED = -1
NEVER_FULL = 2**31 - 1  # the send queue decides what goes into a batch


class ProducerBatch:
    """Records that are appended together. They are encoded before the batch is sent; only its numbers are set then."""

    __slots__ = ("_builder", "_built", "_codec", "_numbers", "_transactional", "count")

    def __init__(self, rows: Iterable[Row] = (), *, codec: int = 0, transactional: bool = False) -> None:
        self._codec, self._transactional = codec, int(transactional)
        self._begin(rows)

    def _begin(self, rows: Iterable[Row]) -> None:
        self._builder = DefaultRecordBatchBuilder(
            MAGIC, self._codec, self._transactional, *NO_PRODUCER, UNNUMBERED, NEVER_FULL
        )
        self._built: Any = None
        self._numbers = NO_PRODUCER, UNNUMBERED  # producer and sequence with which it is built
        self.count: int = 0
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Encode rows after those that are in the batch. Only before `build`."""
        number, append = self.count, self._builder.append
        for timestamp_ms, key, value, headers in rows:
            append(number, timestamp_ms, key, value, headers)
            number += 1
        self.count = number

    def build(self, producer: tuple[int, int], sequence: int) -> Any:
        """The encoded batch with the producer's id and epoch, and the `sequence` of its first record."""
        if self._built is None or self._numbers != (producer, sequence):
            if self._built is not None:  # the builder compresses in place, so it builds once
                self._begin(self.rows())
            self._builder.set_producer_state(*producer, sequence)
            self._built, self._numbers = self._builder.build(), (producer, sequence)
        return self._built

    def rows(self) -> list[Row]:
        """The rows of the batch, decoded again: for a batch that has to be split or numbered anew."""
        built = self._built if self._built is not None else self.build(NO_PRODUCER, UNNUMBERED)
        batch: Any = MemoryRecords(bytes(built)).next_batch()
        return [(record.timestamp, record.key, record.value, record.headers) for record in batch]
