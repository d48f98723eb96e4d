"""Filters of subscriptions: what an expression says of a record's tags and header, with three values."""

from __future__ import annotations

import math
import operator
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.errors import InvalidFilter
from tidewal.runtime.filters.evaluation import MAX_RECORD_FILTER_DEPTH
from tidewal.runtime.filters.grammar import quote
from tidewal.runtime.filters.record_filter import MAX_RECORD_FILTER_LENGTH, compile_record_filter
from tidewal.runtime.log.record import BatchPart, Record, RecordType, decode, encode, header_of, read_header


def passes(where: str, **tags: Any) -> bool:
    return compile_record_filter(where).passes(Record(RecordType.ROWS, tags=tags))


@pytest.mark.parametrize(
    "where",
    [
        'tag in ("a", "b") and priority > 3',
        'tag in ["a"] and 3 < priority <= 7',
        'tag == "x" or priority == 4.0',
        'not (tag == "b") and not tag like "b%"',
        'tags["content-type"] == "text/plain" and tag like "_"',
        "absent is null and tag is not null and raw is null",
        'utf == "é" and ratio * 4 == 2 and priority / 3 == 1 and -priority % 3 == -1',
        "urgent and urgent == true and not (urgent != true)",
        '"a" == tag and 3 < priority',
        "priority + 1 == priority - -1 and ratio in (1, 0.5)",
    ],
)
def test_it_holds(where: str):
    tags = {"tag": "a", "priority": 4, "urgent": True, "ratio": 0.5, "utf": "é".encode(), "raw": b"\xff"}
    assert passes(where, **tags, **{"content-type": "text/plain"})


@pytest.mark.parametrize("negated", ["", "not "])
@pytest.mark.parametrize(
    "where",
    [
        "absent == 1",
        'priority == "4"',
        "tag > 3",
        "tag",
        "urgent == 1",
        "urgent < other",
        "nan == nan",
        "nan in (1.0)",
        "priority / zero == 1",
        "ratio % 2 == 0",
        "huge * huge > 0",
        'raw like "%"',
        "nothing == nothing",
        "tag + 1 > 0",
        'absent in ("a") or tag == "b"',
        'absent == 1 and tag == "a"',
    ],
)
def test_what_is_missing_or_of_another_type_is_unknown_and_does_not_pass(where: str, negated: str):
    tags = {"tag": "a", "priority": 4, "urgent": True, "other": False, "nan": math.nan, "zero": 0, "ratio": 0.5}
    assert not passes(f"{negated}({where})", **tags, huge=2**62, raw=b"\xff", nothing=None)


def test_the_known_decides_beside_the_unknown():
    assert passes('absent == 1 or tag == "a"', tag="a")
    assert passes('not (absent == 1 and tag == "b")', tag="a")


def test_fields_of_the_header_bear_an_underscore():
    record = Record(
        RecordType.ROWS, ts=7, term=3, cseq=9, producer="p", pseq=4, vchannel="v", key=b"k\xc3\xa9", trace="t"
    )
    where = (
        '_type == "ROWS" and _ts == 7 and _term == 3 and _cseq == 9 and _producer == "p" and _pseq == 4 and '
        '_vchannel == "v" and _key == "ké" and _trace == "t" and _schema_version == 0'
    )
    assert compile_record_filter(where).passes(record)
    bare = Record(RecordType.ROWS, key=b"\xff")
    for name in ("_producer", "_vchannel", "_key", "_trace"):
        assert compile_record_filter(f"{name} is null").passes(bare)
    assert compile_record_filter("_key is null").passes(Record(RecordType.ROWS))


def test_control_records_always_pass():
    never = compile_record_filter("false")
    for kind in (RecordType.TIME_TICK, RecordType.FENCE, RecordType.FLUSH, RecordType.DROP_COLLECTION):
        assert never.passes(Record(kind))
    assert not never.passes(Record(RecordType.ROWS))
    assert not never.passes(Record(RecordType.DEAD_LETTER))


@pytest.mark.parametrize(
    ("where", "position", "message"),
    [
        ("tag = 3", 4, r"did you mean ==\?"),
        ("", 0, "the end"),
        ('tag == "a" and', 14, "the end"),
        ("_tys == 3", 0, "did you mean _ts"),
        ("_nothing == 3", 0, "there are .*_key"),
        ('_ts == "x"', 7, "a string cannot be compared with a number"),
        ("tag in (1, true)", 11, "a bool cannot be compared with a number"),
        ("priority + 1", 0, "a condition is needed, this is a number"),
        ('"a" + 1 == 2', 0, "a number is needed, this is a string"),
        ("true < urgent", 7, "bools have no order"),
        ("1 / 0 == 1", 4, "division by zero"),
        ('rows["a"] == 1', 0, r'only tags\["NAME"\]'),
        ("tag == 9223372036854775808", 7, "does not fit in 64 bits"),
        ("x + " * MAX_RECORD_FILTER_DEPTH + "x > 1", 0, "MAX_RECORD_FILTER_DEPTH"),
        ("x" * (MAX_RECORD_FILTER_LENGTH + 1), MAX_RECORD_FILTER_LENGTH, "MAX_RECORD_FILTER_LENGTH"),
    ],
)
def test_errors_say_where_and_what(where: str, position: int, message: str):
    with pytest.raises(InvalidFilter, match=message) as raised:
        compile_record_filter(where)
    assert raised.value.position == position


TEXTS = ["", "a", "ab", "a%b", "a_b", "\n", "é", "\\", "aab", "baab", "A"]
PATTERNS = ["a%", "%b", "%_%", "a\\%b", "a\\_b", "%\\\\%", "_%", "a__", "%a%b", "a%a%b", "%\n%", "%", "", "_"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_like_is_that_of_sql(pattern: str):
    model = "".join(
        ".*" if each == "%" else "." if each == "_" else re.escape(each[-1])
        for each in re.findall(r"\\[%_\\]|.", pattern, re.DOTALL)
    )
    where = f"tag like {quote(pattern)}".replace("\\\\%", "\\%").replace("\\\\_", "\\_").replace("\n", "\\n")
    for text in TEXTS:
        assert passes(where, tag=text) is bool(re.fullmatch(model, text, re.DOTALL)), (where, text)


def test_no_pattern_takes_long():
    text, pattern = "a" * 50_000, "%a" * 100 + "%b"
    began_s = time.process_time()
    assert not passes(f'tag like "{pattern}"', tag=text)
    assert time.process_time() - began_s < 5.0  # backtracking would take years


# ---- against a model -------------------------------------------------------------------------------------------------

VALUES = [None, True, False, 0, 1, -3, 4, 2**62, 0.5, -0.0, 4.0, math.nan, math.inf, "", "a", "b", "4", b"a", b"\xff"]
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def known(value: Any) -> Any:
    """The value as an expression has it; None for unknown."""
    if isinstance(value, bytes):
        value = value.decode(errors="ignore") if value != b"\xff" else None
    return None if isinstance(value, float) and math.isnan(value) else value


def kind(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"


def compared(left: Any, symbol: str, right: Any) -> bool | None:
    left, right = known(left), known(right)
    if left is None or right is None or kind(left) != kind(right):
        return None
    return None if kind(left) == "bool" and symbol not in ("==", "!=") else COMPARE[symbol](left, right)


def negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def all_of(values: list[bool | None]) -> bool | None:
    return False if False in values else None if None in values else True


LITERALS = [("true", True), ("0", 0), ("-3", -3), ("4", 4), ("4.0", 4.0), ("0.5", 0.5), ('"a"', "a"), ('"4"', "4")]
LEAVES = st.one_of(
    st.tuples(st.just("compare"), st.sampled_from("xyz"), st.sampled_from(sorted(COMPARE)), st.sampled_from(LITERALS)),
    st.tuples(st.just("tags"), st.sampled_from("xyz"), st.sampled_from(sorted(COMPARE)), st.sampled_from("xyz")),
    st.tuples(st.just("in"), st.sampled_from("xyz"), st.booleans()),
    st.tuples(st.just("null"), st.sampled_from("xyz"), st.booleans()),
    st.tuples(st.just("bare"), st.sampled_from("xyz")),
)
TREES = st.recursive(
    LEAVES,
    lambda trees: st.one_of(
        st.tuples(st.just("not"), trees),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(trees, min_size=2, max_size=3)),
    ),
    max_leaves=6,
)


def text_of(tree: Any) -> str:
    match tree:
        case ("compare", name, symbol, (literal, value)):
            symbol = "==" if isinstance(value, bool) else symbol
            return f"{name} {symbol} {literal}" if symbol != "<" else f"{literal} > {name}"
        case ("tags", name, symbol, other):
            return f"{name} {symbol} {other}"
        case ("in", name, negative):
            return f"{name} {'not ' if negative else ''}in (4, 0, 0.5)"
        case ("null", name, negative):
            return f"{name} is {'not ' if negative else ''}null"
        case ("bare", name):
            return name
        case ("not", inner):
            return f"not ({text_of(inner)})"
        case (word, trees):
            return "(" + f" {word} ".join(f"({text_of(each)})" for each in trees) + ")"
    raise AssertionError(tree)


def value_of(tree: Any, tags: dict[str, Any]) -> bool | None:
    match tree:
        case ("compare", name, symbol, (_, value)):
            return compared(tags.get(name), "==" if isinstance(value, bool) else symbol, value)
        case ("tags", name, symbol, other):
            return compared(tags.get(name), symbol, tags.get(other))
        case ("in", name, negative):
            value = known(tags.get(name))
            found = None if value is None or kind(value) != "number" else value in (4, 0, 0.5)
            return negated(found) if negative else found
        case ("null", name, negative):
            value = tags.get(name)
            nothing = value is None or value == b"\xff"
            return nothing is not negative
        case ("bare", name):
            value = tags.get(name)
            return value if isinstance(value, bool) else None
        case ("not", inner):
            return negated(value_of(inner, tags))
        case ("and", trees):
            return all_of([value_of(each, tags) for each in trees])
        case ("or", trees):
            return negated(all_of([negated(value_of(each, tags)) for each in trees]))
    raise AssertionError(tree)


@settings(max_examples=300, deadline=None)
@given(TREES, st.dictionaries(st.sampled_from("xyz"), st.sampled_from(VALUES)))
def test_random_filters_are_those_of_the_model(tree: Any, tags: dict[str, Any]):
    where = text_of(tree)
    assert passes(where, **tags) is (value_of(tree, tags) is True), (where, tags)


# ---- headers ---------------------------------------------------------------------------------------------------------


def test_a_header_is_read_without_the_record():
    record = Record(
        RecordType.ROWS, ts=1, term=2, cseq=3, part=BatchPart(1, 0, 2), key=b"k", tags={"a": 1.5}, body=b"body"
    )
    assert read_header(encode(record)) == header_of(record) == header_of(decode(encode(record)))


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_damaged_record_has_no_header(at: int):
    intact = encode(Record(RecordType.ROWS, ts=1 << 60, key=b"key", tags={"tag": "a"}, body=b"0123456789"))
    damaged = bytearray(intact)
    damaged[at] ^= 0x41
    assert at == 3 or read_header(damaged) is None  # the fourth byte says nothing
    assert read_header(intact[:at]) is None
    assert read_header(b"") is None
