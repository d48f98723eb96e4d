"""Topics whose channels are read each on its own: every entry is read once, whatever limits and splits there are."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from tidewal.runtime.errors import (
    ChannelNotFound,
    InvalidRequest,
    PositionMismatch,
    TidewalError,
)
from tidewal.runtime.log import replication_state
from tidewal.runtime.log.migration_state import MIGRATION_CHANNEL, mark_of
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.replication_state import REPLICATION_CHANNEL, ReplicationPhase, ReplicationState
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.limits import counted_entries
from tidewal.spark_bridge.plan.read_plan import ReadPlan
from tidewal.spark_bridge.plan.topic_by_channel import ByChannel
from tidewal.spark_bridge.scan.channel_range import ChannelRange
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, ListLog, Row
from topic_story import COLUMNS, NOON, by_channel, by_tick, rows, topic_limits, total, values


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


@pytest.mark.slow
@given(st.randoms(use_true_random=False), topic_limits, st.integers(1, 9))
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
            ranges = plan.ranges(plan._offset(at), plan._offset(end))
            sizes = [entry.size for wanted in ranges for entry in counted_entries(log, wanted)]
            assert len(sizes) == 1 or not total(sizes).is_over(limit)
            assert rows(log, by_channel(log, **options), at, end) == batch  # again, as after a crash
            found += batch
            at = json.loads(json.dumps(end))
        assert at == upto
    assert {channel: values(found, channel) for channel in written} == written


def test_splits_are_about_even_where_time_is_told() -> None:
    log = ListLog()
    for number in range(100):
        log.append("a", b"%d" % number, NOON + (number << 18))
        log.append("b", b"%d" % number, 0)
    plan = by_channel(log, min_partitions=8)
    tasks = plan.tasks(plan.begin(), plan.newest() or {})
    assert [task.channel for task in tasks] == ["a"] * 4 + ["b"]
    counts = [sum(batch.num_rows for batch in scan_channel(log, task, COLUMNS)) for task in tasks]
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
        "v": 2,
        "wal": "rocksmq",
        "of": "topics",
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
            for batch in scan_channel(log, task, COLUMNS)
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
        ('{"v": 2, "wal": "rocksmq"}', "not an offset of topics"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            read(starting=wrong)
    with pytest.raises(PositionMismatch, match=r"of a rocksmq log, option wal names a kafka one: correct option wal"):
        ByChannel(log, ReadOptions("kafka://b", topics=("a", "b"), starting=json.dumps(stored))).all_tasks()


def test_an_offset_of_the_log_before_its_migration_is_refused() -> None:
    """Ids of both logs are alike: a query that went on would lose rows, or have some twice."""
    log = ListLog()
    log.append("a", b"0", NOON)
    log.append("b", b"0", NOON)
    before = by_channel(log).newest()
    mark = mark_of(uuid4().hex)
    log.entries[mark] = []
    with pytest.raises(
        PositionMismatch, match=rf"of a rocksmq log, option wal names a rocksmq {mark} one.*new checkpo"
    ):
        by_channel(log, starting=json.dumps(before)).all_tasks()
    after = by_channel(log).newest()
    log.append("b", b"1", NOON)
    assert len(by_channel(log, starting=json.dumps(after)).all_tasks()) == 1


def test_an_offset_of_the_source_is_refused_by_its_replica_and_one_of_that_goes_on_behind_the_promotion() -> None:
    log = ListLog()
    log.append("a", b"0", NOON)
    log.append("b", b"0", NOON)
    source = by_channel(log).newest()
    state = ReplicationState(ReplicationPhase.REPLICA, log_id=uuid4().hex, source_id=uuid4().hex, number=1)
    log.append(REPLICATION_CHANNEL, state.entries()[0], NOON)
    replica = by_channel(log).newest()
    promoted = replace(state, phase=ReplicationPhase.PROMOTED, number=2)
    for mark in (promoted.entries()[0], None):
        if mark is not None:
            log.append(REPLICATION_CHANNEL, mark, NOON)
        else:  # it is settled
            log.entries[replication_state.mark_of(promoted)] = []
            log.entries[REPLICATION_CHANNEL].clear()
        assert by_channel(log, starting=json.dumps(replica)).newest() == replica
        with pytest.raises(
            PositionMismatch, match=rf"of a rocksmq log, .* names a rocksmq {state.log_id} one.*replica"
        ):
            by_channel(log, starting=json.dumps(source)).all_tasks()


def test_a_pattern_leaves_out_what_a_migration_has_made() -> None:
    """That comes and goes, and is no program's: where the migration is taken back a query would end for want of it."""
    log = ListLog()
    log.append("a", b"0", NOON)
    log.append(MIGRATION_CHANNEL, b"{}", NOON)
    log.entries[mark_of(uuid4().hex)] = []
    plan = by_channel(log, topics=(), pattern=".*")
    newest = plan.newest()
    assert newest is not None
    assert list(newest["ends"]) == ["a"]
    del log.entries[MIGRATION_CHANNEL]
    log.append("a", b"1", NOON)
    later = plan.newest()
    assert later is not None
    assert [each.channel for each in plan.tasks(newest, later) if isinstance(each, ChannelRange)] == ["a"]


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


@pytest.mark.parametrize("make", [by_channel, by_tick])
def test_an_offset_of_something_else_is_refused(make: Callable[..., ReadPlan]) -> None:
    log = ListLog()
    plan = make(log)
    collection = {
        "v": 2,
        "wal": "kafka" if make is by_tick else "rocksmq",
        "of": "collection 'flights' 7 created at 3",
        "t": 5,
        "ends": {"a": "behind 03 1 1"},
    }
    with pytest.raises(TidewalError, match=r"offset"):
        plan.tasks(collection, collection)
