"""Hybrid reads and time travel inside a real Spark, over a real RocksMQ whose retention has acted."""

from __future__ import annotations

import datetime
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidewal.runtime.clock import physical_ms
from tidewal.spark_bridge import latest

sys.path.insert(0, str(Path(__file__).parent))
from history_story import StoredStory
from story import Row, number, sorted_rows

pytestmark = pytest.mark.spark


def in_utc(rows: list[Row]) -> list[Row]:
    """Spark hands out naive local times."""
    for row in rows:
        for name, value in row.items():
            if isinstance(value, datetime.datetime):
                row[name] = value.astimezone(datetime.UTC)
    return sorted_rows(rows)


@pytest.fixture
def stored(owner, tmp_path: Path) -> StoredStory:
    """Nothing yet; the table lies in `tmp_path/tables`, the log is the owner's."""
    return StoredStory(tmp_path / "tables", owner.append)


@pytest.fixture
def hybrid(options: dict[str, str], stored: StoredStory) -> dict[str, str]:
    return {**options, "history": str(stored.folder)}


def store_and_forget(stored: StoredStory, owner, rng: random.Random) -> None:
    """Rows that only the table has, then rows that the table and the log have, then rows that only the log has."""
    for _ in range(2):
        stored.play(rng, 15)
        stored.pass_time(1000)
        stored.story.cut(stored.flights)
        owner.remove_before({})  # the next rows begin in another segment
        stored.play(rng, 5)
        stored.flush(rng, back=1)
    first = stored.log.entries["by-dev-rootcoord-dml_0"][0].id
    owner.remove_before(stored.removable())
    assert owner.first_id("by-dev-rootcoord-dml_0") > first
    stored.pass_time(1000)
    stored.play(rng, 10)
    stored.story.cut(stored.flights)


def moment(ts: int) -> str:
    """The time of a timestamp, as users give it."""
    return datetime.datetime.fromtimestamp(physical_ms(ts) / 1000, datetime.UTC).isoformat()


def test_a_batch_reads_history_and_log_as_one_and_as_they_were(
    spark, owner, stored: StoredStory, options, hybrid, rng: random.Random
) -> None:
    store_and_forget(stored, owner, rng)
    last = stored.story.cuts[-1].time

    def load(**more: str) -> DataFrame:
        return spark.read.format("tidewal").options(**hybrid, **more).load()

    rows = load()
    assert in_utc([row.asDict() for row in rows.collect()]) == stored.story.between(0, last)
    left = spark.read.format("tidewal").options(**options).load().count()
    assert left < len(stored.story.between(0, last)), "the log has everything, so nothing was shown"
    assert rows.select("_ts").where(F.col("_ts") <= stored.time).count() == len(stored.story.between(0, stored.time))

    # As it was at a time: within the table, and behind it.
    for time in (stored.story.cuts[0].time, stored.time, last):
        at = load(timestampAsOf=moment(time))
        upto = ((physical_ms(time) + 1) << 18) - 1
        expected = stored.story.between(0, upto)
        if upto > last:  # the newest cut does not tell the end of its millisecond
            with pytest.raises(PySparkException, match="is not known yet: the newest cut is of"):
                at.collect()
            continue
        assert in_utc([row.asDict() for row in at.collect()]) == expected
        state: dict[object, Row] = {(row["flight"], row["_channel"]): row for row in expected}
        one_shard = stored.flights.vchannels[0]
        alive = latest(at.where(F.col("_channel") == one_shard)).collect()
        assert {row["flight"]: row["_ts"] for row in alive} == {
            row["flight"]: row["_ts"]
            for row in state.values()
            if row["_op"] != "delete" and row["_channel"] == one_shard
        }
    without = spark.read.format("tidewal").options(**options).option("timestampAsOf", moment(stored.time)).load()
    with pytest.raises(PySparkException, match=r"removed the beginning of .* Give option history"):
        without.collect()

    # A version of the table.
    version, time = stored.table.version, stored.time
    stored.flush(rng, back=1)
    at = load(versionAsOf=str(version))
    assert in_utc([row.asDict() for row in at.collect()]) == stored.story.between(0, time)
    with pytest.raises(PySparkException, match="does not have version 99: the newest is"):
        load(versionAsOf="99").collect()


@pytest.mark.long
def test_a_stream_goes_on_over_a_log_that_was_cut_off(
    spark, owner, stored: StoredStory, hybrid, collect, rng: random.Random
) -> None:
    store_and_forget(stored, owner, rng)
    stream = spark.readStream.format("tidewal").options(**hybrid).option("startingOffsets", "earliest")
    limited = stream.option("maxRowsPerTrigger", "40").load()
    seen: list[list[Row]] = []
    with pytest.raises(StreamingQueryException, match="the sink fails"):
        collect(limited, seen=seen, failing_batch=2)
    failed = seen.pop()

    # The table moves on, and the log forgets what the query has not read yet.
    store_and_forget(stored, owner, rng)
    stored.table.join_files()
    seen += collect(limited)
    assert in_utc(seen[2]) == in_utc(failed), "a batch that is read again is the same"
    begin = 0
    for batch in seen:
        end = number(batch[0], "_watermark")
        assert in_utc(batch) == stored.story.between(begin, end)
        assert len(batch) <= 40 or end in [cut.time for cut in stored.story.cuts]
        begin = end
    assert begin == stored.story.cuts[-1].time
    assert any(number(batch[0], "_watermark") <= stored.time for batch in seen[3:])

    # Once more, from the tail.
    store_and_forget(stored, owner, rng)
    rest = [row for batch in collect(limited) for row in batch]
    expected = stored.story.between(begin, stored.story.cuts[-1].time)
    assert [{**row, "_watermark": 0} for row in in_utc(rest)] == [{**row, "_watermark": 0} for row in expected]
