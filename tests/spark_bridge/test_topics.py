"""Topics: what each entry gives, and that every entry is read once, whatever limits and splits there are."""

from __future__ import annotations

import json
import logging
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")
from pyspark.sql import datasource as spark

from tidewal.runtime.clock import compose
from tidewal.runtime.errors import (
    ChannelNotFound,
    InvalidRequest,
    PositionLost,
    PositionMismatch,
    TidewalError,
)
from tidewal.runtime.log.heartbeats import Announcement, heartbeat
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.streams.channel_reader import ChannelReader
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.base import Offset, ReadPlan
from tidewal.spark_bridge.plan.pushdown import take
from tidewal.spark_bridge.plan.topic import ByChannel
from tidewal.spark_bridge.plan.topic_by_tick import ByTick
from tidewal.spark_bridge.scan.topic import topic_batches, topic_columns

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, ListLog, Row, Story, time_of

NOON = compose(1_700_000_000_000)
COLUMNS = tuple(topic_columns(headers=True))


def by_channel(log: ListLog, **options: Any) -> ByChannel:
    return ByChannel(log, ReadOptions("rocksmq:///data", **({"topics": ("a", "b")} | options)))


def by_tick(log: ListLog, **options: Any) -> ByTick:
    return ByTick(log, ReadOptions("kafka://b", **({"topics": ("a", "b"), "consistency": "tick"} | options)))


def rows(log: ListLog, plan: ReadPlan, start: Offset, end: Offset) -> list[Row]:
    """What the tasks between two offsets read, which went through Spark's hands as JSON."""
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))
    found: list[Row] = []
    for task in pickle.loads(pickle.dumps(plan.tasks(start, end))):
        for batch in topic_batches(log, task, COLUMNS):
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def values(found: list[Row], channel: str) -> list[object]:
    return [row["value"] for row in found if row["_channel"] == channel]


def test_an_entry_is_a_row_of_kafkas_columns() -> None:
    log = ListLog()
    tags = {"source": "web", "n": 3, "late": True, "raw": b"\x00", "none": None}
    record = Record(RecordType.QUERY, NOON + 5, key=b"k", tags=tags, body=b"body")
    log.append("a", encode(record), NOON)
    log.append("a", b"plain", NOON + (7 << 18))
    log.append("a", b"no time", 0)
    log.append("a", b"TW but no record", NOON)
    log.append("a", encode(Record(RecordType.TIME_TICK, NOON)), NOON)
    log.append("b", b"", NOON)
    plan = by_channel(log)
    found = rows(log, plan, plan.begin(), plan.newest() or {})
    assert [row["value"] for row in found] == [b"body", b"plain", b"no time", b"TW but no record", b""]
    headers = [
        {"key": "source", "value": b"web"},
        {"key": "n", "value": b"3"},
        {"key": "late", "value": b"true"},
        {"key": "raw", "value": b"\x00"},
        {"key": "none", "value": None},
    ]
    assert found[0] == {
        "key": b"k",
        "value": b"body",
        "timestamp": time_of(NOON),
        "_ts": NOON + 5,
        "_time": time_of(NOON),
        "_channel": "a",
        "_id": log.entries["a"][0].id,
        "_watermark": None,
        "headers": headers,
    }
    assert (found[1]["key"], found[1]["headers"], found[1]["timestamp"]) == (None, None, time_of(NOON + (7 << 18)))
    assert (found[2]["_ts"], found[2]["timestamp"], found[2]["_time"]) == (None, None, None)
    assert list(topic_columns()) == list(COLUMNS[:-1])


def test_tags_are_columns_that_filters_reach() -> None:
    log = ListLog()
    tags = [{"source": "web", "n": 1}, {"source": "app"}, {"n": True, "source": None}, {"source": b"web"}]
    for number, each in enumerate(tags):
        log.append("a", encode(Record(RecordType.QUERY, NOON, tags=each, body=b"%d" % number)), NOON)
    log.append("a", b"plain", NOON)
    plan = by_channel(log, topics=("a",), tags=("source", "n"))
    schema = plan.schema()
    assert schema["tags"].dataType.simpleString() == "struct<source:string,n:string>"
    [task] = plan.all_tasks()
    [batch] = topic_batches(log, task, schema.names)
    assert [tuple(row["tags"].values()) for row in batch.to_pylist()] == [
        ("web", "1"),
        ("app", None),
        (None, "true"),
        ("web", None),
        (None, None),
    ]
    for asked, found in [
        ([spark.EqualTo(("tags", "source"), "web")], [b"0", b"3"]),
        ([spark.In(("tags", "source"), ("web", "app")), spark.EqualTo(("tags", "n"), "1")], [b"0"]),
        ([spark.EqualTo(("value",), b"plain")], [b"plain"]),
        ([spark.EqualTo(("_channel",), "b")], []),
    ]:
        where, left = take(asked, schema)
        assert left == []
        batches = [batch for each in plan.all_tasks(where) for batch in topic_batches(log, each, schema.names)]
        assert [row["value"] for batch in where.filtered(iter(batches)) for row in batch.to_pylist()] == found
    assert take([spark.EqualTo(("tags", "other"), "x")], schema)[1] != []
    assert plan.all_tasks(take([spark.EqualTo(("_channel",), "b")], schema)[0]) == []


def test_a_damaged_record_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    damaged = bytearray(encode(Record(RecordType.QUERY, body=b"body")))
    damaged[-1] ^= 1
    log.append("a", bytes(damaged), NOON)
    log.append("b", b"good", NOON)
    plan = by_channel(log)
    with caplog.at_level(logging.WARNING, "tidewal.spark"):
        assert values(rows(log, plan, plan.begin(), plan.newest() or {}), "b") == [b"good"]
    assert "is skipped: checksum" in caplog.text


def play(log: ListLog, rng: random.Random, written: dict[str, list[bytes]], count: int) -> None:
    """Plain values, records and ticks; times mostly ascend, and some entries have none."""
    for _ in range(count):
        channel = rng.choice(sorted(written))
        value = b"%d" % log._last
        ts = rng.choice([0, NOON + (log._last << 18), NOON + (log._last << 18), NOON + (rng.randrange(999) << 18)])
        kind = rng.random()
        if kind < 0.1:
            log.append(channel, encode(Record(RecordType.TIME_TICK, ts)), ts)
            continue
        log.append(channel, value if kind < 0.6 else encode(Record(RecordType.QUERY, ts, body=value)), ts)
        written[channel].append(value)


limits = st.builds(
    MicroBatchLimits,
    rows=st.none() | st.integers(1, 9),
    bytes=st.none() | st.integers(1, 200),
    entries=st.none() | st.integers(1, 9),
)


@pytest.mark.slow
@given(st.randoms(use_true_random=False), limits, st.integers(1, 9))
@settings(max_examples=60)
def test_each_entry_is_read_once_whatever_limits_and_splits(
    rng: random.Random, limit: MicroBatchLimits, tasks: int
) -> None:
    log = ListLog()
    written: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    for channel in written:
        log.entries[channel] = []
    options: dict[str, Any] = {"topics": ("a", "b", "c"), "min_partitions": tasks}
    plan = by_channel(log, **options)
    found: list[Row] = []
    at = plan.begin()
    for _ in range(3):
        play(log, rng, written, rng.randrange(30))
        upto = plan.newest()
        assert upto is not None
        while (end := plan.next(at, upto, limit)) is not None:
            batch = rows(log, plan, at, end)
            entries = [entry for wanted in plan.ranges(at, end) for entry in plan._sized(wanted)]
            sizes = [size for _, size in entries]
            assert len(sizes) == 1 or not total(sizes).is_over(limit)
            assert rows(log, by_channel(log, **options), at, end) == batch  # again, as after a crash
            found += batch
            at = json.loads(json.dumps(end))
        assert at == upto
    assert {channel: values(found, channel) for channel in written} == written


def total(sizes: list[Any]) -> Any:
    result = sizes[0]
    for size in sizes[1:]:
        result = result.plus(size)
    return result


def test_splits_are_about_even_where_time_is_told() -> None:
    log = ListLog()
    for number in range(100):
        log.append("a", b"%d" % number, NOON + (number << 18))
        log.append("b", b"%d" % number, 0)
    plan = by_channel(log, min_partitions=8)
    tasks = plan.tasks(plan.begin(), plan.newest() or {})
    assert [task.channel for task in tasks] == ["a"] * 4 + ["b"]
    counts = [sum(batch.num_rows for batch in topic_batches(log, task, COLUMNS)) for task in tasks]
    assert sum(counts) == 200
    assert max(counts[:4]) <= 27


def test_channels_join_and_leave(rng: random.Random) -> None:
    log = ListLog()
    log.append("orders-1", b"1", NOON)
    log.append(f"{NAMES.prefix}-orders-9", b"of the node", NOON)
    options: dict[str, Any] = {"topics": (), "pattern": r"orders-\d"}
    plan = by_channel(log, **options)
    start = plan.newest()
    assert start is not None
    log.append("orders-2", b"2", NOON)
    log.append("xorders-2", b"no", NOON)
    end = plan.newest()
    assert end is not None
    assert plan.next(start, end, MicroBatchLimits()) == end
    assert [row["value"] for row in rows(log, plan, start, end)] == [b"2"]
    del log.entries["orders-1"]
    log.append("orders-2", b"3", NOON)
    later = plan.newest()
    assert later is not None
    with pytest.raises(ChannelNotFound, match="'orders-1' was dropped while it was being read: start with a new"):
        plan.next(end, later, MicroBatchLimits())
    tolerant = by_channel(log, **options, fail_on_data_loss=False)
    assert tolerant.next(end, later, MicroBatchLimits()) == later
    assert [row["value"] for row in rows(log, tolerant, end, later)] == [b"3"]


def test_a_topic_that_is_not_there_is_named() -> None:
    log = ListLog()
    log.append("b", b"1", NOON)
    log.append(NAMES.cuts, b"", NOON)
    with pytest.raises(ChannelNotFound, match=r"no channel 'a' in rocksmq:///data; there are: b\. Check options topic"):
        by_channel(log).begin()
    assert by_channel(log, fail_on_data_loss=False).newest() == {
        "v": 1,
        "wal": "rocksmq",
        "ends": {"b": f"behind {log.entries['b'][0].id.hex()}"},
    }


def test_a_channel_of_the_node_can_be_named() -> None:
    log = ListLog()
    log.append(NAMES.cuts, encode(Record(RecordType.CUT, NOON, body=b"cut")), NOON)
    plan = by_channel(log, topics=(NAMES.cuts,))
    assert [row["value"] for row in rows(log, plan, plan.begin(), plan.newest() or {})] == [b"cut"]


def test_where_to_start_and_end_is_named_in_many_ways() -> None:
    log = ListLog()
    for number in range(10):
        log.append("a", b"%d" % number, NOON + (number << 18))
    log.append("b", b"x", NOON)

    def read(**options: Any) -> list[object]:
        plan = by_channel(log, **options)
        return sorted(
            row["value"]
            for task in plan.all_tasks()
            for batch in topic_batches(log, task, COLUMNS)
            for row in batch.to_pylist()
        )

    third = f"behind {log.entries['a'][2].id.hex()}"
    assert len(read()) == 11
    assert read(starting_time=NOON + (7 << 18)) == [b"7", b"8", b"9"]
    assert read(ending_time=NOON + (2 << 18)) == [b"0", b"1", b"x"]
    assert read(starting_time=NOON + (2 << 18), ending_time=NOON + (4 << 18)) == [b"2", b"3"]
    assert read(starting_time=NOON + (99 << 18)) == []
    assert read(starting=json.dumps({"a": third, "b": "latest"}), ending_time=NOON + (5 << 18)) == [b"3", b"4"]
    assert read(ending=json.dumps({"a": third})) == [b"0", b"1", b"2", b"x"]
    stored = by_channel(log).newest()
    log.append("b", b"y", NOON)
    assert read(starting=json.dumps(stored)) == [b"y"]
    for wrong, text in [
        ("yesterday", "not 'yesterday'"),
        ('{"c": "latest"}', "name channel 'c', which is not read"),
        ('{"a": "behind xx"}', "offset of channel 'a'"),
        ('{"v": 1, "wal": "rocksmq"}', "not an offset of topics"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            read(starting=wrong)
    with pytest.raises(PositionMismatch, match=r"of a rocksmq log, option wal names a kafka one: correct option wal"):
        ByChannel(log, ReadOptions("kafka://b", topics=("a", "b"), starting=json.dumps(stored))).all_tasks()


def test_lost_entries_are_an_error_unless_they_may_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    for number in range(6):
        log.append("a", b"%d" % number, NOON)
    log.entries["b"] = []
    plan = by_channel(log)
    upto = plan.newest()
    assert upto is not None
    start = plan.next(plan.begin(), upto, MicroBatchLimits(rows=2))
    assert start is not None
    del log.entries["a"][:4]
    with pytest.raises(PositionLost, match=r"new checkpoint and startingOffsets=earliest, or set failOnDataLoss=false"):
        rows(log, plan, start, upto)
    tolerant = by_channel(log, fail_on_data_loss=False)
    assert [row["value"] for row in rows(log, tolerant, start, upto)] == [b"4", b"5"]
    assert "entries are lost" in caplog.text
    # Made anew, a channel may end before where it was read on.
    log.entries["a"] = [log.entries["a"][0]._replace(id=bytes(7) + b"\x01")]
    anew = plan.newest()
    assert anew is not None
    with pytest.raises(PositionLost, match="was created anew"):
        plan.next(upto, anew, MicroBatchLimits())
    assert tolerant.next(upto, anew, MicroBatchLimits()) == anew
    assert [row["value"] for row in rows(log, tolerant, upto, anew)] == [b"4"]


def test_few_rows_are_counted_on_until_they_are_enough() -> None:
    log = ListLog()
    log.entries["b"] = []
    log.append("a", b"0", NOON)
    plan = by_channel(log)
    start = plan.begin()
    counted = []
    for number in range(4):
        log.reads.clear()
        upto = plan.newest()
        assert upto is not None
        counted.append(plan.has_rows(start, upto, 4))
        assert [after for _, after, _ in log.reads] == [log.entries["a"][-2 if number else 0].id]
        log.append("a", b"x", NOON)
    assert counted == [False, False, False, True]


# ---- channels with owners -------------------------------------------------------------------------------------------


class Owned:
    """Channels with an owner, and the rows that count."""

    def __init__(self, rng: random.Random) -> None:
        self.log = ListLog()
        self.story = Story(self.log.append)
        self.rng = rng
        self.written: list[tuple[int, str, bytes]] = []
        self.names = ["a", "b", "c"]
        self.own()

    def own(self) -> None:
        self.story.own(self.names, self.story.term + 1)

    def write(self, channel: str) -> None:
        self.story.now += self.rng.choice([1, 1 << 18, 100 << 18])
        ts, value = self.story.now, b"%d" % self.log._last
        parts = self.rng.choice([1, 1, 3])
        for number in range(parts):
            part = BatchPart(ts, number, parts) if parts > 1 else None
            body = value + b".%d" % number
            self.story.stamped(channel, Record(RecordType.QUERY, part=part, key=b"k", body=body), ts)
            self.written.append((ts, channel, body))

    def zombie(self, channel: str) -> None:
        """Records of a superseded owner, and half of a batch that its owner abandoned."""
        last = Record(RecordType.QUERY, self.story.now, self.story.term - 1, 10**6, body=b"zombie")
        self.log.append(channel, encode(last), self.story.now)

    def tick(self, channel: str) -> None:
        self.story.record(channel, Record(RecordType.TIME_TICK))

    def step(self) -> None:
        channel = self.rng.choice(self.names)
        kind = self.rng.random()
        if kind < 0.05:
            self.own()
        elif kind < 0.25:
            self.zombie(channel)
        elif kind < 0.45:
            self.tick(channel)
        else:
            self.write(channel)

    def between(self, begin: int, end: int) -> list[tuple[int, str, bytes]]:
        return sorted(row for row in self.written if begin < row[0] <= end)


def shown(found: list[Row]) -> list[tuple[object, object, object]]:
    return sorted((row["_ts"], row["_channel"], row["value"]) for row in found)


@pytest.mark.slow
@given(st.randoms(use_true_random=False), limits, st.integers(1, 9))
@settings(max_examples=60)
def test_ticks_make_lines_across_channels(rng: random.Random, limit: MicroBatchLimits, tasks: int) -> None:
    owned = Owned(rng)
    options: dict[str, Any] = {"topics": tuple(owned.names), "min_partitions": tasks}
    plan = by_tick(owned.log, **options)
    at = by_tick(owned.log, **options, starting="earliest").begin()
    for _ in range(3):
        for _ in range(rng.randrange(25)):
            owned.step()
        upto = plan.newest()
        assert upto is not None
        while (end := plan.next(at, upto, limit)) is not None:
            batch = rows(owned.log, plan, at, end)
            assert shown(batch) == owned.between(at["t"], end["t"])
            assert {row["_watermark"] for row in batch} <= {end["t"]}
            again = by_tick(owned.log, **options)
            assert shown(rows(owned.log, again, at, end)) == shown(batch)
            if len({row["_ts"] for row in batch}) > 1:
                assert limit.rows is None or len(batch) <= limit.rows
            at = json.loads(json.dumps(end))
        assert at["t"] == max(at["t"], upto["t"])
    for channel in owned.names:
        owned.tick(channel)
    upto = plan.newest()
    assert upto is not None
    assert shown(rows(owned.log, plan, at, upto)) == owned.between(at["t"], 1 << 62)
    assert upto["t"] >= max((ts for ts, _, _ in owned.written), default=0)


@pytest.mark.parametrize("timeticker", ["", "ticks"])
def test_the_slowest_channel_holds_time_until_its_owner_announces_more(rng: random.Random, timeticker: str) -> None:
    owned = Owned(rng)
    plan = by_tick(owned.log, topics=("a", "b", "c"), timeticker=timeticker)
    for channel in owned.names:
        owned.tick(channel)
    idle = owned.story.now
    owned.write("a")
    owned.write("b")
    newest = plan.newest()
    assert newest is not None
    assert newest["t"] == idle  # c has told no more
    reader = ChannelReader("c")
    reader.accept(owned.log.entries["c"])
    owned.story.now += 1 << 18
    told = [
        Announcement("c", reader.term, reader.cseq, owned.story.now),
        Announcement("a", reader.term, 10**6, owned.story.now),  # of a record that is not here yet
        Announcement("b", reader.term - 1, 10**6, owned.story.now),
    ]
    owned.log.append(timeticker or NAMES.heartbeats, encode(heartbeat(told)), owned.story.now)
    newest = plan.newest()
    assert newest is not None
    assert newest["t"] == owned.written[0][0]
    assert shown(rows(owned.log, plan, plan._offset(plan._line_at(0)), newest)) == [
        row for row in sorted(owned.written) if row[0] <= newest["t"]
    ]


def test_channels_with_owners_join_and_leave(rng: random.Random) -> None:
    owned = Owned(rng)
    options: dict[str, Any] = {"topics": (), "pattern": "[a-z]"}
    plan = by_tick(owned.log, **options)
    for channel in owned.names:
        owned.tick(channel)
    start = plan.newest()
    assert start is not None
    owned.log.entries["d"] = []  # it has no owner yet: it delays nothing
    for channel in owned.names:
        owned.write(channel)
    for channel in owned.names:
        owned.tick(channel)
    end = plan.newest()
    assert end is not None
    assert sorted(end["ends"]) == ["a", "b", "c"]
    assert not plan.has_rows(start, end, len(owned.written) + 1)
    assert plan.has_rows(start, end, len(owned.written))
    now, owned.story.now = owned.story.now, end["t"] - 1000  # the clock of its first owner is behind
    owned.story.own(["d"], owned.story.term + 1)
    owned.story.record("d", Record(RecordType.QUERY, body=b"late"))
    owned.story.now = now
    for channel in ("a", "b", "c", "d"):
        owned.story.term = 2 + (channel == "d")
        owned.tick(channel)
    later = plan.newest()
    assert later is not None
    while (upto := plan.next(end, later, MicroBatchLimits(entries=1))) is not None:
        if found := rows(owned.log, plan, end, upto):
            break
        end = upto
    assert [(row["_channel"], row["value"]) for row in found] == [("d", b"late")]
    end = later
    del owned.log.entries["b"]
    for channel in ("a", "c", "d"):
        owned.story.term = 2 + (channel == "d")
        owned.tick(channel)
    after = plan.newest()
    assert after is not None
    with pytest.raises(ChannelNotFound, match="'b' was dropped"):
        plan.next(end, after, MicroBatchLimits())
    tolerant = by_tick(owned.log, **options, fail_on_data_loss=False)
    assert tolerant.next(end, after, MicroBatchLimits()) == after
    assert rows(owned.log, tolerant, end, after) == []


def test_times_name_lines(rng: random.Random) -> None:
    owned = Owned(rng)
    for _ in range(60):
        owned.step()
    for channel in owned.names:
        owned.tick(channel)
    times = sorted(rng.choice(owned.written)[0] for _ in range(2))

    def read(**options: Any) -> list[tuple[object, object, object]]:
        plan = by_tick(owned.log, topics=("a", "b", "c"), **options)
        return shown(
            [
                row
                for task in plan.all_tasks()
                for batch in topic_batches(owned.log, task, COLUMNS)
                for row in batch.to_pylist()
            ]
        )

    assert read(starting_time=times[0], ending_time=times[1]) == owned.between(times[0] - 1, times[1] - 1)
    assert read(starting=str(times[0])) == owned.between(times[0], 1 << 62)
    assert read(starting_time=owned.story.now + (1 << 30)) == []
    assert read() == sorted(owned.written)


def test_channels_without_an_owner_have_no_ticks() -> None:
    log = ListLog()
    log.append("a", encode(Record(RecordType.QUERY, NOON, body=b"x")), NOON)
    log.append("b", encode(Record(RecordType.QUERY, NOON, body=b"x")), NOON)
    with pytest.raises(InvalidRequest, match="'a' has none: leave consistency out"):
        by_tick(log).newest()


@pytest.mark.parametrize("make", [by_channel, by_tick])
def test_an_offset_of_something_else_is_refused(make: Callable[..., ReadPlan]) -> None:
    log = ListLog()
    plan = make(log)
    collection = {
        "v": 1,
        "wal": "kafka" if make is by_tick else "rocksmq",
        "collection_id": 7,
        "t": 5,
        "ends": {"a": 3},
    }
    with pytest.raises(TidewalError, match=r"offset"):
        plan.tasks(collection, collection)


@pytest.mark.parametrize("make", [by_channel, by_tick])
def test_what_goes_before_a_first_batch_of_topics_runs_again_is_told(rng: random.Random, make: Any) -> None:
    owned = Owned(rng)
    for channel in ("a", "b", "a", "b"):
        owned.write(channel)
    plans = [make(owned.log, starting="earliest", fail_on_data_loss=strict) for strict in (True, False)]
    [(start, end), _] = [(plan.begin(), plan.newest()) for plan in plans]
    before = [rows(owned.log, plan, start, end) for plan in plans]
    assert before[0] == before[1] != []
    assert rows(owned.log, plans[0], start, start) == []
    for left in (2, 0):
        owned.log.entries["a"] = owned.log.entries["a"][len(owned.log.entries["a"]) - left :]
        with pytest.raises(PositionLost, match="entries of a are gone that were not read yet"):
            rows(owned.log, plans[0], start, end)
        found = rows(owned.log, plans[1], start, end)
        assert values(found, "b") == values(before[0], "b")
        assert set(values(found, "a")) <= set(values(before[0], "a"))


@pytest.mark.parametrize("strict", [True, False])
def test_a_channel_that_was_emptied_is_planned_for_many_tasks(strict: bool) -> None:
    log = ListLog()
    for number in range(4):
        log.append("a", b"%d" % number, NOON + (number << 18))
    log.entries["a"].clear()
    plan = by_channel(log, topics=("a",), min_partitions=4, fail_on_data_loss=strict)
    assert rows(log, plan, plan.begin(), plan.newest() or {}) == []
    assert [batch for task in plan.all_tasks() for batch in topic_batches(log, task, COLUMNS)] == []


def test_rows_that_are_gone_before_time_has_come_to_them_are_told(rng: random.Random) -> None:
    """Of a channel that is ahead retention removes what is not read yet, and leaves what lies behind T."""
    owned = Owned(rng)
    plans = [by_tick(owned.log, fail_on_data_loss=strict) for strict in (True, False)]
    for channel in ("a", "b"):
        owned.tick(channel)
    starts = [plan.newest() for plan in plans]
    owned.write("a")
    owned.tick("b")
    kept = len(owned.log.entries["a"])
    owned.write("a")
    del owned.log.entries["a"][:kept]
    (strictly, begin), (laxly, _) = zip(plans, starts, strict=True)
    end = strictly.newest()
    assert begin is not None
    assert end is not None
    with pytest.raises(PositionLost, match="entries of a are gone that were not read yet"):
        rows(owned.log, strictly, begin, end)
    assert rows(owned.log, laxly, begin, end) == []
    owned.tick("b")
    last = strictly.newest()
    assert last is not None
    assert shown(rows(owned.log, strictly, end, last)) == owned.between(end["t"], last["t"]) != []


def test_a_channel_that_was_emptied_goes_on_by_its_owners_heartbeats(rng: random.Random) -> None:
    owned = Owned(rng)
    first = by_tick(owned.log)
    for channel in ("a", "b"):
        owned.write(channel)
        owned.tick(channel)
    at = first.newest()
    assert at is not None
    owned.log.entries["a"].clear()
    strictly, laxly = (by_tick(owned.log, fail_on_data_loss=strict) for strict in (True, False))  # begun anew
    with pytest.raises(PositionLost, match="removed all entries of a, and no owner of it announces a time"):
        strictly.newest()
    assert (laxly.newest() or {})["ends"].keys() == {"b"}
    for _ in range(2):
        owned.write("b")
        owned.tick("b")
        told = [Announcement("a", owned.story.term, owned.story._cseq["a"], owned.story.now)]
        owned.log.append(NAMES.heartbeats, encode(heartbeat(told)), owned.story.now)
        end = strictly.newest()
        assert end is not None
        assert end["t"] == owned.story.now
        assert shown(rows(owned.log, strictly, at, end)) == owned.between(at["t"], end["t"]) != []
        at = end
    for channel in ("a", "b"):
        owned.write(channel)
        owned.tick(channel)
    end = strictly.newest()
    assert end is not None
    assert shown(rows(owned.log, strictly, at, end)) == owned.between(at["t"], end["t"]) != []
