"""What one task writes into a collection, in chunks that are the same when the task runs again.

Spark may run a task twice: after a failure, or beside an attempt that it has abandoned. The rows of a partition are the
same then, but their order may differ (behind a shuffle). A chunk is recognised by its number, so chunk 3 must hold the
same rows in each attempt. What fits into one chunk does, in whatever order. What does not is sorted by the primary key
and divided between keys, by sizes that follow from the rows alone. Sorting needs all rows at once: that is done for
`RUN_BYTES` at a time, and beyond that the order in which Spark hands rows over counts. A digest of its rows goes with
each chunk, and shows when they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pyarrow import compute

from ...runtime.rows.hashing import shard_of
from ...runtime.rows.schema import CollectionSchema
from .ledger import DIGEST_MASK

Array: TypeAlias = "pa.Array[Any]"
Sizes: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = npt.NDArray[np.uint64]
pc: Any = compute

RUN_BYTES: Final = 64 * 1024 * 1024
CHUNK_BYTES: Final = 8 * 1024 * 1024

_MIX: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_NULL: Final = np.uint64(0x94D049BB133111EB)


class WriteChunk(NamedTuple):
    """Rows that are written as one batch, and the digest that identifies them."""

    rows: pa.RecordBatch
    digest: int


def chunks(
    batches: Iterable[pa.RecordBatch],
    schema: CollectionSchema,
    *,
    shards: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    run_bytes: int = RUN_BYTES,
) -> Iterator[WriteChunk]:
    """The rows of a partition in chunks of at most `chunk_bytes` (but one row at least). With `shards` more than 1 each
    chunk holds rows of one shard only. At most `run_bytes` and one batch are held, three times while they are sorted.
    """
    for run in _runs(batches, run_bytes):
        for part in _by_shard(run, schema, shards):
            yield from _divided(part, schema, chunk_bytes)


def _runs(batches: Iterable[pa.RecordBatch], run_bytes: int) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= run_bytes:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.Table.from_batches(held).combine_chunks().to_batches()[0]


def _by_shard(run: pa.RecordBatch, schema: CollectionSchema, shards: int) -> Iterator[pa.RecordBatch]:
    if shards == 1:
        yield run
        return
    shard = shard_of(cast(Array, run.column(schema.primary_key)), shards)
    for number in range(shards):
        rows = np.flatnonzero(shard == number)
        if len(rows):
            yield run.take(cast(pa.Int64Array, pa.array(rows)))


def _divided(part: pa.RecordBatch, schema: CollectionSchema, chunk_bytes: int) -> Iterator[WriteChunk]:
    sizes = row_bytes(part)
    if int(sizes.sum()) <= chunk_bytes:
        yield WriteChunk(part, digest(part))
        return
    order = pc.sort_indices(part.column(schema.primary_key))  # stable: versions of a key keep their order
    part = part.take(order)
    for begin, end in _bounds(part.column(schema.primary_key), sizes[order.to_numpy()], chunk_bytes):
        rows = part.slice(begin, end - begin)
        yield WriteChunk(rows, digest(rows))


def _bounds(keys: Any, sizes: Sizes, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """The slices of sorted rows: divided between two keys, unless the rows of one key are more than a chunk takes."""
    count = len(keys)
    first_of_key = np.flatnonzero(
        np.concatenate(([True], pc.not_equal(keys.slice(1), keys.slice(0, count - 1)).to_numpy(zero_copy_only=False)))
    )
    ends = np.cumsum(sizes)
    begin = 0
    while begin < count:
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + chunk_bytes, "right")), begin + 1)
        if end < count:
            between = int(first_of_key[np.searchsorted(first_of_key, end, "right") - 1])
            end = between if between > begin else end
        yield begin, end
        begin = end


def row_bytes(batch: pa.RecordBatch) -> Sizes:
    """The most bytes that each row takes in the log, by its values alone."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in cast("list[Array]", batch.columns):
        if pa.types.is_string(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False) + 4
        elif pa.types.is_fixed_size_list(column.type):
            sizes += 4 * cast(Any, column.type).list_size + 1
        else:
            sizes += max(column.type.bit_width // 8, 1)
        sizes += 1  # a null, at most
    return sizes


def digest(rows: pa.RecordBatch) -> int:
    """A number that identifies rows by operation and values (floats by their bits) and by how often each comes,
    whatever their order; never 0. That of two parts together is the sum of theirs."""
    hashes = np.zeros(rows.num_rows, np.uint64)
    for column in cast("list[Array]", rows.columns):
        bits = _bits(column)
        if column.null_count:
            bits = np.where(column.is_valid().to_numpy(zero_copy_only=False), bits, _NULL)
        hashes = (hashes ^ bits) * _MIX[0]
        hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX[1]
    hashes ^= hashes >> np.uint64(29)
    return int(hashes.sum(dtype=np.uint64)) & DIGEST_MASK or 1


def _bits(column: Array) -> Hashes:
    """64 bits of each value, whatever of a null: the value's own where it has no more, else a hash of it."""
    kind: Any = column.type
    count = len(column)
    if pa.types.is_string(kind):
        values = pc.fill_null(column.view(pa.binary()), b"").to_numpy(zero_copy_only=False)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, values), np.uint64, count)
    if pa.types.is_boolean(kind):
        return pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(np.uint64)
    if pa.types.is_fixed_size_list(kind):
        size = 4 * kind.list_size
        floats = cast(Any, column).values
        begin = 4 * floats.offset + size * column.offset
        vectors = np.frombuffer(floats.buffers()[1], f"V{size}", count, begin).tolist()
        return np.fromiter(map(xxhash.xxh3_64_intdigest, vectors), np.uint64, count)
    width = kind.bit_width // 8
    raw = np.frombuffer(cast(Any, column.buffers()[1]), f"<u{width}", count, column.offset * width)
    return raw.astype(np.uint64)
