"""Plans of a collection: whatever limits, splits and times there are, the rows are those of the cuts."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import compose, physical_ms
from tidewal.runtime.errors import PositionMismatch
from tidewal.runtime.log.record import Record, RecordType
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.collection import CollectionPlan
from tidewal.spark_bridge.plan.limits import Size
from tidewal.spark_bridge.plan.offsets import StoredOffset
from tidewal.spark_bridge.scan import collection_rows
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from plans import offset, plan_of, rows_of, told
from story import FLIGHTS, NAMES, ListLog, Row, Story, batch_of, number, random_row, sorted_rows

limited = st.builds(
    MicroBatchLimits,
    rows=st.none() | st.integers(1, 60),
    bytes=st.none() | st.integers(1, 60_000),
    entries=st.none() | st.integers(1, 30),
)


def size_of(log: ListLog, plan: CollectionPlan, start: StoredOffset, end: StoredOffset) -> Size:
    """What lies between two offsets, counted without any of the code under test but the ranges."""
    total = Size()
    for each in plan.ranges(plan._offset(start), plan._offset(end)):
        entries = [
            entry
            for entry in log.entries[each.channel]
            if each.begin.id < entry.id <= each.end.id or (not each.begin.behind and entry.id == each.begin.id)
        ]
        total = total.plus(Size(0, sum(len(entry.payload) for entry in entries), len(entries)))
    return total._replace(
        rows=sum(batch.num_rows for each in plan.tasks(start, end) for batch in scan_channel(log, each, ("_ts",)))
    )


@pytest.mark.slow
@given(st.randoms(use_true_random=False), limited, st.integers(1, 12))
@settings(max_examples=40)
def test_each_row_is_read_once_whatever_limits_and_splits(
    rng: random.Random, limit: MicroBatchLimits, tasks: int
) -> None:
    log, story = told(rng, 20)
    plan = plan_of(log, min_partitions=tasks)
    upto, at, begin = plan.newest(), plan.begin(), 0
    assert upto is not None
    while (end := plan.next(at, upto, limit)) is not None:
        assert rows_of(log, plan.tasks(at, end)) == story.between(begin, end["t"])
        following = [cut for cut in story.cuts if begin < cut.time]
        size = size_of(log, plan, at, end)
        assert end["t"] == following[0].time or not size.is_over(limit)
        more = next((cut for cut in following if cut.time > end["t"]), None)
        assert more is None or size_of(log, plan, at, plan._stored(offset(more))).is_over(limit) or not limit.bounded
        at, begin = json.loads(json.dumps(end)), end["t"]
    assert begin == story.cuts[-1].time


def test_counting_looks_at_heads_only(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    log, story = told(rng, 30)
    plan = plan_of(log)
    upto = plan.newest()
    assert upto is not None
    counted: list[int] = []

    def count(body: Any, schema: Any) -> int:
        counted.append(len(body))
        return 1

    monkeypatch.setattr("tidewal.spark_bridge.scan.collection_rows.decode_rows", None)
    monkeypatch.setattr(collection_rows, "count_rows", count)
    end = plan.next(plan.begin(), upto, MicroBatchLimits(rows=10))
    assert end is not None
    assert end["t"] < story.cuts[-1].time
    assert 11 <= len(counted) <= 13  # each channel looks at one entry ahead


def test_a_first_cut_over_the_limit_is_counted_no_further(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(100):
        story.write(flights, 0, [random_row(rng)])
    cut = story.cut(flights)
    plan = plan_of(log)
    seen: list[int] = []
    read = log.read

    def counting(*args: Any, **options: Any) -> Any:
        for piece in read(*args, **options):
            seen.extend([1] * len(piece) if args[0] == NAMES.pchannel(0) else [])
            yield piece

    log.read = counting  # type: ignore[method-assign]
    assert plan.next(plan.begin(), plan._stored(offset(cut)), MicroBatchLimits(rows=5)) == plan._stored(offset(cut))
    assert len(seen) <= 9


@pytest.mark.parametrize("tasks", [1, 2, 3, 8, 40])
def test_more_tasks_than_channels_are_about_even(rng: random.Random, tasks: int) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for number_ in range(400):
        story.write(flights, 0 if rng.random() < 0.8 else 1, [random_row(rng)], parts=1)
        if number_ % 3 == 0:
            story.cut(flights)
    story.cut(flights)
    found = plan_of(log, min_partitions=tasks).all_tasks()
    assert max(tasks, 2) <= len(found) <= tasks + 2
    counts = [len(rows_of(log, [task])) for task in found]
    assert sum(counts) == 400
    assert max(counts) <= 400 / len(found) * 2 + 6


@pytest.mark.slow
def test_a_split_keeps_batches_whole_and_deposed_owners_out(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    channels = [NAMES.pchannel(0), NAMES.pchannel(1)]
    for term in range(2, 8):
        for _ in range(5):
            story.write(flights, rng.randrange(2), [random_row(rng) for _ in range(4)], parts=rng.choice([1, 4]))
            if rng.random() < 0.5:
                story.cut(flights)
        superseded = Record(
            RecordType.ROWS, vchannel=flights.vchannels[0], body=bytes(batch_of(FLIGHTS, [random_row(rng)]).serialize())
        )
        story.own(channels, term)
        held = story.term, dict(story._cseq), dict(story._ends)
        story.term, story._cseq[channels[0]] = term - 1, 10**6
        story.record(channels[0], superseded)
        story.term, story._cseq, story._ends = held
    end = story.cut(flights)
    whole = rows_of(log, plan_of(log).all_tasks())
    assert whole == story.between(0, end.time)
    for tasks in range(2, 30):
        assert rows_of(log, plan_of(log, min_partitions=tasks).all_tasks()) == whole


def test_times_name_rows_wherever_the_cuts_are(rng: random.Random) -> None:
    log, story = told(rng, 30, ms=100)
    first, last = (number(story.rows[at], "_ts") for at in (0, -1))

    def read(**options: Any) -> list[Row]:
        return rows_of(log, plan_of(log, **options).all_tasks())

    for _ in range(10):
        begin, end = sorted(compose(rng.randrange(physical_ms(first), physical_ms(last))) for _ in range(2))
        assert read(starting_time=begin) == story.between(begin - 1, story.cuts[-1].time)
        expected = [{**row, "_watermark": end - 1} for row in story.rows if begin <= number(row, "_ts") < end]
        assert read(starting_time=begin, ending_time=end) == sorted_rows(expected)
    newest = story.cuts[-1].time
    assert read(starting_time=0, ending_time=1 << 62) == story.between(0, newest)
    assert read(starting_time=newest + 1) == read(starting_time=1 << 61) == []
    exactly = story.cuts[3].time
    assert read(ending_time=exactly + 1) == story.between(0, exactly)


def test_a_stream_may_start_at_a_time_that_is_to_come(rng: random.Random) -> None:
    log, story = told(rng, 3, ms=100)
    plan = plan_of(log, starting_time=story.now + compose(150))
    start = plan.begin()
    newest = plan.newest()
    assert newest is not None
    assert plan.next(start, newest, MicroBatchLimits()) is None
    for _ in range(3):
        story.now += compose(100)
        story.play(plan.collection(), rng, batches=2)
    upto = plan.newest()
    assert upto is not None
    end = plan.next(start, upto, MicroBatchLimits())
    assert end is not None
    assert rows_of(log, plan.tasks(start, end)) == story.between(start["t"], story.cuts[-1].time)
    assert rows_of(log, plan.tasks(start, end))


def test_before_the_first_cut_there_is_nothing_and_then_everything(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    plan = plan_of(log, starting_time=compose(5))
    start = plan.begin()
    assert plan.newest() is None
    assert plan_of(log, ending_time=compose(5)).all_tasks() == []
    story.play(flights, rng, batches=3)
    upto = plan.newest()
    assert upto is not None
    assert rows_of(log, plan.tasks(start, upto)) == story.between(0, upto["t"])


def test_an_offset_of_another_log_is_refused(rng: random.Random) -> None:
    log, _ = told(rng, 2)
    newest = plan_of(log).newest()
    assert newest is not None
    assert newest["wal"] == "rocksmq"
    other = CollectionPlan(log, ReadOptions("pulsar://b/x", "flights", starting=json.dumps(newest)))
    with pytest.raises(PositionMismatch, match="of a rocksmq log, option wal names a pulsar one"):
        other.all_tasks()
