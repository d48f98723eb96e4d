"""Filters and columns: exactly the rows and columns that were asked for, and no more is read than must be."""

from __future__ import annotations

import datetime
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType

from tidewal.runtime.clock import physical_ms
from tidewal.runtime.errors import ConfigError, InvalidSchema
from tidewal.runtime.rows.hashing import shard_of_key
from tidewal.spark_bridge.options import ReadOptions
from tidewal.spark_bridge.plan.predicate import EVERYTHING, Predicate
from tidewal.spark_bridge.plan.pushdown import take
from tidewal.spark_bridge.readers import TidewalBatchReader, TidewalStreamReader
from tidewal.spark_bridge.scan.columns import some_columns, spark_schema

sys.path.insert(0, str(Path(__file__).parent))
from plans import URL, offset, plan_of, rows_of
from story import FLIGHTS, ListLog, Story, number, random_row


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
    flights = plan_of(log).collection()
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
            found = rows_of(log, plan_of(log, min_partitions=tasks).all_tasks(where), where)
            assert found == [row for row in everything if keeps(row)], filters


def test_filters_on_time_and_key_read_less(rng: random.Random) -> None:
    log, story = by_key(rng)
    plan = plan_of(log)
    [task] = plan.all_tasks(take([spark.EqualTo(("flight",), "UA3")], spark_schema(FLIGHTS))[0])
    assert task.vchannels == (plan.collection().vchannels[shard_of_key("UA3", 2)],)
    late = story.cuts[-3].time
    where, left = take([spark.GreaterThan(("_time",), time_at(late))], spark_schema(FLIGHTS))
    assert len(left) == 1  # times are compared by Spark too
    assert where.conditions == ()
    where = Predicate(first_ts=late + 1, last_ts=story.cuts[-2].time)
    for task in plan.all_tasks(where):
        assert task.begin == offset(story.cuts[-3]).ends[task.channel]
        assert task.end == offset(story.cuts[-2]).ends[task.channel]
        assert task.watermark == story.cuts[-1].time


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
