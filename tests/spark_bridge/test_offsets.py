"""Offsets as Spark stores them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.errors import InvalidRequest, PositionMismatch
from tidewal.spark_bridge.plan.offsets import (
    beginning,
    first_offset,
    from_json,
    from_offset,
    scheme_of,
    to_json,
    to_offset,
)

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, ListLog, Story

COLLECTION = Story(ListLog().append).create()
A, B = NAMES.pchannel(0), NAMES.pchannel(1)
CUT = Cut(7, "flights", 2**62, {B: CutEnd(2, 5, b"\x00\xff"), A: CutEnd(1, 2, b"\x01")})


def test_text_is_stable_whatever_the_order_of_channels() -> None:
    other = Cut(7, "flights", 2**62, dict(reversed(CUT.ends.items())))
    assert to_json(CUT) == to_json(other)
    assert to_json(CUT) == (
        f'{{"v": 1, "collection_id": 7, "t": {2**62}, "ends": {{"{A}": ["01", 1, 2], "{B}": ["00ff", 2, 5]}}}}'
    )


def test_offset_is_the_cut() -> None:
    assert from_offset(json.loads(to_json(CUT)), COLLECTION) == CUT
    assert from_json(to_json(beginning(COLLECTION)), COLLECTION) == beginning(COLLECTION)


def test_an_offset_names_the_kind_of_its_log() -> None:
    offset = json.loads(json.dumps(to_offset(CUT, scheme_of("kafka+ssl://broker/x"))))
    assert list(offset) == ["v", "wal", "collection_id", "t", "ends"]
    assert from_offset(offset, COLLECTION, "kafka") == from_offset(to_offset(CUT), COLLECTION, "pulsar") == CUT
    with pytest.raises(PositionMismatch, match=r"of a kafka log, option wal names a pulsar one: correct option wal"):
        from_offset(offset, COLLECTION, "pulsar")


def test_the_first_batch_keeps_where_it_begins() -> None:
    begin = first_offset(to_offset(beginning(COLLECTION)), to_offset(beginning(COLLECTION)))
    first = first_offset(begin, to_offset(CUT))
    assert first == {**to_offset(CUT), "from": to_offset(beginning(COLLECTION))}
    assert from_offset(first, COLLECTION) == CUT


@pytest.mark.parametrize(
    "broken",
    [
        "yesterday",
        "[1]",
        "{}",
        to_json(CUT).replace('"v": 1', '"v": 2'),
        to_json(CUT).replace('"01"', '"xx"'),
        to_json(CUT).replace(A, "other"),
        json.dumps({**to_offset(CUT), "ends": 3}),
    ],
)
def test_what_is_no_offset_is_refused(broken: str) -> None:
    with pytest.raises(InvalidRequest, match="offset"):
        from_json(broken, COLLECTION)


def test_offset_of_a_dropped_collection_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"one that was dropped .*new checkpoint"):
        from_json(to_json(CUT).replace(": 7", ": 6"), COLLECTION)


def test_offset_of_a_collection_with_the_same_id_in_another_log_is_refused() -> None:
    offset = to_offset(CUT, "rocksmq", COLLECTION.created_ts)
    assert from_offset(json.loads(json.dumps(offset)), COLLECTION) == CUT
    with pytest.raises(InvalidRequest, match=r"in another log: correct options wal"):
        from_offset(offset, dataclasses.replace(COLLECTION, created_ts=COLLECTION.created_ts + 1))
