"""The parameters of a filter: each value comes back as it was, and none changes what the filter says."""

from __future__ import annotations

import enum
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.actors.querynode.filter import compile_filter
from tidewal.actors.querynode.filter_params import parameters_named, with_values
from tidewal.runtime.errors import InvalidFilter
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema(
    "things",
    (
        Field("id", "int64"),
        Field("name", "varchar", nullable=True),
        Field("value", "double", nullable=True),
        Field("flag", "bool", nullable=True),
        Field("seen", "timestamp", nullable=True),
    ),
    "id",
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\"'\\{}%_\n\x00 "))
INTEGERS = st.integers(-(2**63), 2**63 - 1)


class Color(enum.StrEnum):
    RED = "red"


def found(filter: str, rows: list[dict[str, Any]], **params: Any) -> list[int]:
    """The indices of the rows that the filter holds for."""
    batch = pa.RecordBatch.from_pylist([{"id": 0, **row} for row in rows], SCHEMA.arrow())
    filled = with_values(filter, params)
    assert filled is not None
    return np.flatnonzero(compile_filter(filled, SCHEMA).mask(batch)).tolist()


# ---- any value is itself --------------------------------------------------------------------------------------------


@given(TEXTS, TEXTS)
def test_a_text_is_equal_to_itself_only(text: str, other: str) -> None:
    rows = [{"name": text}, {"name": other}, {"name": text + "x"}, {"name": None}]
    assert found("name == {text}", rows, text=text) == [0, 1][: 1 + (text == other)]


@given(
    TEXTS, st.sampled_from(["name == {a} and id == {b}", "id == {b} and name in [{a}]", "not (name != {a})and{b}==id"])
)
def test_a_text_changes_nothing_behind_it(text: str, filter: str) -> None:
    rows: list[dict[str, Any]] = [{"name": text, "id": 1}, {"name": text, "id": 2}, {"name": text + "'\"", "id": 1}]
    assert found(filter, rows, a=text, b=1) == [0]


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_a_list_of_texts_has_those_and_no_other(texts: list[str], other: str) -> None:
    rows = [{"name": text} for text in [*texts, other]]
    expected = [index for index, row in enumerate(rows) if row["name"] in texts]
    assert found("name in {texts}", rows, texts=texts) == expected


@given(INTEGERS, INTEGERS)
def test_an_integer_is_equal_to_itself_only(number: int, other: int) -> None:
    assert found("id == {number}", [{"id": number}, {"id": other}], number=number) == [0, 1][: 1 + (number == other)]
    assert found("id not in {numbers}", [{"id": number}], numbers=[number]) == []


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_a_float_is_equal_to_itself_only(number: float, other: float) -> None:
    rows = [{"value": number}, {"value": other}]
    assert found("value == {number}", rows, number=number) == [0, 1][: 1 + (number == other)]
    assert found("value in {numbers}", rows[:1], numbers=[number]) == [0]


def test_the_other_kinds_of_values() -> None:
    rows: list[dict[str, Any]] = [{"name": "red", "flag": True, "value": 0.5, "id": 7}, {"flag": False}]
    assert found("flag == {flag}", rows, flag=False) == [1]
    assert found("flag == {flag}", rows, flag=np.True_) == [0]
    assert found("name is {name}", rows, name=None) == [1]
    assert found("name IS NOT {name}", rows, name=None) == [0]
    assert found("name == {color}", rows, color=Color.RED) == [0]
    assert found("value == {value} and id == {id}", rows, value=np.float32(0.5), id=np.int8(7)) == [0]
    assert found("id in {ids}", rows, ids=np.array([7, 8])) == [0]
    assert found("id in {ids}", rows, ids=()) == []
    assert found("name like {pattern}", rows, pattern="r_%") == [0]
    assert found("id - {less} == {seven}", rows, less=-3, seven=10) == [0]


def test_one_parameter_may_stand_twice() -> None:
    assert found("id == {n} or value == {n}", [{"id": 1}, {"value": 1.0}, {"id": 2}], n=1) == [0, 1]


NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "time",
    [
        NOON,
        NOON.astimezone(timezone(timedelta(hours=2))),
        NOON.replace(tzinfo=None),
        np.datetime64("2020-01-01T12"),
        np.datetime64("2020-01-01T12:00:00.000000000"),
    ],
)
def test_a_time_is_that_moment(time: Any) -> None:
    rows = [{"seen": NOON}, {"seen": NOON + timedelta(microseconds=1)}]
    assert found("seen == {time}", rows, time=time) == [0]
    assert found("seen in {times}", rows, times=[time]) == [0]


def test_an_array_of_times_is_a_list_of_them() -> None:
    times = np.array(["2020-01-01T12"], "datetime64[ns]")
    assert found("seen in {times}", [{"seen": NOON}, {"seen": None}], times=times) == [0]


def test_a_date_is_its_midnight() -> None:
    assert found("seen > {day}", [{"seen": NOON}, {"seen": NOON - timedelta(days=1)}], day=NOON.date()) == [0]


def test_in_strings_braces_are_text() -> None:
    rows = [{"name": "{n}"}, {"name": "1"}, {"name": "a\"{n}'"}]
    assert found('name == "{n}"', rows) == [0]
    assert found("name == '{n}' and id != {n}", rows, n=1) == [0]
    assert found('name == "a\\"{n}\'"', rows) == [2]


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filter", "params", "parameter", "message"),
    [
        ("name == {page}", None, "page", "at 8: filter_params has no value of the parameter 'page'"),
        ("name == {page}", {"pages": "x"}, "page", "nearest known one is 'pages'"),
        ("name == 'x'", {"page": "x"}, "page", "does not use its parameter 'page'"),
        ("name == '{page}'", {"page": "x"}, "page", "outside of quotes"),
        (None, {"page": "x"}, "page", "does not use"),
        ("name == {page}", {"page": None}, "page", "null is equal to nothing"),
        ("name in {page}", {"page": ["a", None]}, "page", "has a value of NoneType"),
        ("name == {page}", {"page": b"x"}, "page", "is a value of bytes"),
        ("name == {page}", {"page": {"a": 1}}, "page", "is a value of dict"),
        ("name == {page}", {"page": object()}, "page", "is a value of object"),
        ("name in {page}", {"page": [["a"]]}, "page", "has a value of list"),
        ("id in {page}", {"page": np.ones((2, 2))}, "page", "has a value of list"),
        ("name == {page}", {"page": "\ud800"}, "page", "lone surrogate"),
        ("id == {page}", {"page": 2**63}, "page", "64 bits"),
        ("value == {page}", {"page": float("nan")}, "page", "NaN"),
    ],
)
def test_an_error_names_the_parameter(
    filter: str | None, params: dict[str, object] | None, parameter: str, message: str
) -> None:
    with pytest.raises(InvalidFilter, match=message) as caught:
        with_values(filter, params)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("filter", "params", "parameter"),
    [
        ("id == {x}", {"x": "2"}, "x"),
        ("{x} == id", {"x": "2"}, "x"),
        ("name == {long} and id in {x}", {"long": "a long text", "x": ["2"]}, "x"),
        ("seen > {x}", {"x": "yesterday"}, "x"),
        ("name == {x} and id == '2'", {"x": "2"}, None),
        ("name == '{x}' and nme == {x}", {"x": "2"}, None),
    ],
)
def test_what_does_not_fit_the_schema_is_told_of_its_parameter(
    filter: str, params: dict[str, object], parameter: str | None
) -> None:
    filled = with_values(filter, params)
    assert filled is not None
    with pytest.raises(InvalidFilter) as caught, parameters_named(filter, params):
        compile_filter(filled, SCHEMA)
    assert caught.value.parameter == parameter
    assert caught.value.position is not None
    assert (f"(the value of the parameter {parameter!r})" in caught.value.message) is (parameter is not None)


@pytest.mark.parametrize("filter", ["name == {}", "name == {a b}", "name == {1}", "name == {{n}}", "name == {0.name}"])
def test_what_is_no_name_is_no_parameter(filter: str) -> None:
    with pytest.raises(InvalidFilter):
        found(filter, [], n=1)


@pytest.mark.parametrize(
    "filter", ['name == "{text}', "name == '{text}", 'name == "{text} \\', "name == '\\{text}\\'\n"]
)
def test_no_value_comes_into_a_string_that_does_not_end(filter: str) -> None:
    with pytest.raises(InvalidFilter, match="does not use"):
        with_values(filter, {"text": " or 1 == 1 or name == "})


@pytest.mark.parametrize("filter", ["id == {a}{b}", "id == 1{a}", "id == {a}e{b}", "id in [{list}]", "id == {list}"])
def test_values_do_not_grow_together(filter: str) -> None:
    params = {"a": 1, "b": 2, "list": [1]}
    with pytest.raises(InvalidFilter):
        found(filter, [], **{name: value for name, value in params.items() if f"{{{name}}}" in filter})
