"""What Spark makes of the source's options, of log time and of topics."""

from __future__ import annotations

import datetime
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from tidewal.runtime.clock import compose, physical_ms
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.rows.hashing import shard_of_key

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, Row, Story, number, random_row, time_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def in_utc(value: Any) -> Any:
    return value.astimezone(datetime.UTC)


@pytest.mark.parametrize("ms", [0, 40])  # 0: all rows, and all cuts, within one millisecond
def test_a_watermark_of_no_delay_on_log_time_drops_nothing(
    spark, story: Story, options, tmp_path: Path, rng: random.Random, ms: int
) -> None:
    flights = story.create()
    for _ in range(40):
        story.now += compose(ms)
        story.write(flights, 0, [random_row(rng) for _ in range(rng.randrange(1, 4))])  # the other channel is idle
        if rng.random() < 0.6:
            story.cut(flights)
    story.now += compose(1000)
    story.write(flights, 0, [random_row(rng)])
    story.cut(flights)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    counts = (
        stream.option("maxRowsPerTrigger", "12")
        .load()
        .withWatermark("_time", "0 seconds")
        .groupBy(F.window("_time", "100 milliseconds"))
        .count()
    )
    seen: list[tuple[datetime.datetime, int]] = []
    query = (
        counts.writeStream.outputMode("append")
        .foreachBatch(
            lambda batch, _: seen.extend((in_utc(row["window"]["start"]), row["count"]) for row in batch.collect())
        )
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(200)
    progress = [each for each in query.recentProgress if each["numInputRows"]]
    assert len(progress) >= 4
    assert (
        sum(state["numRowsDroppedByWatermark"] for each in query.recentProgress for state in each["stateOperators"])
        == 0
    )
    last = time_of(number(story.rows[-1], "_ts"))
    watermark = datetime.datetime.fromisoformat(query.recentProgress[-1]["eventTime"]["watermark"])
    assert watermark == last
    expected: dict[datetime.datetime, int] = {}
    for row in story.rows:
        start_ms = physical_ms(number(row, "_ts")) // 100 * 100
        if start_ms + 100 <= int(last.timestamp() * 1000):
            start = time_of(compose(start_ms))
            expected[start] = expected.get(start, 0) + 1
    assert sorted(seen) == sorted(expected.items())


def test_limits_splits_columns_and_the_change_feed(spark, story: Story, options, collect, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=40)
    frame = spark.read.format("tidewal").options(**options)
    split = frame.option("minPartitions", "6").option("columns", "flight,_ts").load()
    assert split.columns == ["flight", "_ts"]
    assert split.rdd.getNumPartitions() >= 6
    rows = sorted((row["flight"], row["_ts"]) for row in split.collect())
    assert rows == sorted((row["flight"], row["_ts"]) for row in story.rows)
    changes = spark.read.format("tidewal").options(**options).option("readChangeFeed", "true").load()
    got = sorted(
        (row["_commit_version"], row["_change_type"], in_utc(row["_commit_timestamp"])) for row in changes.collect()
    )
    assert got == sorted((row["_ts"], row["_op"], row["_time"]) for row in story.rows)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    batches = collect(stream.option("maxBytesPerTrigger", "9000").option("maxOffsetsPerTrigger", "9").load())
    assert len(batches) > 2
    assert sum(map(len, batches)) == len(story.rows)


def test_filters_reach_the_source(spark, story: Story, options, rng: random.Random) -> None:
    flights = story.create()
    for _ in range(60):
        story.now += compose(50)
        row = random_row(rng)
        story.write(flights, shard_of_key(str(row["flight"]), 2), [row])
        if rng.random() < 0.4:
            story.cut(flights)
    story.cut(flights)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        reads = spark.read.format("tidewal").options(**options).option("pushFilters", "true")
        middle = story.rows[len(story.rows) // 2]
        ts, time = number(middle, "_ts"), time_of(number(middle, "_ts"))
        for condition, keeps in [
            (F.col("_ts") >= ts, lambda row: row["_ts"] >= ts),
            (F.col("_time") > F.lit(time), lambda row: row["_time"] > time),
            (F.col("_time") == F.lit(time), lambda row: row["_time"] == time),
            (
                F.col("flight").isin("UA3", "UA4") & (F.col("_ts") < ts),
                lambda row: row["flight"] in ("UA3", "UA4") and row["_ts"] < ts,
            ),
            (F.col("flight") == middle["flight"], lambda row: row["flight"] == middle["flight"]),
            (
                (F.col("stops") == 1) | (F.col("_op") == "delete"),
                lambda row: row["stops"] == 1 or row["_op"] == "delete",
            ),
        ]:
            found = reads.load().where(
                condition
            )  # Spark keeps what it pushed into a frame, whatever is asked of it next
            assert sorted(row["_ts"] for row in found.collect()) == sorted(
                row["_ts"] for row in story.rows if keeps(row)
            )
        for frame, filters_here in [(reads.load(), False), (reads.option("pushFilters", "false").load(), True)]:
            plan = frame.where(F.col("flight") == "UA3")._jdf.queryExecution().executedPlan().toString()
            assert ("UA3" in plan) == filters_here
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_topics_are_frames_as_kafkas(spark, owner, collect) -> None:
    ts = compose(1_700_000_000_000)
    wanted: list[Row] = []

    def write(channel: str, number: int) -> None:
        record = Record(RecordType.QUERY, ts + number, key=b"k", tags={"n": number}, body=b"%d" % number)
        owner.append(channel, encode(record), ts + number)
        wanted.append({"_channel": channel, "value": b"%d" % number})

    for number_ in range(10):
        write(f"orders-{number_ % 2}", number_)
    owner.append("orders-0", b"plain", ts + 10)
    owner.append(NAMES.cuts, b"not for users", 0)
    wanted.append({"_channel": "orders-0", "value": b"plain"})
    base = {"wal": owner.url, "subscribePattern": "orders-.*"}
    frame = spark.read.format("tidewal").options(**base).option("includeHeaders", "true").load()
    assert frame.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("timestamp", "timestamp"),
        ("_ts", "bigint"),
        ("_time", "timestamp"),
        ("_channel", "string"),
        ("_id", "binary"),
        ("_watermark", "bigint"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    rows = {bytes(row["value"]): row for row in frame.collect()}
    assert rows[b"3"]["headers"][0].asDict() == {"key": "n", "value": bytearray(b"3")}
    assert (bytes(rows[b"3"]["key"]), in_utc(rows[b"3"]["timestamp"]), rows[b"3"]["_ts"]) == (b"k", time_of(ts), ts + 3)
    assert (rows[b"plain"]["headers"], in_utc(rows[b"plain"]["timestamp"])) == (None, time_of(ts))

    def shown(batches: list[list[Row]]) -> list[tuple[object, bytes]]:
        return sorted((row["_channel"], bytes(row["value"])) for batch in batches for row in batch)

    stream = spark.readStream.format("tidewal").options(**base).option("startingOffsets", "earliest")
    batches = collect(stream.option("maxOffsetsPerTrigger", "4").load())
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert shown(batches) == sorted((row["_channel"], row["value"]) for row in wanted)
    for number_ in range(20, 24):
        write("orders-2", number_)  # a channel that joins is read from its beginning
    assert shown(collect(stream.load())) == [("orders-2", b"%d" % number_) for number_ in range(20, 24)]
    one = spark.read.format("tidewal").options(wal=owner.url, topic="orders-0")
    first = json.dumps({"orders-0": f"behind {bytes(rows[b'8']['_id']).hex()}"})
    assert [bytes(row["value"]) for row in one.option("startingOffsets", first).load().collect()] == [b"plain"]
    with pytest.raises(
        PySparkException, match=r"no channel 'order' in .*there are: orders-0, orders-1, orders-2\. Check"
    ):
        spark.read.format("tidewal").options(wal=owner.url, topic="order").load().collect()
