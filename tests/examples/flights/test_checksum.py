"""The checksum: blind to order and to how a reader stores a value, and to nothing else."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.flights.checksum import checksum, row_hashes

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("x", pa.float64()), ("at", pa.timestamp("us", "UTC")), ("on", pa.bool_())]
)
ROWS = st.fixed_dictionaries(
    {
        "id": st.none() | st.text(max_size=5),
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "x": st.none() | st.floats(allow_nan=False),
        "at": st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 -- bounds are naive
        "on": st.none() | st.booleans(),
    }
)


def one(value: object, kind: pa.DataType) -> int:
    return checksum(pa.table({"column": pa.array([value], kind)}))


@given(st.lists(ROWS, max_size=8), st.randoms(use_true_random=False))
def test_order_of_rows_columns_and_chunks_does_not_matter(
    rows: list[dict[str, object]], shuffler: random.Random
) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    shuffled = shuffler.sample(rows, len(rows))
    names = shuffler.sample(SCHEMA.names, len(SCHEMA.names))
    cut = shuffler.randint(0, len(rows))
    parts = [pa.Table.from_pylist(part, schema=SCHEMA).select(names) for part in (shuffled[:cut], shuffled[cut:])]
    assert checksum(pa.concat_tables(parts)) == checksum(table)


@given(ROWS, ROWS)
def test_rows_hash_alike_only_when_equal(left: dict[str, object], right: dict[str, object]) -> None:
    hashes = row_hashes(pa.Table.from_pylist([left, right], schema=SCHEMA))
    assert (hashes[0] == hashes[1]) == (left == right)


def test_every_column_of_the_flights_counts(every_event: pa.Table) -> None:
    rows = every_event.slice(400_000, 500).drop_columns(["_op"])
    before = checksum(rows)
    for index, field in enumerate(rows.schema):
        column = rows[field.name]
        present = column.drop_null()[0]
        other = {pa.string(): "another", pa.int64(): -1, pa.float64(): -0.5}.get(
            field.type, datetime(1999, 1, 1, tzinfo=UTC)
        )
        changed = pc.if_else(pc.equal(column, present), pa.scalar(other, field.type), column)
        assert checksum(rows.set_column(index, field.name, changed)) != before, field.name
        assert checksum(rows.drop_columns([field.name])) != before, field.name
        assert (
            checksum(rows.rename_columns([f"{name}2" if name == field.name else name for name in rows.column_names]))
            != before
        ), field.name


def test_a_row_more_less_or_twice_counts(every_event: pa.Table) -> None:
    rows = every_event.slice(0, 100)
    sums = {checksum(rows), checksum(rows.slice(1)), checksum(pa.concat_tables([rows, rows.slice(0, 1)]))}
    assert len(sums) == 3
    assert checksum(rows.slice(0, 0)) == 0
    assert checksum(pa.concat_tables([rows.slice(0, 40), rows.slice(40)])) == checksum(rows)


def test_swapping_values_between_columns_or_rows_counts() -> None:
    straight = pa.table({"a": ["x", "p"], "b": ["y", "q"]})
    assert checksum(straight) != checksum(pa.table({"a": ["y", "q"], "b": ["x", "p"]}))
    assert checksum(straight) != checksum(pa.table({"a": ["x", "p"], "b": ["q", "y"]}))


def test_null_is_neither_zero_nor_empty() -> None:
    for kind, zero in [(pa.string(), ""), (pa.int64(), 0), (pa.float64(), 0.0), (pa.bool_(), False)]:
        assert one(None, kind) != one(zero, kind)
    assert one(None, pa.timestamp("us", "UTC")) != one(0, pa.timestamp("us", "UTC"))
    assert one("null", pa.string()) != one(None, pa.string())


def test_how_a_reader_stores_a_value_does_not_matter() -> None:
    assert one(7, pa.int64()) == one(7, pa.int32()) == one(7, pa.uint8())
    assert one(1.5, pa.float64()) == one(1.5, pa.float32())
    assert one(0.0, pa.float64()) == one(-0.0, pa.float64())
    assert one("Ω", pa.string()) == one("Ω", pa.large_string()) == one("Ω", pa.string_view())
    assert one("Ω", pa.string()) == one("Ω", pa.dictionary(pa.int32(), pa.string()))
    moment = datetime(2013, 7, 4, 12, 30, tzinfo=UTC)
    stamps = [pa.timestamp("us", "UTC"), pa.timestamp("us", "America/New_York"), pa.timestamp("ns"), pa.timestamp("s")]
    assert len({one(moment, kind) for kind in stamps}) == 1
    assert one(None, pa.null()) == one(None, pa.string()) == one(None, pa.int64())
    assert one(float("nan"), pa.float64()) == one(None, pa.float64())


def test_a_detour_through_pandas_does_not_matter(every_event: pa.Table) -> None:
    pytest.importorskip("pandas")
    rows = every_event.slice(0, 5_000).drop_columns(["_op"])
    frame = rows.to_pandas()
    for name in ("scheduled", "event_time"):
        frame[name] = frame[name].dt.tz_localize(None)  # as Spark's toPandas gives them in a session that runs on UTC
    assert checksum(pa.Table.from_pandas(frame, preserve_index=False)) == checksum(rows)


def test_the_columns_of_the_log_are_left_out() -> None:
    rows = pa.table({"id": ["a", "b"]})
    assert checksum(rows.append_column("_ts", pa.array([1, 2]))) == checksum(rows)


def test_a_type_without_canonical_form_is_refused() -> None:
    with pytest.raises(TypeError, match="'column'"):
        one([1.0], pa.list_(pa.float32()))
