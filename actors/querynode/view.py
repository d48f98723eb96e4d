"""What the rows of a shard look like at one moment: chunks of columns, and which of their rows are current.

A view answers queries chunk by chunk, reading only the columns a query needs. A live view (`RowStore.view`) is
valid until the next change; a snapshot (`RowStore.snapshot`) never changes, so a worker thread may take its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.errors import InvalidFilter, InvalidRequest
from ...runtime.nearest import nearest
from ...runtime.rows.schema import CollectionSchema
from .filter import Filter

Direction: TypeAlias = Literal["ascending", "descending"]
SortKey: TypeAlias = tuple[str, Direction]
Mask: TypeAlias = npt.NDArray[np.bool_]


class OrderBy(NamedTuple):
    """One column to sort by; nulls come last either way."""

    column: str
    ascending: bool = True


class RowChunk(NamedTuple):
    """Some rows and which of them are current."""

    rows: pa.RecordBatch
    alive: Mask


@dataclass(frozen=True, slots=True)
class ShardView:
    """The rows of one shard."""

    schema: CollectionSchema
    chunks: tuple[RowChunk, ...]

    def selected(self, where: Filter | None) -> Iterator[tuple[pa.RecordBatch, Mask]]:
        """Each chunk with the mask of its current rows for which the filter holds."""
        for rows, alive in self.chunks:
            yield rows, alive if where is None else _holding(where, rows, alive)

    def count(self, where: Filter | None = None) -> int:
        """How many rows the filter holds for."""
        return sum(int(np.count_nonzero(mask)) for _, mask in self.selected(where))

    def rows(self, where: Filter | None, columns: list[str], keys: list[SortKey], limit: int | None) -> pa.Table:
        """The `columns` of the rows the filter holds for, in no order. With a `limit` only rows that may be among the
        first `limit` in the order of `keys`; without keys any rows, `limit` of them at least."""
        parts: list[pa.RecordBatch] = []
        found = 0
        for rows, mask in self.selected(where):
            if limit is not None and not keys and found >= limit:
                break
            positions = np.flatnonzero(mask)
            if limit is not None:
                positions = _foremost(rows, positions, keys, limit)
            if len(positions):
                parts.append(_gather(rows.select(columns), positions))
                found += len(positions)
        return pa.Table.from_batches(parts, self.schema.arrow_of(columns))


def _holding(where: Filter, rows: pa.RecordBatch, alive: Mask) -> Mask:
    """The mask of the living rows that the filter holds for. The filter is computed over dead rows too, which is
    cheaper than leaving them out; so an overflow counts only where living rows have it, too."""
    try:
        return alive & where.mask(rows)
    except InvalidFilter:
        living = np.flatnonzero(alive)
        mask = np.zeros_like(alive)
        mask[living] = where.mask(rows.take(indices_of(living)))
        return mask


def checked_columns(schema: CollectionSchema, columns: Sequence[str] | None) -> list[str]:
    """The names of the columns asked for, all fields by default. Raises `InvalidRequest` for an unknown one, and for
    none at all: a result without columns could not say how many rows there are."""
    if columns is None:
        return [field.name for field in schema.fields]
    if not columns:
        raise InvalidRequest("name one column at least, or leave columns out; to count rows, use count")
    for name in columns:
        if schema.find(name) is None:
            near = nearest(name, (each.name for each in schema.fields))
            raise InvalidRequest(f"collection {schema.name!r} has no column {name!r}{near}")
    return list(dict.fromkeys(columns))


def check_order(schema: CollectionSchema, order_by: Sequence[OrderBy]) -> None:
    """Raise `InvalidRequest` for a column that is unknown or has no order."""
    if order_by:
        checked_columns(schema, [name for name, _ in order_by])
    for name, _ in order_by:
        field = schema.find(name)
        if field is not None and field.type == "float_vector":
            raise InvalidRequest(f"rows cannot be sorted by the vector {name!r}")


def check_limit(limit: int | None) -> None:
    """Raise `InvalidRequest` for a negative limit."""
    if limit is not None and limit < 0:
        raise InvalidRequest(f"a limit cannot be negative: {limit}")


def sort_keys(schema: CollectionSchema, order_by: Sequence[OrderBy]) -> list[SortKey]:
    """Arrow's sort keys, the primary key last, so that ties have one order."""
    if not order_by:
        return []
    keys: dict[str, Direction] = {}
    for name, ascending in order_by:
        keys.setdefault(name, "ascending" if ascending else "descending")
    keys.setdefault(schema.primary_key, "ascending")
    return list(keys.items())


def indices_of(positions: npt.NDArray[np.integer[Any]]) -> pa.Int64Array:
    """Positions as `take` wants them."""
    return cast(pa.Int64Array, pa.array(positions))


def ordered(table: pa.Table, keys: list[SortKey], limit: int | None) -> pa.Table:
    """The table sorted by `keys` (as it is without any), cut at `limit`."""
    if keys and table.num_rows > 1:
        table = table.take(pc.sort_indices(table, sort_keys=keys))
    return table if limit is None else table.slice(0, min(limit, table.num_rows))  # Arrow takes no limit above 2^63


def _foremost(
    rows: pa.RecordBatch, positions: npt.NDArray[np.intp], keys: list[SortKey], limit: int
) -> npt.NDArray[np.intp]:
    """At most `limit` of the positions, those that sort first."""
    if not keys or len(positions) <= limit:
        return positions[:limit]
    sortable = _gather(rows.select([name for name, _ in keys]), positions)
    order = pc.sort_indices(sortable, sort_keys=keys)
    return positions[order.slice(0, limit).to_numpy(zero_copy_only=False)]


def _gather(rows: pa.RecordBatch, positions: npt.NDArray[np.intp]) -> pa.RecordBatch:
    return rows if len(positions) == rows.num_rows and _in_order(positions) else rows.take(indices_of(positions))


def _in_order(positions: npt.NDArray[np.intp]) -> bool:
    return bool((positions[1:] > positions[:-1]).all())
