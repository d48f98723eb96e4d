"""Offsets as Spark stores them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.errors import InvalidRequest, PositionMismatch
from tidewal.spark_bridge.options import ReadOptions
from tidewal.spark_bridge.plan.collection import CollectionPlan
from tidewal.spark_bridge.plan.offsets import Offset, first_offset, parsed, scheme_of
from tidewal.spark_bridge.scan.channel_range import BEGINNING, IN_TABLE, ChannelPlace

sys.path.insert(0, str(Path(__file__).parent))
from plans import beginning
from story import NAMES, ListLog, Story

A, B = NAMES.pchannel(0), NAMES.pchannel(1)
CUT = Offset.of_cut(Cut(2**62, {B: CutEnd(2, 5, b"\x00\xff"), A: CutEnd(1, 2, b"\x01")}))


def plan(wal: str = "rocksmq:///data", id: int = 7, later: int = 0) -> CollectionPlan:
    """Of a collection with that id, created at one time or a little later."""
    log = ListLog()
    story = Story(log.append)
    story.now += later
    story.create(id=id)
    return CollectionPlan(log, ReadOptions(wal, "flights"))


def as_json(offset: Offset, **of: Any) -> str:
    return json.dumps(plan(**of)._stored(offset))


def test_text_is_stable_whatever_the_order_of_channels() -> None:
    other = dataclasses.replace(CUT, ends=dict(reversed(CUT.ends.items())))
    assert as_json(CUT) == as_json(other)
    of = f"collection 'flights' 7 created at {plan().known.created_ts}"
    assert as_json(CUT) == (
        f'{{"v": 2, "wal": "rocksmq", "of": "{of}", "t": {2**62}, '
        f'"ends": {{"{A}": "behind 01 1 2", "{B}": "behind 00ff 2 5"}}}}'
    )


def test_offset_is_the_cut() -> None:
    assert plan()._offset(json.loads(as_json(CUT))) == CUT
    begin = beginning(plan().known)
    assert plan()._offset(json.loads(as_json(begin))) == begin


@pytest.mark.parametrize(
    "place",
    [BEGINNING, IN_TABLE, ChannelPlace(b"\x00\xff"), ChannelPlace(b"\x01", False), ChannelPlace(b"\x01", True, 3, 17)],
)
def test_a_place_is_what_was_written(place: ChannelPlace) -> None:
    assert ChannelPlace.parse(str(place)) == place


def test_places_sort_as_they_follow_each_other() -> None:
    places = [BEGINNING, ChannelPlace(b"\x01", False), ChannelPlace(b"\x01", True, 9, 9), ChannelPlace(b"\x02", False)]
    assert sorted([places[at] for at in (2, 0, 3, 1)]) == places
    assert not ChannelPlace(b"\x01", False, 1, 1) < ChannelPlace(b"\x01", False, 2, 2)


def test_an_offset_names_the_kind_of_its_log() -> None:
    offset = json.loads(as_json(CUT, wal="kafka+ssl://broker/x"))
    assert list(offset) == ["v", "wal", "of", "t", "ends"]
    assert offset["wal"] == scheme_of("kafka+ssl://broker/x") == "kafka"
    assert plan("kafka://b")._offset(offset) == CUT
    with pytest.raises(PositionMismatch, match=r"of a kafka log, option wal names a pulsar one: correct option wal"):
        plan("pulsar://b")._offset(offset)


def test_the_first_batch_keeps_where_it_begins() -> None:
    start, end = (plan()._stored(offset) for offset in (beginning(plan().known), CUT))
    begin = first_offset(start, start)
    first = first_offset(begin, end)
    assert first == {**end, "from": start}
    assert plan()._offset(first) == CUT


@pytest.mark.parametrize(
    "broken",
    [
        "yesterday",
        "[1]",
        "{}",
        as_json(CUT).replace('"v": 2', '"v": 1'),
        as_json(CUT).replace('"v": 2', '"v": 3'),
        as_json(CUT).replace("behind 01", "behind xx"),
        as_json(CUT).replace("01 1 2", "01 1"),
        as_json(CUT).replace(A, "other"),
        as_json(CUT).replace(str(2**62), '"noon"'),
        json.dumps({**json.loads(as_json(CUT)), "ends": 3}),
    ],
)
def test_what_is_no_offset_is_refused(broken: str) -> None:
    with pytest.raises(InvalidRequest, match="offset"):
        plan()._offset(parsed(broken))


def test_offset_of_a_dropped_collection_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"one that was dropped .*new checkpoint"):
        plan()._offset(json.loads(as_json(CUT, id=6)))


def test_offset_of_a_collection_with_the_same_id_in_another_log_is_refused() -> None:
    offset = json.loads(as_json(CUT))
    assert plan()._offset(offset) == CUT
    with pytest.raises(InvalidRequest, match=r"in another log: correct options wal"):
        plan(later=1)._offset(offset)
