"""The rows of one shard in memory: columns in chunks, one dictionary from primary key to row.

Every row gets a number when it is applied and keeps it. A chunk knows the numbers of its rows (ascending), so
chunks can lose their dead rows and merge with their neighbours without touching the dictionary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...runtime.errors import BadRecord, MemoryLimitExceeded
from ...runtime.rows.schema import OP_COLUMN, CollectionSchema, Op
from .view import Mask, RowChunk, ShardView, checked_columns, indices_of

Numbers: TypeAlias = npt.NDArray[np.int64]

CHUNK_ROWS: Final = 65_536  # chunks merge until they have as many
SMALL_ROWS: Final = 8_192
SMALL_CHUNKS: Final = 16  # that many small neighbours merge into one
MAX_CHUNKS_BEHIND: Final = 256  # with more chunks `apply` calls `maintain` itself
INDEX_BYTES: Final = 160  # of a key beside its row: its string, its number, its slot in the dictionary


@dataclass(slots=True)
class _OpenChunk:
    """A chunk of the store: `alive` changes in place, rows and numbers never do."""

    rows: pa.RecordBatch
    numbers: Numbers
    alive: Mask
    bytes: int
    dead: int = 0
    first: int = field(init=False)
    dense: bool = field(init=False)  # numbers have no gaps

    def __post_init__(self) -> None:
        self.first = int(self.numbers[0])
        self.dense = int(self.numbers[-1]) - self.first + 1 == len(self.numbers)

    def places(self, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The indices in the chunk of the rows with these numbers."""
        return numbers - self.first if self.dense else np.searchsorted(self.numbers, numbers)

    def living(self) -> _OpenChunk:
        """The chunk without its dead rows; at least one row must be alive."""
        rows = self.rows.filter(pa.array(self.alive))
        numbers = self.numbers[self.alive]
        return _OpenChunk(rows, numbers, np.ones(len(numbers), np.bool_), rows.nbytes)


class RowMemory:
    """What all rows of a node may take together; `used` by now. Both in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: int = limit_bytes
        self.used: int = 0


class RowStore:
    """The current rows of one shard, changed in log order by `apply`. Single-threaded, except that a `snapshot` may be
    read anywhere."""

    def __init__(self, schema: CollectionSchema, memory: RowMemory) -> None:
        """The rows count in `memory`, until `release`."""
        self.schema = schema
        self._memory = memory
        self._counted = 0  # of `bytes`, in `memory`
        self.versions: dict[str, int] = {op.name.lower(): 0 for op in Op}  # rows ever applied, by operation
        self._index: dict[object, int] = {}
        self._chunks: list[_OpenChunk] = []
        self._firsts: list[int] = []  # the first number of each chunk
        self._next_number = 0
        self._row_bytes = 0

    @property
    def row_count(self) -> int:
        """The number of current rows."""
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Memory held: column data, dead rows included, and an estimate for the index."""
        return self._row_bytes + len(self._index) * INDEX_BYTES

    def apply(self, batch: pa.RecordBatch) -> None:
        """Apply a batch of the log (all columns and `_op`): an insert or upsert replaces the row of its key, a delete
        removes it; of several rows of one key the last wins. Every later query sees it.

        Raises, with nothing applied: `MemoryLimitExceeded(limit="queryNode.memoryLimitBytes")`, `BadRecord` when the
        columns are not those of the schema.
        """
        if not batch.schema.equals(self.schema.row_arrow()):
            raise BadRecord(f"rows do not have the columns of collection {self.schema.name!r}", reason="schema")
        if not batch.num_rows:
            return
        counts = np.bincount(batch.column(OP_COLUMN).to_numpy(), minlength=len(Op))
        last, keys = _last_of_each_key(batch, self.schema.primary_key)
        deletes: list[object] = []
        if counts[Op.DELETE]:
            deleted = last.column(OP_COLUMN).to_numpy() == Op.DELETE
            deletes = [key for key, gone in zip(keys, deleted.tolist(), strict=True) if gone]
            keys = [key for key, gone in zip(keys, deleted.tolist(), strict=True) if not gone]
            last = last.filter(cast(pa.BooleanArray, pa.array(~deleted)))
        rows = last.select(self.schema.arrow().names)
        size = rows.nbytes
        self._make_room(size + len(keys) * INDEX_BYTES if keys else 0)
        self._replace(rows, keys, size)
        self._remove(deletes)
        self._count()
        for op in Op:
            self.versions[op.name.lower()] += int(counts[op])
        if len(self._chunks) > MAX_CHUNKS_BEHIND:
            self.maintain()

    def maintain(self) -> bool:
        """Do one step of housekeeping (a few ms at most): drop the dead rows of a chunk that is more than half dead,
        or merge small neighbours. Returns whether there was anything to do; call it while idle."""
        for at, chunk in enumerate(self._chunks):
            if 2 * chunk.dead > len(chunk.numbers):
                self._put(at, at + 1, [chunk.living()] if chunk.dead < len(chunk.numbers) else [])
                return True
        run = self._small_neighbours()
        if run is None:
            return False
        self._put(run[0], run[1], [_merged(self._chunks[run[0] : run[1]])])
        return True

    def view(self) -> ShardView:
        """The rows as they are; valid until the next `apply` or `maintain`."""
        return ShardView(self.schema, tuple(RowChunk(each.rows, each.alive) for each in self._chunks))

    def snapshot(self) -> ShardView:
        """The rows as they are now; never changes, and any thread may read it."""
        return ShardView(self.schema, tuple(RowChunk(each.rows, each.alive.copy()) for each in self._chunks))

    def get(self, keys: Sequence[object], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these keys, in their order; a key without a row is left out, a key asked twice comes twice."""
        names = checked_columns(self.schema, columns)
        numbers = np.array([number for number in map(self._index.get, keys) if number is not None], dtype=np.int64)
        unique, back = np.unique(numbers, return_inverse=True)
        parts = [
            self._chunks[at].rows.select(names).take(indices_of(self._chunks[at].places(part)))
            for at, part in self._by_chunk(unique)
        ]
        table = pa.Table.from_batches(parts, self.schema.arrow_of(names))
        return table.take(indices_of(back)) if len(back) else table

    def _make_room(self, more: int) -> None:
        """Raise `MemoryLimitExceeded` unless `more` bytes fit, once every dead row is dropped."""
        memory = self._memory
        if not more or memory.used + more <= memory.limit_bytes:
            return
        for at in reversed(range(len(self._chunks))):
            chunk = self._chunks[at]
            if chunk.dead:
                self._put(at, at + 1, [chunk.living()] if chunk.dead < len(chunk.numbers) else [])
        if memory.used + more > memory.limit_bytes:
            raise MemoryLimitExceeded(
                f"a shard of collection {self.schema.name!r} holds {self.bytes} of the {memory.used} bytes of all, "
                f"{more} more would pass queryNode.memoryLimitBytes ({memory.limit_bytes})",
                limit="queryNode.memoryLimitBytes",
            )

    def _replace(self, rows: pa.RecordBatch, keys: list[object], size: int) -> None:
        if not keys:
            return
        first, self._next_number = self._next_number, self._next_number + len(keys)
        old = [number for number in map(self._index.get, keys) if number is not None]
        self._index.update(zip(keys, range(first, self._next_number), strict=True))
        self._mark_dead(old)
        numbers = np.arange(first, self._next_number)
        self._chunks.append(_OpenChunk(rows, numbers, np.ones(len(keys), np.bool_), size))
        self._firsts.append(first)
        self._row_bytes += size

    def _remove(self, keys: list[object]) -> None:
        pop = self._index.pop
        self._mark_dead([number for number in (pop(key, None) for key in keys) if number is not None])

    def _mark_dead(self, numbers: list[int]) -> None:
        """Mark rows as dead."""
        for at, part in self._by_chunk(np.sort(np.array(numbers, dtype=np.int64))):
            chunk = self._chunks[at]
            chunk.alive[chunk.places(part)] = False
            chunk.dead += len(part)

    def _by_chunk(self, numbers: Numbers) -> list[tuple[int, Numbers]]:
        """Ascending numbers, divided by the chunk they are in."""
        parts: list[tuple[int, Numbers]] = []
        start = 0
        while start < len(numbers):
            at = bisect_right(self._firsts, int(numbers[start])) - 1
            end = len(numbers)
            if at + 1 < len(self._firsts):
                end = start + int(np.searchsorted(numbers[start:], self._firsts[at + 1]))
            parts.append((at, numbers[start:end]))
            start = end
        return parts

    def _small_neighbours(self) -> tuple[int, int] | None:
        """The next run of neighbours worth merging, as a range of chunks."""
        start, total, small = 0, 0, 0
        for at, chunk in enumerate(self._chunks):
            count = len(chunk.numbers)
            if count >= CHUNK_ROWS:
                start, total, small = at + 1, 0, 0
                continue
            total += count
            if total >= CHUNK_ROWS and at > start:
                return start, at + 1
            small = small + 1 if count < SMALL_ROWS else 0
            if small >= SMALL_CHUNKS:
                return at + 1 - small, at + 1
        return None

    def _put(self, start: int, end: int, chunks: list[_OpenChunk]) -> None:
        """Replace the chunks from `start` to before `end`."""
        self._row_bytes += sum(each.bytes for each in chunks)
        self._row_bytes -= sum(each.bytes for each in self._chunks[start:end])
        self._chunks[start:end] = chunks
        self._firsts[start:end] = [each.first for each in chunks]
        self._count()

    def _count(self) -> None:
        self._memory.used += self.bytes - self._counted
        self._counted = self.bytes

    def release(self) -> None:
        """Count no more: nothing is applied any more, and nothing read."""
        self._memory.used -= self._counted
        self._counted = 0


def _last_of_each_key(batch: pa.RecordBatch, key: str) -> tuple[pa.RecordBatch, list[object]]:
    """The batch without rows that a later one of the same key overrules, and its keys."""
    keys = cast("list[object]", batch.column(key).to_pylist())
    if len(set(keys)) == len(keys):
        return batch, keys
    last = sorted({key: at for at, key in enumerate(keys)}.values())
    return batch.take(indices_of(np.array(last))), [keys[at] for at in last]


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _merged(chunks: list[_OpenChunk]) -> _OpenChunk:
    """Neighbours as one, their dead rows left behind where that is cheap: all of them are copied anyway."""
    living = [each.living() if each.dead else each for each in chunks if each.dead < len(each.numbers)]
    living = living or chunks[:1]
    rows = _concatenated([each.rows for each in living])
    numbers = np.concatenate([each.numbers for each in living])
    alive = np.concatenate([each.alive for each in living])
    return _OpenChunk(rows, numbers, alive, rows.nbytes, int(len(alive) - np.count_nonzero(alive)))
