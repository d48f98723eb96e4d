"""Plans of a collection: whatever limits, splits, times and filters there are, the rows are those of the cuts."""

from __future__ import annotations

import datetime
import json
import pickle
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")
from pyspark.sql import datasource as spark
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructType

from tidewal.runtime.clock import compose, physical_ms
from tidewal.runtime.errors import ConfigError, InvalidSchema, PositionLost, PositionMismatch
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.rows.hashing import shard_of_key
from tidewal.spark_bridge import readers
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan import cut_log, limits
from tidewal.spark_bridge.plan.base import CollectionPlan, Offset
from tidewal.spark_bridge.plan.cut_log import CutLog
from tidewal.spark_bridge.plan.history import AsOfPlan
from tidewal.spark_bridge.plan.limits import Size
from tidewal.spark_bridge.plan.predicate import EVERYTHING, Predicate
from tidewal.spark_bridge.plan.pushdown import take
from tidewal.spark_bridge.readers import TidewalBatchReader, TidewalStreamReader
from tidewal.spark_bridge.scan.collection import arrow_batches
from tidewal.spark_bridge.scan.columns import arrow_columns, some_columns, spark_schema

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, NAMES, ListLog, Row, Story, batch_of, number, random_row, sorted_rows

COLUMNS = tuple(arrow_columns(FLIGHTS))
URL = "rocksmq:///data"


def told(rng: random.Random, batches: int, ms: int = 0) -> tuple[ListLog, Story]:
    """A log with a collection in it; `ms` pass between batches."""
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(batches):
        story.now += compose(ms)
        story.play(flights, rng, batches=1)
    return log, story


def plan_of(log: ListLog, **options: Any) -> CollectionPlan:
    return CollectionPlan(log, ReadOptions(URL, "flights", **options))


@pytest.mark.parametrize("left", [0, 1])
def test_an_as_of_read_tells_that_its_beginning_was_removed(rng: random.Random, left: int) -> None:
    log, story = told(rng, 5, ms=10)
    plan = AsOfPlan(log, ReadOptions(URL, "flights", timestamp_as_of=story.cuts[-1].time))
    assert len(rows(log, plan.all_tasks())) == len(story.rows)
    channel = NAMES.pchannel(0)
    log.entries[channel] = log.entries[channel][len(log.entries[channel]) - left :]
    with pytest.raises(PositionLost, match="removed the beginning"):
        plan.all_tasks()


def test_what_goes_between_planning_and_reading_is_told(rng: random.Random) -> None:
    log, _ = told(rng, 5)
    strict, lax = plan_of(log).all_tasks(), plan_of(log, fail_on_data_loss=False).all_tasks()
    channel = strict[0].channel
    del log.entries[channel][:1]
    with pytest.raises(PositionLost, match=f"removed rows of {channel} that were not read yet"):
        rows(log, strict)
    left = plan_of(log).all_tasks()
    assert rows(log, lax) == rows(log, left)
    log.entries[channel].clear()
    assert rows(log, plan_of(log).all_tasks()) == rows(log, left[1:])


def test_what_goes_before_a_first_batch_runs_again_is_told(rng: random.Random) -> None:
    log, story = told(rng, 5)
    found = []
    for strict in (True, False):
        plan = plan_of(log, fail_on_data_loss=strict, starting="earliest")
        start, end = (json.loads(json.dumps(offset)) for offset in (plan.begin(), plan.newest()))
        assert len(rows(log, plan.tasks(start, end))) == len(story.rows)
        assert rows(log, plan.tasks(start, start)) == []
        found.append((plan, start, end))
    (strictly, *_), (laxly, start, end) = found
    channel = NAMES.pchannel(0)
    for left in (2, 0):
        log.entries[channel] = log.entries[channel][len(log.entries[channel]) - left :]
        with pytest.raises(PositionLost, match=f"removed rows of {channel} that were not read yet"):
            rows(log, strictly.tasks(start, end))
        assert rows(log, laxly.tasks(start, end)) == rows(log, plan_of(log).all_tasks())


@pytest.mark.parametrize("tasks", [1, 4])
def test_what_goes_while_an_as_of_read_is_planned_is_told(rng: random.Random, monkeypatch: Any, tasks: int) -> None:
    log, story = told(rng, 5, ms=10)
    plan = AsOfPlan(log, ReadOptions(URL, "flights", timestamp_as_of=story.cuts[-1].time, min_partitions=tasks))
    check = plan._check_beginning

    def passed_by(*args: Any) -> None:
        check(*args)
        del log.entries[args[0].channel][:-1]

    monkeypatch.setattr(plan, "_check_beginning", passed_by)
    with pytest.raises(PositionLost):
        rows(log, plan.all_tasks())


def rows(log: ListLog, tasks: Any, where: Predicate = EVERYTHING) -> list[Row]:
    found: list[Row] = []
    for task in pickle.loads(pickle.dumps(tasks)):
        for batch in where.filtered(arrow_batches(log, task, COLUMNS)):
            found += batch.to_pylist()
    return sorted_rows(found)


limited = st.builds(
    MicroBatchLimits,
    rows=st.none() | st.integers(1, 60),
    bytes=st.none() | st.integers(1, 60_000),
    entries=st.none() | st.integers(1, 30),
)


def size_of(log: ListLog, plan: CollectionPlan, start: Offset, end: Offset) -> Size:
    """What lies between two offsets, counted without any of the code under test but the ranges."""
    total = Size()
    for each in plan.planner.ranges(plan._cut(start), plan._cut(end)):
        entries = [
            entry
            for entry in log.entries[each.channel]
            if each.begin.id < entry.id <= each.end.id or (each.begin_included and entry.id == each.begin.id)
        ]
        total = total.plus(Size(0, sum(len(entry.payload) for entry in entries), len(entries)))
    return total._replace(
        rows=sum(batch.num_rows for each in plan.tasks(start, end) for batch in arrow_batches(log, each, ("_ts",)))
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
        assert rows(log, plan.tasks(at, end)) == story.between(begin, end["t"])
        following = [cut for cut in story.cuts if begin < cut.time]
        size = size_of(log, plan, at, end)
        assert end["t"] == following[0].time or not size.is_over(limit)
        more = next((cut for cut in following if cut.time > end["t"]), None)
        assert more is None or size_of(log, plan, at, plan._offset(more)).is_over(limit) or not limit.bounded
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

    monkeypatch.setattr("tidewal.spark_bridge.scan.collection.decode_rows", None)
    monkeypatch.setattr(limits, "count_rows", count)
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
    assert plan.next(plan.begin(), plan._offset(cut), MicroBatchLimits(rows=5)) == plan._offset(cut)
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
    counts = [len(rows(log, [task])) for task in found]
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
    whole = rows(log, plan_of(log).all_tasks())
    assert whole == story.between(0, end.time)
    for tasks in range(2, 30):
        assert rows(log, plan_of(log, min_partitions=tasks).all_tasks()) == whole


def test_times_name_rows_wherever_the_cuts_are(rng: random.Random) -> None:
    log, story = told(rng, 30, ms=100)
    first, last = (number(story.rows[at], "_ts") for at in (0, -1))

    def read(**options: Any) -> list[Row]:
        return rows(log, plan_of(log, **options).all_tasks())

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
        story.play(story_collection(plan), rng, batches=2)
    upto = plan.newest()
    assert upto is not None
    end = plan.next(start, upto, MicroBatchLimits())
    assert end is not None
    assert rows(log, plan.tasks(start, end)) == story.between(start["t"], story.cuts[-1].time)
    assert rows(log, plan.tasks(start, end))


def story_collection(plan: CollectionPlan) -> Any:
    return plan.planner.collection()


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
    assert rows(log, plan.tasks(start, upto)) == story.between(0, upto["t"])


def test_an_offset_of_another_log_is_refused(rng: random.Random) -> None:
    log, _ = told(rng, 2)
    newest = plan_of(log).newest()
    assert newest is not None
    assert newest["wal"] == "rocksmq"
    other = CollectionPlan(log, ReadOptions("pulsar://b/x", "flights", starting=json.dumps(newest)))
    with pytest.raises(PositionMismatch, match="of a rocksmq log, option wal names a pulsar one"):
        other.all_tasks()


# ---- filters --------------------------------------------------------------------------------------------------------


def by_key(rng: random.Random) -> tuple[ListLog, Story]:
    """As `told`, with each key in its own shard."""
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(60):
        row = random_row(rng)
        story.write(flights, shard_of_key(str(row["flight"]), 2), [row])
        if rng.random() < 0.3:
            story.cut(flights)
    story.cut(flights)
    return log, story


def test_filters_leave_exactly_their_rows(rng: random.Random) -> None:
    log, story = by_key(rng)
    schema = spark_schema(FLIGHTS)
    everything = story.between(0, story.cuts[-1].time)
    times = sorted(number(rng.choice(story.rows), "_ts") for _ in range(2))
    keys = ("UA3", "UA7", None)
    flights = story_collection(plan_of(log))
    cases: list[tuple[list[spark.Filter], Any]] = [
        ([spark.GreaterThanOrEqual(("_ts",), times[0])], lambda row: row["_ts"] >= times[0]),
        (
            [spark.GreaterThan(("_ts",), times[0]), spark.LessThan(("_ts",), times[1])],
            lambda row: times[0] < row["_ts"] < times[1],
        ),
        ([spark.EqualTo(("_ts",), times[1])], lambda row: row["_ts"] == times[1]),
        ([spark.LessThanOrEqual(("_ts",), times[0])], lambda row: row["_ts"] <= times[0]),
        ([spark.In(("flight",), keys)], lambda row: row["flight"] in keys),
        ([spark.EqualTo(("flight",), "UA3"), spark.In(("flight",), keys)], lambda row: row["flight"] == "UA3"),
        ([spark.EqualTo(("_channel",), flights.vchannels[1])], lambda row: row["_channel"] == flights.vchannels[1]),
        (
            [spark.EqualTo(("origin",), "JFK"), spark.EqualTo(("stops",), 1)],
            lambda row: (row["origin"], row["stops"]) == ("JFK", 1),
        ),
        ([spark.LessThan(("_ts",), 5)], lambda row: False),
        ([spark.GreaterThan(("_ts",), 1 << 62)], lambda row: False),
        ([spark.EqualTo(("_op",), "delete")], lambda row: row["_op"] == "delete"),
    ]
    for filters, keeps in cases:
        where, left = take(filters, schema)
        assert left == []
        for tasks in (1, 5):
            found = rows(log, plan_of(log, min_partitions=tasks).all_tasks(where), where)
            assert found == [row for row in everything if keeps(row)], filters


def test_filters_on_time_and_key_read_less(rng: random.Random) -> None:
    log, story = by_key(rng)
    plan = plan_of(log)
    [task] = plan.all_tasks(take([spark.EqualTo(("flight",), "UA3")], spark_schema(FLIGHTS))[0])
    assert task.vchannels == (story_collection(plan).vchannels[shard_of_key("UA3", 2)],)
    late = story.cuts[-3].time
    where, left = take([spark.GreaterThan(("_time",), time_at(late))], spark_schema(FLIGHTS))
    assert len(left) == 1  # times are compared by Spark too
    assert where.conditions == ()
    where = Predicate(first_ts=late + 1, last_ts=story.cuts[-2].time)
    for task in plan.all_tasks(where):
        assert task.begin == story.cuts[-3].ends[task.channel]
        assert task.end == story.cuts[-2].ends[task.channel]
        assert task.end_ts == story.cuts[-1].time  # _watermark stays what it is


def time_at(ts: int) -> Any:
    return datetime.datetime.fromtimestamp(physical_ms(ts) / 1000, datetime.UTC)


def test_what_cannot_be_compared_here_is_left_to_spark() -> None:
    schema = spark_schema(FLIGHTS)
    filters: list[spark.Filter] = [
        spark.EqualTo(("delay",), 1.5),
        spark.StringStartsWith(("flight",), "U"),
        spark.Not(spark.EqualTo(("flight",), "UA3")),
        spark.IsNotNull(("flight",)),
        spark.EqualNullSafe(("flight",), "UA3"),
        spark.GreaterThan(("flight",), "UA3"),
        spark.In(("flight",), (None,)),
        spark.EqualTo(("_ts",), None),
        spark.EqualTo(("place", "x"), 3),
        spark.EqualTo(("_ts",), True),
    ]
    where, left = take(filters, schema)
    assert left == filters
    assert where == EVERYTHING


def test_columns_are_chosen_by_name() -> None:
    known = spark_schema(FLIGHTS, change_feed=True)
    assert some_columns(known, ("_change_type", "flight"), "collection 'flights'").names == ["_change_type", "flight"]
    assert known.names[-3:] == ["_change_type", "_commit_version", "_commit_timestamp"]
    with pytest.raises(
        InvalidSchema, match=r"collection 'flights' has no column '_change_type'; it has flight, origin"
    ):
        some_columns(spark_schema(FLIGHTS), ("_change_type",), "collection 'flights'")


def test_columns_are_named_in_one_place() -> None:
    for reader in (TidewalStreamReader, TidewalBatchReader):
        with pytest.raises(ConfigError, match=r"columns and \.schema\(\.\.\.\) name different columns"):
            reader(ReadOptions(URL, "flights", columns=("flight", "_ts")), StructType().add("flight", "string"))


# ---- as Spark calls the readers -------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def reader_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream reader over a list, and the clock that it goes by."""

    def make(log: ListLog, limit: MicroBatchLimits, **options: Any) -> tuple[TidewalStreamReader, Clock]:
        clock = Clock()
        monkeypatch.setattr(readers, "time", clock)
        monkeypatch.setattr(readers, "open_log", lambda _: log)
        given_ = ReadOptions(URL, "flights", limits=limit, **options)
        return TidewalStreamReader(given_, StructType([])), clock

    return make


def test_few_rows_wait_until_they_are_enough_or_late(rng: random.Random, reader_of: Any) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()

    def write(count: int) -> None:
        for _ in range(count):
            story.write(flights, rng.randrange(2), [random_row(rng)])
        story.cut(flights)

    limit = MicroBatchLimits(min_rows=10, max_delay_s=60)
    reader, clock = reader_of(log, limit)
    assert reader.getDefaultReadLimit() == ReadMinRows(10)
    write(3)
    start = reader.initialOffset()
    at = reader.latestOffset(start, ReadMinRows(10))  # as Kafka's source, the first batch does not wait
    assert at["t"] == story.cuts[-1].time
    write(9)
    assert reader.latestOffset(at, ReadMinRows(10)) is at
    write(1)
    at = reader.latestOffset(at, ReadMinRows(10))
    assert at["t"] == story.cuts[-1].time
    write(1)
    clock.now_s += 59.9
    assert reader.latestOffset(at, ReadMinRows(10)) is at
    clock.now_s += 0.1
    assert reader.latestOffset(at, ReadMinRows(10))["t"] == story.cuts[-1].time
    at = reader.latestOffset(at, ReadMinRows(10))
    write(1)
    reader.prepareForTriggerAvailableNow()  # no more rows will come: waiting would be for ever
    write(20)
    assert reader.latestOffset(at, ReadMinRows(10))["t"] == story.cuts[-2].time


def test_all_limits_are_kept_though_spark_is_told_of_one(rng: random.Random, reader_of: Any) -> None:
    log, story = told(rng, 30)
    for limit, known in [
        (MicroBatchLimits(rows=7, bytes=10**9), ReadMaxRows(7)),
        (MicroBatchLimits(entries=5), ReadMaxRows(5)),
        (MicroBatchLimits(bytes=99), ReadMaxBytes(99)),
        (MicroBatchLimits(), ReadAllAvailable()),
    ]:
        reader, _ = reader_of(log, limit, starting="earliest")
        assert reader.getDefaultReadLimit() == known
        start = reader.initialOffset()
        newest = story.cuts[-1].time
        assert reader.latestOffset(start, ReadAllAvailable())["t"] == newest
        assert (reader.latestOffset(start, known)["t"] < newest) == limit.bounded
        reader.prepareForTriggerAvailableNow()
        at, ends = start, []
        while (end := reader.latestOffset(at, known)) != at:
            at = json.loads(json.dumps(end))
            ends.append(at["t"])
        assert ends[-1] == newest
        assert reader.partitions(at, at) == []


# ---- where cuts are -------------------------------------------------------------------------------------------------


def test_cuts_are_looked_for_where_they_are(rng: random.Random) -> None:
    log, story = told(rng, 200, ms=1000)
    cuts = CutLog(log, NAMES.cuts, 7, "flights")
    log.reads.clear()
    assert cuts.newest() == story.cuts[-1]
    first = min(after for channel, after, _ in log.reads if channel == NAMES.cuts)
    assert first is not None
    assert first > log.entries[NAMES.cuts][-30].id
    for _ in range(20):
        at = rng.randrange(len(story.cuts))
        time = story.cuts[at].time
        assert cuts.last_upto(time) == story.cuts[at]
        assert cuts.last_upto(time - 1) == (story.cuts[at - 1] if at else None)
        assert next(cuts.between(time - 1)) == story.cuts[at]
        assert list(cuts.between(time, story.cuts[-2].time)) == story.cuts[at + 1 : -1]


def test_cuts_out_of_order_are_passed_over(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(10):
        story.write(flights, 0, [random_row(rng)])
        story.cut(flights)
    entries = log.entries[NAMES.cuts]
    payloads = [(entry.timestamp, entry.payload) for entry in entries]
    payloads[4], payloads[5] = payloads[5], payloads[4]
    payloads[8], payloads[9] = payloads[9], payloads[8]
    entries[:] = [
        entry._replace(timestamp=ts, payload=body) for entry, (ts, body) in zip(entries, payloads, strict=True)
    ]
    cuts = CutLog(log, NAMES.cuts, 7, "flights")
    assert cuts.newest() == story.cuts[9]
    times = [cut.time for cut in cuts.between(0)]
    assert times == sorted(times)
    assert times[-1] == story.cuts[9].time


def test_points_to_split_at_are_few_and_even(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_log, "POINTS_MAX", 10)
    log, story = told(rng, 70)
    found = CutLog(log, NAMES.cuts, 7, "flights").points(0, story.cuts[-1].time)
    at = [story.cuts.index(cut) for cut in found]
    assert 5 <= len(at) <= 11
    assert len({b - a for a, b in pairwise(at)}) == 1
