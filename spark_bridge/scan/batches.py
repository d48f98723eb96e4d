"""Batches as they go to Spark. Each costs Spark something, so small pieces are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

BATCH_ROWS = 64 * 1024
BATCH_BYTES = 16 * 1024 * 1024

T = TypeVar("T")


def arrow_batches(
    pieces: Iterable[tuple[T, int, int]], to_arrow: Callable[[list[T]], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Batches of about `BATCH_ROWS` or `BATCH_BYTES`, of pieces that come with their rows and bytes. They begin with a
    piece where one piece is not more than that: a few rows left over would be a batch, too."""
    for held in _joined(pieces):
        batch = to_arrow(held)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _joined(pieces: Iterable[tuple[T, int, int]]) -> Iterator[list[T]]:
    held: list[T] = []
    count = size = 0
    for piece, rows, bytes in pieces:
        if held and (count + rows > BATCH_ROWS or size + bytes > BATCH_BYTES):
            yield held
            held, count, size = [], 0, 0
        held.append(piece)
        count += rows
        size += bytes
    if held:
        yield held
