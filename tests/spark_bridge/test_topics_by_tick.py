"""Topics whose channels have owners: micro-batches end at a time that all channels have reached."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from tidewal.runtime.errors import (
    ChannelNotFound,
    InvalidRequest,
)
from tidewal.runtime.log.heartbeats import Announcement, heartbeat
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.streams.channel_reader import ChannelReader
from tidewal.spark_bridge.options import MicroBatchLimits
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, ListLog
from topic_story import COLUMNS, NOON, Owned, by_tick, rows, shown, topic_limits


@pytest.mark.slow
@given(st.randoms(use_true_random=False), topic_limits, st.integers(1, 9))
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
    assert shown(rows(owned.log, plan, plan._stored(plan._at(0)), newest)) == [
        row for row in sorted(owned.written) if row[0] <= newest["t"]
    ]


def test_a_transaction_that_is_written_below_a_later_fence_is_read_at_its_own_time() -> None:
    log = ListLog()
    written: list[tuple[int, int, str]] = []

    def put(channel: str, kind: RecordType, ts: int, term: int, cseq: int, body: bytes = b"", at: int = 0) -> None:
        log.append(channel, encode(Record(kind, NOON + ts, term, cseq, body=body)), NOON + max(ts, at))
        if body:
            written.append((NOON + ts, channel, body))

    for channel in "ab":
        put(channel, RecordType.FENCE, 1, 1, 1)
        put(channel, RecordType.MESSAGE, 2, 1, 2, b"before")
        put(channel, RecordType.PREPARE, 3 + (channel == "b"), 1, 3)
    put("a", RecordType.FENCE, 100, 2, 1)  # its owner has died
    plan = by_tick(log)
    begin = by_tick(log, starting="earliest").begin()
    newest = plan.newest()
    assert newest is not None
    assert newest["t"] == NOON + 2  # neither PREPARE nor fence says more
    assert shown(rows(log, plan, begin, newest)) == written
    told = [Announcement("b", 1, 3, NOON + 3)]
    log.append(NAMES.heartbeats, encode(heartbeat(told)), NOON + 3)
    put("a", RecordType.MESSAGE, 4, 2, 2, b"t", at=110)
    put("a", RecordType.MESSAGE, 120, 2, 3, b"later")
    newer = plan.newest()
    assert newer is not None
    assert newer["t"] == NOON + 3  # up to the PREPARE, as the owner says
    put("b", RecordType.MESSAGE, 4, 1, 4, b"t", at=90)
    put("b", RecordType.TIME_TICK, 130, 1, 5)
    at = newer
    found: list[set[object]] = []
    upto = plan.newest()
    assert upto is not None
    while (end := plan.next(at, upto, MicroBatchLimits(rows=1))) is not None:
        found.append({row["value"] for row in rows(log, plan, at, end)})
        at = end
    assert [each for each in found if each] == [{b"t"}, {b"later"}]
    assert shown(rows(log, plan, plan._stored(plan._at(NOON + 3)), plan._stored(plan._at(NOON + 4)))) == [
        (NOON + 4, "a", b"t"),
        (NOON + 4, "b", b"t"),
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
                for batch in scan_channel(owned.log, task, COLUMNS)
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
