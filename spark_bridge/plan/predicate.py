"""The rows that a batch read asks for between its begin and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.clock import MAX_TIMESTAMP

COMPARISONS: Final[dict[str, Callable[..., Any]]] = {
    "EqualTo": pc.equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
}


class Condition(NamedTuple):
    """A column (its name, or the names on the way into a struct) stands in relation `operator` (a name of Spark's
    filters) to one of `values`."""

    column: tuple[str, ...]
    operator: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Predicate:
    """The requested rows: those with timestamps from `first_ts` to `last_ts` that meet all `conditions`."""

    conditions: tuple[Condition, ...] = ()
    first_ts: int = 0
    last_ts: int = MAX_TIMESTAMP

    def values(self, column: str) -> frozenset[Any] | None:
        """The requested values of `column`; None: all."""
        equal = (each for each in self.conditions if each.column == (column,) and each.operator == "EqualTo")
        found = [frozenset[Any](each.values) for each in equal]
        return found[0].intersection(*found[1:]) if found else None

    def filtered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of `batches` that meet all conditions."""
        for batch in batches:
            for condition in self.conditions:
                batch = batch.filter(_mask(batch, condition))
            if batch.num_rows:
                yield batch


def _mask(batch: pa.RecordBatch, condition: Condition) -> Any:
    column = cast("pa.Array[Any]", batch.column(condition.column[0]))
    for name in condition.column[1:]:
        column = cast("pa.Array[Any]", pc.struct_field(column, [name]))
    values = cast("pa.Array[Any]", pa.array(condition.values, column.type))
    if len(values) == 1:
        return COMPARISONS[condition.operator](column, values[0])
    return pc.is_in(column, value_set=values)


EVERYTHING: Final = Predicate()
