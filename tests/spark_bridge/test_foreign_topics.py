"""Topics that others made, read with the options and columns of Spark's Kafka source."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql import types as t

from tests.adapters.kafka.foreign_topics import add_partitions, consumed, make_topic, opened, producing
from tests.adapters.pulsar.foreign_topics import Others
from tidewal.runtime.errors import ChannelNotFound, ConfigError, InvalidRequest, InvalidSchema
from tidewal.runtime.log.wal import TOMBSTONE, Append, Tombstone
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.open_plan import open_plan
from tidewal.spark_bridge.scan.foreign_rows import foreign_columns
from tidewal.spark_bridge.scan.scanner import scan_channel
from tidewal.spark_bridge.sink.foreign import BYTES, ROWS, in_commits, plan_foreign
from tidewal.spark_bridge.sink.options import SinkOptions

SERVERS = "kafka.bootstrap.servers"
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
COLUMNS = tuple(foreign_columns(numbered=True, headers=True))
OLD = {SERVERS: "h:9092", "subscribe": "orders"}


def parse(streaming: bool | None = None, **options: str) -> ReadOptions:
    return ReadOptions.parse({**OLD, **options}, streaming=streaming)


# ---- options: no broker ----------------------------------------------------------------------------------------------


def test_the_options_of_a_query_of_sparks_kafka_source_are_understood():
    found = ReadOptions.parse(
        {
            "KAFKA.bootstrap.SERVERS": "a:1, b:2",
            "subscribe": "orders, clicks",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "7",
            "minOffsetsPerTrigger": "3",
            "maxTriggerDelay": "5s",
            "failOnDataLoss": "false",
            "includeHeaders": "true",
            "minPartitions": "4",
            "kafka.isolation.level": "read_committed",
            "kafka.client.id": "etl",
        },
        streaming=True,
    )
    assert found.wal == "kafka://a:1,b:2?topics=foreign&client_id=etl"
    assert found.foreign
    assert (found.topics, found.starting, found.headers) == (("orders", "clicks"), "earliest", True)
    assert found.limits == MicroBatchLimits(entries=7, min_rows=3, max_delay_s=5.0)
    assert (found.fail_on_data_loss, found.min_partitions) == (False, 4)
    assigned = ReadOptions.parse({SERVERS: "a:1", "assign": '{"orders":[0,2],"clicks":[1]}'})
    assert assigned.topics == ("orders:0", "orders:2", "clicks:1")
    assert ReadOptions.parse({SERVERS: "a:1", "subscribePattern": "ord.*"}).pattern == "ord.*"


def test_subscribe_means_topic_on_tidewals_own_log_too():
    own = ReadOptions.parse({"wal": "kafka://a:1/mine", "subscribe": "orders"})
    assert (own.topics, own.foreign) == (("orders",), False)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"wal": "kafka://h:1"}, SERVERS),
        ({"topic": "clicks"}, "subscribe"),
        ({"groupIdPrefix": "mine"}, "groupIdPrefix"),
        ({"kafka.group.id": "mine"}, "kafka.group.id"),
        ({"startingOffsetsByTimestamp": "{}"}, "startingOffsetsByTimestamp"),
        ({"maxRecordsPerPartition": "5"}, "maxRecordsPerPartition"),
        ({"kafka.isolation.level": "read_uncommitted"}, "kafka.isolation.level"),
        ({"kafka.security.protocol": "SSL"}, "kafka.security.protocol"),
        ({"kafkaConsumer.pollTimeoutMs": "1"}, "kafkaConsumer.pollTimeoutMs"),
        ({"consistency": "tick"}, "consistency"),
        ({"tags": "kind"}, "tags"),
        ({"subscribePattern": "o.*"}, "subscribePattern"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options, key):
    with pytest.raises(ConfigError) as refused:
        parse(**options)
    assert refused.value.fields["key"] == key


@pytest.mark.parametrize("text", ["no", "[]", "{}", '{"orders": 1}', '{"orders": ["0"]}', '{"orders": [true]}'])
def test_an_assignment_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="assign"):
        ReadOptions.parse({SERVERS: "a:1", "assign": text})


# ---- reading ---------------------------------------------------------------------------------------------------------


def rows_of(options: ReadOptions, tasks: Any) -> list[dict[str, Any]]:
    log = open_log(options.wal)
    try:
        batches = [batch for task in tasks for batch in scan_channel(log, task, COLUMNS)]
    finally:
        log.close()
    rows = [row for batch in batches for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def batch(kafka: Any, **options: str) -> list[dict[str, Any]]:
    parsed = ReadOptions.parse({SERVERS: kafka.bootstrap, **options}, streaming=False)
    plan = open_plan(parsed)
    try:
        return rows_of(parsed, plan.all_tasks())
    finally:
        plan.close()


async def filled(kafka: Any, partitions: int = 2, each: int = 10) -> str:
    topic = await make_topic(kafka, partitions)
    async with producing(kafka) as producer:
        for number in range(partitions):
            for at in range(each):
                await producer.send_and_wait(
                    topic, b"%d" % at, key=b"k", partition=number, timestamp_ms=1_700_000_000_000 + at
                )
    return topic


@pytest.mark.broker
async def test_the_rows_are_those_of_sparks_kafka_source(kafka):
    topic = await make_topic(kafka, 2)
    async with opened(kafka) as wal:
        await wal.append_many(
            [
                Append(f"{topic}:1", b"one", 1_700_000_000_000 << 18, b"k", (("h", b"1"), ("h", None))),
                Append(f"{topic}:1", TOMBSTONE, key=b"gone"),
                Append(f"{topic}:0", b""),
            ]
        )
    empty, one, gone = await asyncio.to_thread(batch, kafka, subscribe=topic, includeHeaders="true")
    assert tuple(one) == ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
    assert one["timestamp"].timestamp() == 1_700_000_000
    assert {name: one[name] for name in ("key", "value", "topic", "partition", "offset")} == {
        "key": b"k",
        "value": b"one",
        "topic": topic,
        "partition": 1,
        "offset": 0,
    }
    assert one["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    assert (gone["key"], gone["value"], gone["headers"]) == (b"gone", None, None)
    assert (empty["key"], empty["value"]) == (None, b"")


@pytest.mark.broker
async def test_offsets_times_and_partitions_bound_a_batch(kafka):
    topic = await filled(kafka)

    async def read(**options: str) -> list[tuple[int, int]]:
        rows = await asyncio.to_thread(batch, kafka, **options)
        return [(row["partition"], row["offset"]) for row in rows]

    assert await read(assign=json.dumps({topic: [1]})) == [(1, at) for at in range(10)]
    assert await read(subscribePattern=f"{topic[:-2]}.*", minPartitions="7") == [
        (number, at) for number in range(2) for at in range(10)
    ]
    starting, ending = json.dumps({topic: {"0": 8, "1": -2}}), json.dumps({topic: {"0": -1, "1": 3}})
    expected = [(0, 8), (0, 9), (1, 0), (1, 1), (1, 2)]
    assert await read(subscribe=topic, startingOffsets=starting, endingOffsets=ending) == expected
    at_end = json.dumps({topic: {"0": 10, "1": -1}})
    assert await read(subscribe=topic, startingOffsets=at_end) == []
    assert await read(subscribe=topic, startingTimestamp="1700000000008") == [(0, 8), (0, 9), (1, 8), (1, 9)]
    for wrong in ({"0": 11}, {"0": -3}, {"0": "x"}, {"7": 0}):
        with pytest.raises(InvalidRequest):
            await read(subscribe=topic, startingOffsets=json.dumps({topic: wrong}))
    with pytest.raises(ChannelNotFound, match="nowhere"):
        await read(subscribe=f"{topic},nowhere")
    assert len(await read(subscribe=f"{topic},nowhere", failOnDataLoss="false")) == 20


@pytest.mark.broker
async def test_micro_batches_hold_each_entry_once_and_new_partitions_join(kafka):
    topic = await filled(kafka)
    options = ReadOptions.parse(
        {SERVERS: kafka.bootstrap, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "6"},
        streaming=True,
    )
    plan = open_plan(options)

    def drain(at: Any) -> tuple[list[int], list[tuple[int, int]], Any]:
        sizes, found = [], []
        while (upto := plan.newest()) is not None and (end := plan.next(at, upto, options.limits)) is not None:
            rows = rows_of(options, plan.tasks(at, end))
            sizes.append(len(rows))
            found += [(row["partition"], row["offset"]) for row in rows]
            at = json.loads(json.dumps(end))  # as Spark keeps it
        return sizes, found, at

    try:
        begin = await asyncio.to_thread(plan.begin)
        sizes, found, at = await asyncio.to_thread(drain, begin)
        assert sizes == [6, 6, 6, 2]
        assert sorted(found) == [(number, at) for number in range(2) for at in range(10)]
        await add_partitions(kafka, topic, 3)
        async with opened(kafka) as wal:
            await wal.append_many([Append(f"{topic}:2", b"new"), Append(f"{topic}:0", b"more")])
        _, found, _ = await asyncio.to_thread(drain, at)
        assert sorted(found) == [(0, 10), (2, 0)]
    finally:
        plan.close()


@pytest.mark.broker
async def test_on_pulsar_partitions_are_read_with_ids_in_place_of_offsets(pulsar):
    others = Others(pulsar)
    topic, plain = await asyncio.to_thread(others.make, 2), await asyncio.to_thread(others.make)
    await asyncio.to_thread(others.send, f"{topic}-partition-1", b"one", partition_key="k", properties={"h": "1"})
    await asyncio.to_thread(others.send, plain, b"two")
    await asyncio.to_thread(others.client.close)
    columns = tuple(foreign_columns(numbered=False, headers=True))

    def read(**given: str) -> list[dict[str, Any]]:
        options = ReadOptions.parse({"wal": others.url, "subscribe": f"{topic},{plain}", **given}, streaming=False)
        plan, log = open_plan(options), open_log(options.wal)
        try:
            assert tuple(plan.schema().names) == tuple(foreign_columns(numbered=False))
            batches = [batch for task in plan.all_tasks() for batch in scan_channel(log, task, columns)]
        finally:
            plan.close()
            log.close()
        return [row for batch in batches for row in batch.to_pylist()]

    found = {row["value"]: row for row in await asyncio.to_thread(read)}
    one, two = found[b"one"], found[b"two"]
    assert (one["key"], one["topic"], one["partition"], one["headers"]) == (
        b"k",
        topic,
        1,
        [{"key": "h", "value": b"1"}],
    )
    assert (two["key"], two["topic"], two["partition"], two["headers"]) == (None, plain, 0, None)
    assert len(one["_id"]) == 20
    with pytest.raises(InvalidRequest, match="no offsets"):
        await asyncio.to_thread(lambda: read(startingOffsets=json.dumps({plain: {"0": 1}})))


# ---- writing ---------------------------------------------------------------------------------------------------------


def schema(**kinds: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


def test_rows_become_entries_with_all_that_kafkas_sink_takes():
    header = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    kinds = {
        "headers": t.ArrayType(header),
        "key": t.StringType(),
        "partition": t.IntegerType(),
        "value": t.BinaryType(),
        "timestamp": t.TimestampType(),
    }
    plan = plan_foreign(schema(**kinds), ("orders",))
    batch = pa.RecordBatch.from_pydict(
        {
            "headers": pa.array([[("h", b"1"), ("h", None)], None], pa.list_(HEADER)),
            "key": ["k", None],
            "partition": pa.array([None, 3], pa.int32()),
            "value": [None, b""],
            "timestamp": pa.array([1_700_000_000_000_000, None], pa.timestamp("us", tz="UTC")),
        }
    )
    gone, plain = plan.entries(batch)
    assert gone == Append("orders", b"", 1_700_000_000_000 << 18, b"k", (("h", b"1"), ("h", None)))
    assert isinstance(gone.payload, Tombstone)
    assert plain == Append("orders:3", b"", 0, None, ())
    assert not isinstance(plain.payload, Tombstone)


def test_a_commit_holds_no_more_rows_and_bytes_than_it_may():
    entries = [Append("orders", bytes(1024))] * (ROWS + 1)
    assert list(map(len, in_commits(entries))) == [ROWS, 1]
    assert list(map(len, in_commits([Append("orders", bytes(BYTES))] * 3))) == [1, 1, 1]
    assert list(in_commits([])) == []


def test_a_write_that_cannot_be_honoured_is_refused_by_name():
    for given in ({"txnAppId": "a", "txnVersion": "1"}, {"collection": "flights"}, {"allowOldBatches": "true"}):
        with pytest.raises(ConfigError) as refused:
            SinkOptions.parse({SERVERS: "h:1", **given}, streaming=False)
        assert refused.value.fields["key"] == next(iter(given))
    with pytest.raises(ConfigError, match="one topic"):
        plan_foreign(schema(value=t.StringType()), ("a", "b"))
    with pytest.raises(InvalidSchema, match="partition"):
        plan_foreign(schema(value=t.StringType(), partition=t.StringType()), ("a",))


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.timeout(300)
def test_a_query_of_sparks_kafka_source_and_sink_goes_on_with_another_word(kafka, spark, tmp_path):
    source, target = asyncio.run(filled(kafka, 2, 5)), asyncio.run(make_topic(kafka, 3))

    def query() -> None:
        stream = spark.readStream.format("tidewal").option(SERVERS, kafka.bootstrap).option("subscribe", source)
        rows = stream.option("startingOffsets", "earliest").option("includeHeaders", "true").load()
        assert [(field.name, field.dataType.simpleString()) for field in rows.schema] == [
            ("key", "binary"),
            ("value", "binary"),
            ("topic", "string"),
            ("partition", "int"),
            ("offset", "bigint"),
            ("timestamp", "timestamp"),
            ("timestampType", "int"),
            ("headers", "array<struct<key:string,value:binary>>"),
        ]
        written = rows.selectExpr("CAST(value AS STRING) AS key", "concat(value, '!') AS value")
        copy = written.writeStream.format("tidewal").option(SERVERS, kafka.bootstrap).option("topic", target)
        copy = copy.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True)
        copy.start().awaitTermination(120)

    def result() -> list[tuple[bytes, bytes]]:
        read = spark.read.format("tidewal").option(SERVERS, kafka.bootstrap).option("subscribe", target).load()
        return sorted((bytes(row.key), bytes(row.value)) for row in read.select("key", "value").collect())

    async def add() -> None:
        async with producing(kafka) as producer:
            await producer.send_and_wait(source, b"later", partition=0)

    query()
    asyncio.run(add())
    query()
    expected = [b"%d" % at for at in range(5) for _ in range(2)] + [b"later"]
    assert result() == sorted((value, value + b"!") for value in expected)
    theirs = asyncio.run(consumed(kafka, target, len(expected)))
    assert {record.value for record in theirs} == {value + b"!" for value in expected}
    empty = spark.createDataFrame([("k", None)], "key string, value string")
    writer = empty.write.format("tidewal").mode("append").option(SERVERS, kafka.bootstrap)
    writer.option("topic", target).save()
    gone = asyncio.run(consumed(kafka, target, len(expected) + 1))
    assert [(record.key, record.value) for record in gone if record.value is None] == [(b"k", None)]
