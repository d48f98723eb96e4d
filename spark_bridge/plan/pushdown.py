"""Filters of batch reads that Spark hands down (option `pushFilters`): which part of the log need not be read, and
which rows need not reach Spark.

Comparisons of whole numbers, text and bytes are final here. Those of times only limit what is read: Spark applies them
again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final, cast

from pyspark.sql import datasource as spark
from pyspark.sql.types import BinaryType, DataType, IntegralType, StringType, StructType

from ...runtime.clock import LOGICAL_BITS, MAX_TIMESTAMP
from .predicate import COMPARISONS, Condition, Predicate

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_TIMES: Final = (("_time",), ("timestamp",))  # of a row's log time
_MOST: Final = 1000  # values of one filter


def take(filters: Sequence[spark.Filter], schema: StructType) -> tuple[Predicate, list[spark.Filter]]:
    """The predicate of `filters` on a read of `schema`, and the filters that Spark has to apply itself."""
    conditions: list[Condition] = []
    left: list[spark.Filter] = []
    first, last = 0, MAX_TIMESTAMP
    for each in filters:
        condition = _condition(each)
        if condition is None:
            left.append(each)
            continue
        bounds = _bounds(condition)
        first, last = max(first, bounds[0]), min(last, bounds[1])
        if _is_exact(condition, _kind(condition.column, schema)):
            conditions.append(condition)
        else:
            left.append(each)
    return Predicate(tuple(conditions), first, last), left


def _condition(each: spark.Filter) -> Condition | None:
    """A filter on one column, compared with values that are not null."""
    name = type(each).__name__
    if isinstance(each, spark.In):
        values = tuple(value for value in each.value if value is not None)  # null equals nothing
        return Condition(each.attribute, "EqualTo", values) if values else None
    if name not in COMPARISONS:
        return None
    comparison = cast("spark.EqualTo", each)
    return None if comparison.value is None else Condition(comparison.attribute, name, (comparison.value,))


def _kind(column: Sequence[str], schema: StructType) -> DataType | None:
    """The type of a column, or of what lies in a struct; None when there is none."""
    kind: DataType = schema
    for name in column:
        if not isinstance(kind, StructType) or name not in kind.names:
            return None
        kind = kind[name].dataType
    return kind


def _is_exact(condition: Condition, kind: DataType | None) -> bool:
    """Whether Arrow compares as Spark does."""
    if len(condition.values) > _MOST:
        return False
    if isinstance(kind, IntegralType):
        return all(type(value) is int and -(1 << 63) <= value < 1 << 63 for value in condition.values)
    of_type = str if isinstance(kind, StringType) and kind.isUTF8BinaryCollation() else bytes
    if not isinstance(kind, StringType | BinaryType) or condition.operator != "EqualTo":
        return False
    return all(isinstance(value, of_type) for value in condition.values)


def _bounds(condition: Condition) -> tuple[int, int]:
    """The timestamps between which the rows lie that meet a condition."""
    if condition.column == ("_ts",) and all(type(value) is int for value in condition.values):
        low, high = min(condition.values), max(condition.values)
    elif condition.column in _TIMES and all(_is_time(value) for value in condition.values):
        # A millisecond more on either side, for a time that was rounded on its way.
        low = (_milliseconds(min(condition.values)) - 1) << LOGICAL_BITS
        high = (_milliseconds(max(condition.values)) + 2) << LOGICAL_BITS
    else:
        return 0, MAX_TIMESTAMP
    match condition.operator:
        case "EqualTo":
            return low, high
        case "GreaterThan" | "GreaterThanOrEqual":
            return low, MAX_TIMESTAMP
        case _:
            return 0, high


def _is_time(value: object) -> bool:
    return isinstance(value, datetime.datetime) and value.tzinfo is not None


def _milliseconds(time: datetime.datetime) -> int:
    return (time - _EPOCH) // datetime.timedelta(milliseconds=1)
