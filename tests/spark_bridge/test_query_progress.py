"""The progress of streaming queries, in Spark's own words and in Tidewal's table of metrics."""

from __future__ import annotations

import json
import random
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

pytest.importorskip("pyspark")
from prometheus_client.parser import text_string_to_metric_families
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from tidewal.runtime.clock import compose
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.spark_bridge import progress
from tidewal.spark_bridge.helpers.listener import QueryMetrics

sys.path.insert(0, str(Path(__file__).parent))
from story import Story

ID = uuid.UUID(int=1)
NOW = "2013-01-01T12:00:00.000Z"


def offset(ms: int) -> dict[str, Any]:
    return {"v": 2, "wal": "rocksmq", "of": "collection 7", "t": compose(ms) if ms else 0, "ends": {}}


def source(end: object, newest: object = None, rows: int = 0) -> dict[str, Any]:
    return {
        "description": "tidewal",
        "startOffset": offset(1),
        "endOffset": end,
        "latestOffset": newest,
        "numInputRows": rows,
        "inputRowsPerSecond": 100.0,
        "processedRowsPerSecond": float("nan"),
    }


def state(rows: int, dropped: int) -> dict[str, Any]:
    times = dict.fromkeys(("allUpdatesTimeMs", "allRemovalsTimeMs", "commitTimeMs"), 1)
    return times | {
        "operatorName": "stateStoreSave",
        "numRowsTotal": rows,
        "numRowsUpdated": 0,
        "numRowsRemoved": 0,
        "memoryUsedBytes": 1000,
        "numRowsDroppedByWatermark": dropped,
        "numShufflePartitions": 2,
        "numStateStoreInstances": 2,
    }


def progressed(*sources: dict[str, Any], states: tuple[dict[str, Any], ...] = ()) -> QueryProgressEvent:
    return QueryProgressEvent(
        StreamingQueryProgress.fromJson(
            {
                "id": str(ID),
                "runId": str(ID),
                "name": "delays",
                "timestamp": NOW,
                "batchId": 3,
                "batchDuration": 250,
                "stateOperators": list(states),
                "sources": list(sources),
                "sink": {"description": "noop", "numOutputRows": 1},
            }
        )
    )


def started(run: int, name: str | None = "delays") -> QueryStartedEvent:
    return QueryStartedEvent(ID, uuid.UUID(int=run), name, NOW, set())


def test_progress_becomes_numbers() -> None:
    metrics = Metrics("driver")
    listener = QueryMetrics(metrics)
    listener.onQueryStarted(started(1))
    states = (state(rows=10, dropped=2), state(rows=5, dropped=1))
    behind = source(offset(60_000), newest=offset(61_500), rows=70)
    ahead = source(offset(90_000), newest=offset(90_000), rows=30)
    listener.onQueryProgress(progressed(behind, ahead, states=states))
    query = {"query_name": "delays"}
    assert metrics.value("spark_query_num") == 1
    assert metrics.value("spark_input_rows_total", **query) == 100
    assert metrics.value("spark_input_rows_per_second", **query) == 200
    assert metrics.value("spark_processed_rows_per_second", **query) == 0  # Spark said NaN
    assert metrics.value("spark_batch_duration_seconds", **query) == 1
    assert "tidewal_spark_batch_duration_seconds_sum" in metrics.render().decode()
    assert metrics.value("spark_cut_lag_ms", **query) == 1500
    assert metrics.value("spark_read_unix_seconds", **query) == 60
    assert metrics.value("spark_state_rows", **query) == 15
    assert metrics.value("spark_state_bytes", **query) == 2000
    assert metrics.value("spark_late_rows_total", **query) == 3
    listener.onQueryProgress(progressed(source(offset(95_000), newest=offset(95_000), rows=30)))
    assert metrics.value("spark_input_rows_total", **query) == 130
    assert metrics.value("spark_cut_lag_ms", **query) == 0
    listener.onQueryIdle(QueryIdleEvent(ID, uuid.UUID(int=1), NOW))
    assert metrics.value("spark_input_rows_per_second", **query) == 0
    assert metrics.value("spark_read_unix_seconds", **query) == 95


@pytest.mark.parametrize(
    "end", [None, "None", "not JSON", 42, ["a"], {"topic": {"0": 7}}, {"v": 1, "t": "7"}, offset(0)]
)
def test_offsets_of_other_sources_tell_no_time(end: object) -> None:
    metrics = Metrics()
    QueryMetrics(metrics).onQueryProgress(progressed(source(end, rows=1)))
    assert "tidewal_spark_cut_lag_ms{" not in metrics.render().decode()
    assert metrics.value("spark_input_rows_total", query_name="delays") == 1


def test_a_query_that_ends_leaves_nothing_but_how() -> None:
    metrics = Metrics("driver")
    listener = QueryMetrics(metrics)
    assert 'status="failed"} 0.0' in metrics.render().decode()  # an alert counts from there
    listener.onQueryStarted(started(1))
    listener.onQueryProgress(progressed(source(offset(1000))))
    listener.onQueryTerminated(QueryTerminatedEvent(ID, uuid.UUID(int=1), "it broke\n at java", None))
    assert 'query_name="delays"' not in metrics.render().decode()
    assert metrics.value("spark_query_num") == 0
    assert metrics.value("spark_query_ended_total", status="failed") == 1
    assert not listener.health().ok
    assert listener.health().details["failed"] == {"delays": "it broke"}
    listener.onQueryStarted(started(2))
    assert listener.health().ok
    listener.onQueryTerminated(QueryTerminatedEvent(ID, uuid.UUID(int=2), None, None))
    assert listener.health().ok
    assert metrics.value("spark_query_ended_total", status="success") == 1


def test_a_query_without_a_name_goes_by_its_id() -> None:
    listener = QueryMetrics(Metrics())
    listener.onQueryStarted(started(1, None))
    assert listener.health().details["running"] == [str(ID)]


def samples(url: str) -> dict[str, dict[str, float]]:
    """The value of each series, by name without the prefix, then by query."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(urlopen(url, timeout=60).read().decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("tidewal_")
            found.setdefault(name, {})[sample.labels.get("query_name", "")] = sample.value
    return found


@pytest.mark.spark
@pytest.mark.slow
def test_the_driver_serves_the_progress_of_its_queries(spark, story: Story, options, rng: random.Random, tmp_path):
    flights = story.create()
    story.play(flights, rng, batches=20)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest")
    with progress(spark, name="driver") as told:
        query = (
            stream.option("maxRowsPerTrigger", "20")
            .load()
            .groupBy("_op")
            .count()
            .writeStream.outputMode("complete")
            .format("noop")
            .queryName("by_op")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        query.processAllAvailable()
        seen = [each for each in query.recentProgress if each["numInputRows"]]
        assert len(seen) > 1
        newest = [json.loads(each.sources[0].latestOffset)["t"] for each in seen]
        assert set(newest) == {story.cuts[-1].time}
        assert json.loads(seen[-1].sources[0].endOffset)["t"] == story.cuts[-1].time
        wait_for_events(spark)
        page = samples(told.url)
        assert page["spark_query_num"] == {"": 1}
        assert page["spark_input_rows_total"] == {"by_op": len(story.rows)}
        assert page["spark_batch_duration_seconds_count"] == {"by_op": len(seen)}
        assert page["spark_cut_lag_ms"] == {"by_op": 0}
        assert page["spark_state_rows"] == {"by_op": len({row["_op"] for row in story.rows})}
        assert page["spark_read_unix_seconds"]["by_op"] == pytest.approx((story.cuts[-1].time >> 18) / 1000)
        query.stop()

        failing = stream.load().selectExpr("raise_error('it broke') as x").writeStream.format("noop")
        query = failing.option("checkpointLocation", str(tmp_path / "other")).queryName("failing").start()
        with pytest.raises(StreamingQueryException, match="it broke"):
            query.awaitTermination(200)
        wait_for_events(spark)
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(told.url.replace("/metrics", "/healthz"), timeout=60)
        assert "it broke" in json.loads(refused.value.read())["failed"]["failing"]
        refused.value.close()
        with pytest.raises(Unavailable, match="cannot listen"):
            progress(spark, port=int(told.url.rsplit(":", 1)[1].split("/")[0]))
        page = samples(told.url)
    assert {query for series in page.values() for query in series} == {""}
    ended = [told.metrics.value("spark_query_ended_total", status=status) for status in ("success", "failed")]
    assert (page["spark_query_num"], ended) == ({"": 0}, [1, 1])
    told.close()


def wait_for_events(spark: Any) -> None:
    """Wait until Spark has told its listeners everything so far."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(30_000)
