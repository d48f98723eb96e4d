"""The readers as Spark calls them."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("pyspark")
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructType

from tidewal.runtime.errors import Moved
from tidewal.runtime.log.migration_state import MIGRATION_CHANNEL, MigrationPhase, MigrationState
from tidewal.runtime.log.replication_state import REPLICATION_CHANNEL, ReplicationPhase, ReplicationState
from tidewal.spark_bridge import readers
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan import open_plan
from tidewal.spark_bridge.readers import TidewalStreamReader

sys.path.insert(0, str(Path(__file__).parent))
from plans import URL, told
from story import ListLog, Story, random_row


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
        monkeypatch.setattr(open_plan, "open_log", lambda _: log)
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


def test_a_query_whose_log_was_left_ends_with_moved_once_it_has_read_that(rng: random.Random, reader_of: Any) -> None:
    """Nothing comes to the old log any more, which can still be read: the query would wait for ever."""
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    reader, clock = reader_of(log, MicroBatchLimits())
    start = reader.initialOffset()
    state = MigrationState(MigrationPhase.PREPARING, uuid4().hex, "kafka://broker/new", run="1")
    log.append(MIGRATION_CHANNEL, state.entries()[0], 0)
    assert reader.latestOffset(start, ReadAllAvailable()) is start
    story.write(flights, 0, [random_row(rng)])
    story.cut(flights)
    for phase in (MigrationPhase.MIGRATING, MigrationPhase.MIGRATED):
        log.append(MIGRATION_CHANNEL, replace(state, phase=phase).entries()[0], 0)
    at = reader.latestOffset(start, ReadAllAvailable())
    assert at["t"] == story.cuts[-1].time
    assert reader.latestOffset(at, ReadAllAvailable()) is at  # it has looked a moment ago
    clock.now_s += 10
    with pytest.raises(Moved, match="was migrated to kafka://broker/new"):
        reader.latestOffset(at, ReadAllAvailable())
    log.append(MIGRATION_CHANNEL, replace(state, phase=MigrationPhase.CANCELLING).entries()[0], 0)
    assert reader.latestOffset(at, ReadAllAvailable()) is at
    replaced = ReplicationState(ReplicationPhase.REPLACED, uuid4().hex, uuid4().hex, "pulsar://replica", number=1)
    log.append(REPLICATION_CHANNEL, replaced.entries()[0], 0)
    clock.now_s += 10
    with pytest.raises(Moved, match="set wal to pulsar://replica"):
        reader.latestOffset(at, ReadAllAvailable())
