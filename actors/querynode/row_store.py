"""The rows of one shard in memory: columns in chunks, one dictionary from primary key to row.

Every row gets a number when it is applied and keeps it. A chunk knows the numbers of its rows (ascending), so
chunks can lose their dead rows and merge with their neighbours without touching the dictionary.

Rows that were replaced or deleted stay for a window of time, and each batch is remembered with the numbers of the rows
that it has ended. So the store can be read as it was at any time of the window: without the rows that came later, whose
numbers are higher, and with those that ended later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.clock import add_ms
from ...runtime.errors import BadRecord, MemoryLimitExceeded
from ...runtime.rows.schema import OP_COLUMN, OPS, CollectionSchema, Op
from .view import Mask, RowChunk, ShardView, checked_columns, indices_of

Numbers: TypeAlias = npt.NDArray[np.int64]

CHUNK_ROWS: Final = 65_536  # chunks merge until they have as many
SMALL_ROWS: Final = 4_096
SMALL_CHUNKS: Final = 16  # that many small neighbours merge into one
MAX_CHUNKS_BEHIND: Final = 256  # with more chunks `apply` calls `maintain` itself
GONE_PART: Final = 0.5  # of a chunk, above which its rows that are gone are dropped
TIGHT_PART: Final = 0.8  # of a node's memory for rows, above which they are dropped sooner:
TIGHT_GONE_PART: Final = 0.1
TIGHT_WINDOW_MS: Final = 1_000
WINDOW_BYTES: Final = 64 * 1024 * 1024  # of rows that ended, above which a store keeps them for as short
INDEX_BYTES: Final = 160  # of a key beside its row: its string, its number, its slot in the dictionary
CHANGE_BYTES: Final = 160  # of a batch that is remembered, beside the numbers of the rows that it has ended


@dataclass(slots=True)
class _OpenChunk:
    """A chunk of the store: `alive` and `gone` change in place, rows and numbers never do. Rows that are gone are
    dead for longer than the window, and may be dropped."""

    rows: pa.RecordBatch
    numbers: Numbers
    alive: Mask
    bytes: int
    gone: Mask = field(init=False)
    gone_count: int = field(init=False, default=0)
    first: int = field(init=False)
    dense: bool = field(init=False)  # numbers have no gaps

    def __post_init__(self) -> None:
        self.gone = np.zeros(len(self.numbers), np.bool_)
        self.first = int(self.numbers[0])
        self.dense = int(self.numbers[-1]) - self.first + 1 == len(self.numbers)

    def places(self, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The indices in the chunk of the rows with these numbers."""
        return numbers - self.first if self.dense else np.searchsorted(self.numbers, numbers)

    def kept(self) -> list[_OpenChunk]:
        """The chunk without the rows that are gone; none where all are."""
        if self.gone_count == len(self.numbers):
            return []
        kept = ~self.gone
        rows = self.rows.filter(pa.array(kept))
        return [_OpenChunk(rows, self.numbers[kept], self.alive[kept], rows.nbytes)]


class _Change(NamedTuple):
    """A batch of time `ts`: its rows have the numbers from `first` on, and it ended those with the numbers `ended`."""

    ts: int
    first: int
    ended: Numbers


class RowMemory:
    """What all rows of a node may take together; `used` by now. Both in bytes. `reclaim` is called before anything is
    refused: it lets go of what can be had again."""

    def __init__(self, limit_bytes: int, reclaim: Callable[[], None] = lambda: None) -> None:
        self.limit_bytes: int = limit_bytes
        self.used: int = 0
        self.reclaim: Callable[[], None] = reclaim

    @property
    def tight(self) -> bool:
        """Whether it is so full that deletes are to free it soon: before writes are slowed down for it."""
        return self.used > TIGHT_PART * self.limit_bytes


class RowStore:
    """The current rows of one shard, changed in log order by `apply`. Single-threaded, except that a `snapshot` may be
    read anywhere."""

    def __init__(self, schema: CollectionSchema, memory: RowMemory, window_ms: int = 0) -> None:
        """The rows count in `memory`, until `release`. The store can be read at any of the last `window_ms`, while
        that memory suffices."""
        self.schema = schema
        self.begins: int = 0  # the lowest time at which the store can be read
        self._memory = memory
        self._window_ms = window_ms
        self._changes: deque[_Change] = deque()  # later than `begins`
        self._ended_bytes = 0  # of all `ended` of those
        self._counted = 0  # of `bytes`, in `memory`
        self.versions: dict[str, int] = dict.fromkeys(OPS, 0)  # rows ever applied, by operation
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
        """Memory held: column data, dead rows included, and an estimate for the index and what is remembered."""
        return self._row_bytes + len(self._index) * INDEX_BYTES + len(self._changes) * CHANGE_BYTES + self._ended_bytes

    def apply(self, batch: pa.RecordBatch, ts: int = 0) -> None:
        """Apply a batch of the log of time `ts` (all columns and `_op`): an insert or upsert replaces the row of its
        key, a delete removes it; of several rows of one key the last wins. Every later query sees it.

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
        first = self._next_number
        ended = np.sort(np.array([*self._replace(rows, keys, size), *self._remove(deletes)], dtype=np.int64))
        for at, part in self._by_chunk(ended):
            self._chunks[at].alive[self._chunks[at].places(part)] = False
        self._changes.append(_Change(ts, first, ended))
        self._ended_bytes += ended.nbytes
        if not self._window_ms:
            self._forget(ts)
        self._count()
        for name, op in OPS.items():
            self.versions[name] += int(counts[op])
        if len(self._chunks) > MAX_CHUNKS_BEHIND:
            self.maintain()

    def maintain(self) -> bool:
        """Do one step of housekeeping (a few ms at most): drop the rows that are gone of a chunk that has too many of
        them, or merge small neighbours. Returns whether there was anything to do; call it while idle."""
        gone_part = TIGHT_GONE_PART if self._memory.tight else GONE_PART
        for at, chunk in enumerate(self._chunks):
            if chunk.gone_count > gone_part * len(chunk.numbers):
                self._put(at, at + 1, chunk.kept())
                return True
        run = self._small_neighbours()
        if run is None:
            return False
        self._put(run[0], run[1], _merged(self._chunks[run[0] : run[1]]))
        return True

    @property
    def has_changes(self) -> bool:
        """Whether rows are kept that have ended, for those who read the store as it was before."""
        return bool(self._changes)

    def begin(self, time: int) -> None:
        """What was applied is what was there at `time`: the store cannot be read as it was before."""
        self._forget(time)
        self._count()

    def advance(self, time: int) -> None:
        """Everything up to `time` is applied: what lies a window before it, a shorter one where memory is tight or many
        rows have ended, cannot be read any more."""
        short = self._memory.tight or (self._ended_bytes and self._bytes_of_ended() > WINDOW_BYTES)
        window_ms = min(self._window_ms, TIGHT_WINDOW_MS) if short else self._window_ms
        until = add_ms(time, -window_ms)
        if until > self.begins:
            self._forget(until)
            self._count()

    def _bytes_of_ended(self) -> int:
        """What the rows take that ended in the window, about."""
        ended = self._ended_bytes // np.dtype(np.int64).itemsize
        return self._row_bytes * ended // max(1, ended + len(self._index))

    def view(self, at: int | None = None) -> ShardView:
        """The rows as they are, or as they were at the time `at`, from `begins` on; valid until the next `apply`,
        `advance` or `maintain`."""
        return ShardView(self.schema, tuple(self._chunks_at(at)))

    def snapshot(self, at: int | None = None) -> ShardView:
        """What `view` shows; never changes, and any thread may read it."""
        chunks = tuple(RowChunk(each.rows, each.alive.copy()) for each in self._chunks_at(at))
        return ShardView(self.schema, chunks)

    def get(self, keys: Sequence[object], columns: Sequence[str] | None = None, at: int | None = None) -> pa.Table:
        """The rows of these keys, in their order; a key without a row is left out, a key asked twice comes twice. `at`
        is that of `view`."""
        names = checked_columns(self.schema, columns)
        numbers = self._index if at is None else self._numbers_at(keys, at)
        found = [number for number in map(numbers.get, keys) if number is not None]
        if all(one < next for one, next in pairwise(found)):
            return self._rows_of(np.array(found, dtype=np.int64), names)
        unique, back = np.unique(np.array(found, dtype=np.int64), return_inverse=True)
        return self._rows_of(unique, names).take(indices_of(back))

    def _rows_of(self, numbers: Numbers, names: list[str]) -> pa.Table:
        """The rows with these numbers, which ascend."""
        parts = [
            self._chunks[at].rows.select(names).take(indices_of(self._chunks[at].places(part)))
            for at, part in self._by_chunk(numbers)
        ]
        return pa.Table.from_batches(parts, self.schema.arrow_of(names))

    # ---- as it was --------------------------------------------------------------------------------------------------

    def _since(self, at: int) -> tuple[int, Numbers]:
        """Where the numbers begin of rows that came after the time `at`, and the numbers of rows that ended after it,
        ascending."""
        first, ended = self._next_number, list[Numbers]()
        for change in reversed(self._changes):
            if change.ts <= at:
                break
            first = change.first
            ended.append(change.ended)
        numbers = np.sort(np.concatenate(ended)) if ended else np.empty(0, np.int64)
        return first, numbers[numbers < first]

    def _chunks_at(self, at: int | None) -> Iterator[RowChunk]:
        if at is None or not self._changes or self._changes[-1].ts <= at:
            yield from (RowChunk(each.rows, each.alive) for each in self._chunks)
            return
        first, ended = self._since(at)
        alive_again = dict(self._by_chunk(ended))
        for number, chunk in enumerate(self._chunks):
            alive = chunk.alive.copy()
            alive[np.searchsorted(chunk.numbers, first) :] = False
            if number in alive_again:
                alive[chunk.places(alive_again[number])] = True
            yield RowChunk(chunk.rows, alive)

    def _numbers_at(self, keys: Sequence[object], at: int) -> dict[object, int]:
        """The numbers of the rows that these keys had, by key."""
        first, ended = self._since(at)
        current = ((key, self._index.get(key)) for key in keys)
        found = {key: number for key, number in current if number is not None and number < first}
        for number, part in self._by_chunk(ended):
            chunk = self._chunks[number]
            column = cast("pa.Array[Any]", chunk.rows.column(self.schema.primary_key))
            of_ended = column.take(indices_of(chunk.places(part)))
            asked = pc.is_in(of_ended, value_set=cast("pa.Array[Any]", pa.array(keys, column.type)))
            hits = np.flatnonzero(asked.to_numpy(zero_copy_only=False))
            hit = cast("list[object]", of_ended.take(indices_of(hits)).to_pylist())
            found.update(zip(hit, part[hits].tolist(), strict=True))
        return found

    def _forget(self, until: int) -> None:
        """Remember no batch up to the time `until`; what those have ended is gone."""
        self.begins = max(self.begins, until)
        while self._changes and self._changes[0].ts <= until:
            ended = self._changes.popleft().ended
            self._ended_bytes -= ended.nbytes
            for at, part in self._by_chunk(ended):
                chunk = self._chunks[at]
                chunk.gone[chunk.places(part)] = True
                chunk.gone_count += len(part)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def _make_room(self, more: int) -> None:
        """Raise `MemoryLimitExceeded` unless `more` bytes fit, once every dead row is dropped: the store cannot be
        read at an earlier time any more then."""
        memory = self._memory
        if not more or memory.used + more <= memory.limit_bytes:
            return
        memory.reclaim()
        if self._changes:
            self._forget(self._changes[-1].ts)
        for at in reversed(range(len(self._chunks))):
            if self._chunks[at].gone_count:
                self._put(at, at + 1, self._chunks[at].kept())
        if memory.used + more > memory.limit_bytes:
            raise MemoryLimitExceeded(
                f"a shard of collection {self.schema.name!r} holds {self.bytes} of the {memory.used} bytes of all, "
                f"{more} more would pass queryNode.memoryLimitBytes ({memory.limit_bytes})",
                limit="queryNode.memoryLimitBytes",
            )

    def _replace(self, rows: pa.RecordBatch, keys: list[object], size: int) -> list[int]:
        """Add rows; returns the numbers of those that they replace."""
        if not keys:
            return []
        first, self._next_number = self._next_number, self._next_number + len(keys)
        old = [number for number in map(self._index.get, keys) if number is not None]
        self._index.update(zip(keys, range(first, self._next_number), strict=True))
        numbers = np.arange(first, self._next_number)
        self._chunks.append(_OpenChunk(rows, numbers, np.ones(len(keys), np.bool_), size))
        self._firsts.append(first)
        self._row_bytes += size
        return old

    def _remove(self, keys: list[object]) -> list[int]:
        """Take keys out of the index; returns the numbers of their rows."""
        pop = self._index.pop
        return [number for number in (pop(key, None) for key in keys) if number is not None]

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


def _merged(chunks: list[_OpenChunk]) -> list[_OpenChunk]:
    """Neighbours as one, without the rows that are gone; none where all are."""
    kept = [each for chunk in chunks for each in (chunk.kept() if chunk.gone_count else [chunk])]
    if not kept:
        return []
    rows = _concatenated([each.rows for each in kept])
    numbers = np.concatenate([each.numbers for each in kept])
    return [_OpenChunk(rows, numbers, np.concatenate([each.alive for each in kept]), rows.nbytes)]
