"""Records on their way into a topic, encoded as they come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiokafka.record import MemoryRecords
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from .positions import Row

MAGIC = 2  # the format of batches
NOBODY = -1, -1  # as producer: its id and epoch are not known yet
UNNUMBERED = -1
NEVER_FULL = 2**31 - 1  # what goes into a batch is chosen before


class Batch:
    """Records that are appended together. When their turn comes, all that is left is to number them."""

    __slots__ = ("_builder", "_built", "_codec", "_numbers", "_transactional", "count")

    def __init__(self, rows: Iterable[Row] = (), *, codec: int = 0, transactional: bool = False) -> None:
        self._codec, self._transactional = codec, int(transactional)
        self._begin(rows)

    def _begin(self, rows: Iterable[Row]) -> None:
        self._builder = DefaultRecordBatchBuilder(
            MAGIC, self._codec, self._transactional, *NOBODY, UNNUMBERED, NEVER_FULL
        )
        self._built: Any = None
        self._numbers = NOBODY, UNNUMBERED  # under which it is built
        self.count = 0
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Encode rows behind what is there; before `build`."""
        number, append = self.count, self._builder.append
        for timestamp_ms, key, value, headers in rows:
            append(number, timestamp_ms, key, value, headers)
            number += 1
        self.count = number

    def build(self, producer: tuple[int, int], sequence: int) -> Any:
        """The batch as it is sent, under a producer's id and epoch and the number of its first record."""
        if self._built is None or self._numbers != (producer, sequence):
            if self._built is not None:  # the builder compresses in place, so it builds once
                self._begin(self.rows())
            self._builder.set_producer_state(*producer, sequence)
            self._built, self._numbers = self._builder.build(), (producer, sequence)
        return self._built

    def rows(self) -> list[Row]:
        """What is in it, decoded: the way back where a batch is not to be sent as it is."""
        built = self._built if self._built is not None else self.build(NOBODY, UNNUMBERED)
        batch: Any = MemoryRecords(bytes(built)).next_batch()
        return [(record.timestamp, record.key, record.value, record.headers) for record in batch]
