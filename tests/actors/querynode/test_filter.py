"""Filters against a row-by-row reference, and what a filter that cannot be used says."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.actors.querynode.filter import compile_filter
from tidewal.runtime.errors import InvalidFilter
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMA = CollectionSchema(
    "things",
    (
        Field("id", "int64"),
        Field("small", "int8", nullable=True),
        Field("big", "int64", nullable=True),
        Field("ratio", "float", nullable=True),
        Field("value", "double", nullable=True),
        Field("name", "varchar", nullable=True),
        Field("flag", "bool", nullable=True),
        Field("seen", "timestamp", nullable=True),
        Field("vector", "float_vector", dim=2),
    ),
    "id",
)
EPOCH = datetime(2013, 1, 1, tzinfo=UTC)
Row = dict[str, object]
Part = tuple[str, Callable[[Row], object]]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    full = [{"id": i, "vector": [0.0, 0.0], **row} for i, row in enumerate(rows)]
    return pa.RecordBatch.from_pylist(full, SCHEMA.arrow())


def selected(text: str, rows: list[Row]) -> list[int]:
    return [i for i, kept in enumerate(compile_filter(text, SCHEMA).mask(batch_of(rows))) if kept]


# ---- a reference that thinks in rows --------------------------------------------------------------------------------


def known(function: Callable[..., object]) -> Callable[..., object]:
    return lambda *values: None if any(value is None for value in values) else function(*values)


def truncated(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int | None:
    quotient = truncated(a, b)
    return None if quotient is None else a - quotient * b


ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": truncated, "%": remainder}
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def constant(value: object) -> Callable[[Row], object]:
    return lambda row: value


def get(name: str) -> Callable[[Row], object]:
    return lambda row: row[name]


def apply(function: Callable[..., object], *parts: Callable[[Row], object]) -> Callable[[Row], object]:
    return lambda row: known(function)(*(part(row) for part in parts))


def quoted(text: str, quote: str) -> str:
    escaped = text.replace("\\", "\\\\").replace(quote, "\\" + quote).replace("\n", "\\n")
    return quote + escaped + quote


def like_regex(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"%": ".*", "_": "."}.get(c, re.escape(c)) for c in pattern), re.DOTALL)


texts = st.text("ab%_'\"\n é", max_size=4)
ints = st.integers(-5, 5)
numbers: st.SearchStrategy[Part] = st.recursive(
    st.one_of(
        st.sampled_from(["small", "big"]).map(lambda name: (name, get(name))),
        ints.map(lambda n: (str(n), constant(n))),
    ),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/%"), inner)
        .filter(lambda t: not (t[1] in "/%" and re.fullmatch(r"[-( ]*0\)*", t[2][0])))
        .map(lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", apply(ARITHMETIC[t[1]], t[0][1], t[2][1])))
    ),
    max_leaves=4,
)
floats: st.SearchStrategy[Part] = st.one_of(
    st.sampled_from(["value", "ratio"]).map(lambda name: (name, get(name))),
    st.sampled_from([-1.5, 0.0, 0.25, 2.0]).map(lambda x: (str(x), constant(x))),
    numbers,
)
strings: st.SearchStrategy[Part] = st.one_of(
    st.just(("name", get("name"))),
    st.tuples(texts, st.sampled_from("'\"")).map(lambda t: (quoted(*t), constant(t[0]))),
)
times: st.SearchStrategy[Part] = st.integers(0, 3).map(
    lambda days: (f'"{(EPOCH + timedelta(days)).isoformat()}"', constant(EPOCH + timedelta(days)))
)


def comparison(left: Part, sign: str, right: Part) -> Part:
    return f"{left[0]} {sign} {right[0]}", apply(COMPARE[sign], left[1], right[1])


def chained(a: Part, first: str, b: Part, second: str, c: Part) -> Part:
    parts = apply(COMPARE[first], a[1], b[1]), apply(COMPARE[second], b[1], c[1])
    return f"{a[0]} {first} {b[0]} {second} {c[0]}", lambda row: kleene_and(parts[0](row), parts[1](row))


def membership(part: Part, items: list[Part], negated: bool) -> Part:
    values = [item[1]({}) for item in items]
    word = "not in" if negated else "in"
    text = f"{part[0]} {word} [{', '.join(item[0] for item in items)}]"
    return text, apply(lambda value: (value in values) != negated, part[1])


def matching(part: Part, pattern: str) -> Part:
    regex = like_regex(pattern)
    return f"{part[0]} like {quoted(pattern, chr(34))}", apply(lambda s: regex.fullmatch(s) is not None, part[1])


def nullness(name: str, negated: bool) -> Part:
    return f"{name} is {'not ' if negated else ''}null", lambda row: (row[name] is None) != negated


def kleene_and(a: object, b: object) -> object:
    return False if a is False or b is False else None if a is None or b is None else True


def kleene_or(a: object, b: object) -> object:
    return True if a is True or b is True else None if a is None or b is None else False


signs = st.sampled_from(list(COMPARE))
literal_ints = ints.map(lambda n: (str(n), constant(n)))
literal_texts = texts.map(lambda text: (quoted(text, '"'), constant(text)))
conditions: st.SearchStrategy[Part] = st.recursive(
    st.one_of(
        st.builds(comparison, floats, signs, floats),
        st.builds(chained, numbers, signs, floats, signs, numbers),
        st.builds(comparison, strings, signs, strings),
        st.builds(comparison, st.just(("seen", get("seen"))), signs, times),
        st.builds(membership, numbers, st.lists(literal_ints, max_size=4), st.booleans()),
        st.builds(membership, strings, st.lists(literal_texts, max_size=4), st.booleans()),
        st.builds(matching, strings, texts),
        st.builds(nullness, st.sampled_from(["small", "value", "name", "flag", "seen"]), st.booleans()),
        st.just(("flag", get("flag"))),
        st.just(("flag == true", get("flag"))),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a: (f"not ({a[0]})", apply(operator.not_, a[1])), inner),
        st.builds(lambda a: (f"!({a[0]})", apply(operator.not_, a[1])), inner),
        st.builds(
            lambda a, word, b: (f"({a[0]}) {word} ({b[0]})", lambda row: kleene_and(a[1](row), b[1](row))),
            inner,
            st.sampled_from(["and", "&&", "AND"]),
            inner,
        ),
        st.builds(
            lambda a, word, b: (f"({a[0]} {word} {b[0]})", lambda row: kleene_or(a[1](row), b[1](row))),
            inner,
            st.sampled_from(["or", "||", "Or"]),
            inner,
        ),
    ),
    max_leaves=6,
)
rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "small": st.none() | ints,
            "big": st.none() | ints,
            "ratio": st.none() | st.sampled_from([-1.5, 0.0, 0.25, 2.0]),
            "value": st.none() | st.sampled_from([-1.5, 0.0, 0.25, 2.0]),
            "name": st.none() | texts,
            "flag": st.none() | st.booleans(),
            "seen": st.none() | st.integers(0, 3).map(lambda days: EPOCH + timedelta(days)),
        }
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(conditions, rows_strategy)
def test_equals_the_row_by_row_reference(condition: Part, rows: list[Row]) -> None:
    text, reference = condition
    assert selected(text, rows) == [i for i, row in enumerate(rows) if reference(row) is True]


# ---- by hand --------------------------------------------------------------------------------------------------------

ROWS: list[Row] = [
    {"small": 1, "big": 2**62, "ratio": 0.1, "value": 0.1, "name": "100%", "flag": True, "seen": EPOCH},
    {"small": -7, "big": -(2**63), "ratio": 2.5, "value": 1e300, "name": "100x", "flag": False},
    {"small": None, "big": None, "ratio": None, "value": None, "name": None, "flag": None},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 < 2", [0, 1, 2]),
        ("not flag", [1]),
        ("flag != true", [1]),
        ("flag == flag or name is null", [0, 1, 2]),
        ("ratio == 0.1", [0]),
        ("ratio in [0.1, 7]", [0]),
        ("ratio in (0.1, 7)", [0]),
        ("value == 0.1", [0]),
        ("value > 1e299", [1]),
        ("big > 1.5", [0]),
        ("big == -9223372036854775808", [1]),
        ("small / 2 == -3", [1]),
        ("small % 4 == -3", [1]),
        ("big % -1 == 0", [0, 1]),
        ("small / (small - 1) == 0 or small == 1", [0, 1]),
        ("-small == 7", [1]),
        ("small in []", []),
        ("small not in []", [0, 1]),
        (r'name like "100\%"', [0]),
        ("name like '100_'", [0, 1]),
        ("name not like '%x'", [0]),
        ('seen == "2013-01-01"', [0]),
        ('seen < "2013-01-01T01:00:00+02:00"', []),
        ('seen in ["2013-01-01T00:00:00Z"]', [0]),
        ('"2012-12-31" < seen < "2013-01-02"', [0]),
        ("not (small > 0 and flag)", [1]),
        ("small > 0 AND flag OR name IS NULL", [0, 2]),
        ("vector is not null", [0, 1, 2]),
        ("(small > 0) == flag", [0, 1]),
    ],
)
def test_meaning(text: str, expected: list[int]) -> None:
    assert selected(text, ROWS) == expected


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 0, "expected"),
        ("small >", 7, "found the end, expected .*a number"),
        ("small = 1", 6, "expected .*a comparison.*; did you mean ==?"),
        ("small == 1 small", 11, "the end"),
        ("small > 1 and and flag", 14, "expected"),
        ('name == "abc', 8, "expected .*a string"),
        ("(small == 1", 11, r"expected \)"),
        ("small in 5", 9, r"expected \(, \["),
        ("small in [big]", 10, "a number"),
        ("small in ()", 10, "a number"),
        ('small["a"] == 1', 0, "columns have no members"),
        ("smal > 1", 0, "no column 'smal'; did you mean 'small'"),
        ("name > 5", 7, "integer cannot be compared with a string"),
        ("5 < name", 0, "integer cannot be compared with a string"),
        ("small in [1, 'x']", 13, "string cannot be compared"),
        ("small + name > 1", 8, "number is needed"),
        ("small and flag", 0, "condition is needed"),
        ("not small", 4, "condition is needed"),
        ("small + 1", 0, "condition is needed"),
        ("value % 2 == 1", 8, "integers only"),
        ("small / 0 == 1", 8, "division by zero"),
        ("small == 9223372036854775808", 9, "64 bits"),
        ("small == " + "9" * 30, 9, "64 bits"),
        ("flag < true", 7, "no order"),
        ("seen > 'yesterday'", 7, "ISO 8601"),
        ("seen > 5", 7, "cannot be compared"),
        ("small like 'x'", 0, "like works on strings"),
        ("vector == 1", 0, "vectors cannot"),
        ("big * 4 > 0", 6, "overflow"),
        ("__import__('os').system('true')", 10, "expected"),
    ],
)
def test_errors_say_where_and_what(text: str, position: int, message: str) -> None:
    with pytest.raises(InvalidFilter, match=message) as caught:
        selected(text, ROWS)
    assert caught.value.position == position


# ---- strings --------------------------------------------------------------------------------------------------------


@given(st.text(), st.booleans())
def test_a_string_of_json_is_that_string(text: str, ascii: bool) -> None:
    rows: list[Row] = [{"name": text}, {"name": text + "x"}]
    assert selected(f"name == {json.dumps(text, ensure_ascii=ascii)}", rows) == [0]
    assert selected(f"name in [{json.dumps(text, ensure_ascii=ascii)}]", rows) == [0]


def test_every_escape_means_what_it_says() -> None:
    assert selected(
        r"""name == '\"\'\\\/\b\f\n\r\t\u00e9\u00E9\ud83d\ude00'""", [{"name": "\"'\\/\b\f\n\r\té" + "é😀"}]
    ) == [0]


def test_a_pattern_has_escapes_of_its_own() -> None:
    rows: list[Row] = [{"name": name} for name in ("100%", "100x", "a_b", "axb", "\\", "é%", "\n")]
    assert selected(r'name like "100\%"', rows) == [0]
    assert selected(r'name like "a\_b"', rows) == [2]
    assert selected(r'name like "\\\\"', rows) == [4]
    assert selected(r'name like "\u00e9\%"', rows) == [5]
    assert selected(r'name like "\n"', rows) == [6]


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        (r'name == "a\q"', 10, r"\\q is no escape"),
        (r'name == "\x41"', 9, r"\\x is no escape"),
        (r'name == "\u12"', 9, r"\\u is no escape"),
        (r'name == "\U0001F600"', 9, r"\\U is no escape"),
        (r'name == "100\%"', 12, r"\\% is no escape"),
        (r'name like "%\q"', 12, r"\\q is no escape"),
        (r'name in ["a", "\d"]', 15, r"\\d is no escape"),
        ('name == "\\\n"', 9, "is no escape"),
        (r'name == "\ud83d"', 8, "half a character"),
        (r'name == "\ude00\ud83d"', 8, "half a character"),
    ],
)
def test_an_escape_that_there_is_not_is_named(text: str, position: int, message: str) -> None:
    with pytest.raises(InvalidFilter, match=message) as caught:
        selected(text, ROWS)
    assert caught.value.position == position


@pytest.mark.parametrize("text", ["not " * 300 + "flag", "- " * 300 + "small > 1", "small" + " + 1" * 300 + " > 1"])
def test_deep_nesting_is_an_error_with_a_name(text: str) -> None:
    with pytest.raises(InvalidFilter, match="MAX_FILTER_DEPTH"):
        compile_filter(text, SCHEMA)


@pytest.mark.slow
def test_the_largest_filters_do_not_exhaust_the_stack() -> None:
    assert selected("(" * 30_000 + "flag" + ")" * 30_000, ROWS) == [0]
    assert selected("flag" + " or flag" * 8_000, ROWS) == [0]
    assert selected("small in [" + "1," * 30_000 + "]", ROWS) == [0]
    assert selected("not " * 255 + "flag", ROWS) == [1]
    with pytest.raises(InvalidFilter, match="MAX_FILTER_LENGTH"):
        compile_filter("flag" + " " * 65_536, SCHEMA)


def test_filters_know_their_columns_and_are_kept() -> None:
    compiled = compile_filter("small > 1 and name is null", SCHEMA)
    assert compiled.columns == {"small", "name"}
    assert compile_filter("small > 1 and name is null", SCHEMA) is compiled


def test_tables_and_empty_batches() -> None:
    table = pa.Table.from_batches([batch_of(ROWS), batch_of(ROWS)])
    assert compile_filter("small == 1", SCHEMA).mask(table).tolist() == [True, False, False] * 2
    assert selected("small == 1 or name in ['x']", []) == []


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text("abflagsmvue ()[]<>=!&|+-*/%'\"\\.,0123456789nditolk", max_size=40))
def test_any_text_compiles_or_is_an_invalid_filter(text: str) -> None:
    try:
        compile_filter(text, SCHEMA).mask(batch_of(ROWS))
    except InvalidFilter as error:
        assert 0 <= error.position <= len(text)  # noqa: PT017 -- both outcomes are right
