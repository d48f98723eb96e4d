"""The data source inside a real Spark, reading a real RocksMQ through its socket."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F

from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.catalog.cuts import Cut
from tidewal.spark_bridge import latest
from tidewal.spark_bridge.plan.offsets import Offset
from tidewal.spark_bridge.scan.columns import SYSTEM_COLUMNS

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, NOON, Row, Story, number, sorted_rows

pytestmark = pytest.mark.spark


def in_utc(rows: list[Row]) -> list[Row]:
    """Spark hands out naive local times."""
    for row in rows:
        for name, value in row.items():
            if isinstance(value, datetime.datetime):
                row[name] = value.astimezone(datetime.UTC)
    return sorted_rows(rows)


def as_json(cut: Cut, flights: Collection) -> str:
    """The offset of a cut, for the options that take one."""
    of = f"collection {flights.name!r} {flights.id} created at {flights.created_ts}"
    return json.dumps(Offset.of_cut(cut).stored("rocksmq", of))


def test_batch_holds_the_rows_between_two_cuts(spark, story: Story, options, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=30)
    frame = spark.read.format("tidewal").options(**options)
    everything = frame.load()
    assert everything.columns == [*FLIGHTS.arrow().names, *SYSTEM_COLUMNS]
    assert in_utc([row.asDict() for row in everything.collect()]) == story.between(0, story.cuts[-1].time)
    begin, end = sorted(rng.sample(story.cuts, 2), key=lambda cut: cut.time)
    part = (
        frame.option("startingOffsets", as_json(begin, flights)).option("endingOffsets", as_json(end, flights)).load()
    )
    assert in_utc([row.asDict() for row in part.collect()]) == story.between(begin.time, end.time)
    upto = frame.option("startingOffsets", "earliest").option("endingOffsets", str(end.time)).load()
    assert in_utc([row.asDict() for row in upto.collect()]) == story.between(0, end.time)
    nothing = (
        frame.option("startingOffsets", as_json(end, flights)).option("endingOffsets", as_json(end, flights)).load()
    )
    assert nothing.count() == 0


def test_columns_can_be_named(spark, story: Story, options, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=5)
    frame = spark.read.format("tidewal").options(**options)
    rows = frame.schema("_op string, flight string").load().collect()
    assert sorted((row["_op"], row["flight"]) for row in rows) == sorted(
        (row["_op"], row["flight"]) for row in story.rows
    )
    with pytest.raises(PySparkException, match=r"'delay' is double, not int: leave \.schema"):
        frame.schema("delay int").load().collect()


def test_every_micro_batch_is_the_interval_of_its_cuts(
    spark, story: Story, options, collect, rng: random.Random
) -> None:
    flights = story.create()
    story.play(flights, rng, batches=25)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    batches = collect(stream.option("maxRowsPerTrigger", "30").load())
    assert len(batches) > 1
    begin = 0
    for batch in batches:
        end = batch[0]["_watermark"]
        assert end in [cut.time for cut in story.cuts]
        assert in_utc(batch) == story.between(begin, end)
        begin = end
    assert begin == story.cuts[-1].time

    # A restart goes on behind the last cut, and ends at the newest one.
    story.play(flights, rng, batches=10)
    [batch] = collect(spark.readStream.format("tidewal").options(**options).load())
    assert in_utc(batch) == story.between(begin, story.cuts[-1].time)
    assert collect(spark.readStream.format("tidewal").options(**options).load()) == []


@pytest.mark.long
def test_a_batch_that_failed_is_read_again_as_it_was(spark, story: Story, options, collect, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=20)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    limited = stream.option("maxRowsPerTrigger", "20").load()
    seen: list[list[Row]] = []
    with pytest.raises(StreamingQueryException, match="the sink fails"):
        collect(limited, seen=seen, failing_batch=1)
    story.play(flights, rng, batches=20)
    again = collect(limited)
    assert in_utc(again[0]) == in_utc(seen[1])
    assert in_utc([row for batch in [seen[0], *again] for row in batch]) == sorted_rows(
        [row for begin, end in intervals([seen[0], *again]) for row in story.between(begin, end)]
    )
    assert intervals(again)[-1][1] == story.cuts[-1].time


def intervals(batches: list[list[Row]]) -> list[tuple[int, int]]:
    ends = [number(batch[0], "_watermark") for batch in batches]
    return list(pairwise([0, *ends]))


def test_a_running_stream_takes_each_new_cut(spark, story: Story, options, tmp_path: Path, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=3)
    before = story.cuts[-1]
    batches: list[list[Row]] = []
    frame = spark.readStream.format("tidewal").options(**options).load()
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: batches.append([row.asDict() for row in batch.collect()]))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    query.processAllAvailable()
    for _ in range(3):
        story.play(flights, rng, batches=3)
        query.processAllAvailable()
    query.stop()
    begin = before.time  # startingOffsets is latest: what was there before the query is not read
    for batch in filter(None, batches):
        end = batch[0]["_watermark"]
        assert in_utc(batch) == story.between(begin, end)
        begin = end
    assert begin == story.cuts[-1].time


def test_latest_is_what_upserts_and_deletes_leave(spark, story: Story, options, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=40)
    expected: dict[object, Row] = {}
    for row in story.rows:
        expected[row["flight"], row["_channel"]] = row
    frame = spark.read.format("tidewal").options(**options).load()
    # The story puts a key into either shard, so a shard's name is part of the key here.
    one_shard = flights.vchannels[0]
    rows = latest(frame.where(F.col("_channel") == one_shard)).collect()
    assert in_utc([row.asDict() for row in rows]) == sorted_rows(
        [
            {**row, "_watermark": story.cuts[-1].time}
            for row in expected.values()
            if row["_op"] != "delete" and row["_channel"] == one_shard
        ]
    )


def test_windows_over_event_time_with_a_watermark(spark, story: Story, options, tmp_path: Path) -> None:
    flights = story.create()
    expected: dict[tuple[str, int], list[float]] = {}
    for minute in range(0, 600, 7):
        origin, delay = ("JFK", "LGA")[minute % 2], float(minute % 50)
        row = {
            "_op": "upsert",
            "flight": f"F{minute}",
            "origin": origin,
            "event_time": NOON + datetime.timedelta(minutes=minute),
            "delay": delay,
            "place": [0.0, 0.0],
        }
        story.write(flights, minute % 2, [row])
        expected.setdefault((origin, minute // 60), []).append(delay)
        if minute % 5 == 0:
            story.cut(flights)
    story.cut(flights)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    means = (
        stream.option("maxRowsPerTrigger", "20")
        .load()
        .withWatermark("event_time", "10 minutes")
        .groupBy(F.window("event_time", "1 hour"), "origin")
        .agg(F.avg("delay").alias("mean"))
    )
    out = str(tmp_path / "means")
    query = (
        means.writeStream.outputMode("append")
        .format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(out)
    )
    assert query.awaitTermination(200)
    got = {
        (row["origin"], int((row["window"]["start"].astimezone(datetime.UTC) - NOON).total_seconds()) // 3600): row
        for row in spark.read.parquet(out).collect()
    }
    last = max(hour for _, hour in expected)
    closed = {place: delays for place, delays in expected.items() if place[1] < last}
    assert set(got) == set(closed)
    for place, delays in closed.items():
        assert got[place]["mean"] == pytest.approx(sum(delays) / len(delays))


def test_mistakes_are_told_in_words(spark, story: Story, options, collect, tmp_path: Path) -> None:
    flights = story.create()
    for change, text in [
        ({"collection": "trains"}, r"no collection 'trains' .*there are: flights\. Check options"),
        ({"wal": "memory://"}, r"the Spark bridge reads .*rocksmq:///absolute/path"),
        ({"wal": f"rocksmq://{tmp_path}/nowhere"}, r"start one \(tidewal run --wal rocksmq://.*/nowhere\)"),
        ({"startingOffset": "earliest"}, r"unknown option 'startingoffset'; did you mean"),
    ]:
        with pytest.raises(PySparkException, match=text) as raised:
            spark.read.format("tidewal").options(**(options | change)).load().collect()
        assert str(raised.value).count('File "') == 1, "the sentence is not buried below calls and causes"
    with pytest.raises(PySparkException, match="the time of a cut or JSON, not 'tomorrow'"):
        spark.read.format("tidewal").options(**options).option("endingOffsets", "tomorrow").load().collect()
    stream = spark.readStream.format("tidewal").options(**options)
    other = as_json(story.cut(flights), dataclasses.replace(flights, id=3))
    with pytest.raises(PySparkException, match="start with a new checkpoint"):
        collect(stream.option("startingOffsets", other).load(), "other")
    with pytest.raises(PySparkException, match=r"endingOffsets is for spark\.read only"):
        collect(stream.option("endingOffsets", "latest").load())
