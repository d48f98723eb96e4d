"""Writing from a real Spark, into a real node's collections and into topics."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F

from tests.backends import log_url
from tests.turns import cases_in_turn
from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, decode
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal
from tidewal.spark_bridge.sink.ledger import upto

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, Row, random_row

pytestmark = pytest.mark.spark

COPY = replace(FLIGHTS, name="copy")


class Loop:
    """A loop on a thread, where a node or a log runs while Spark blocks this one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Node:
    """A standalone node, asked from outside its loop."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.url = f"rocksmq://{directory / 'log'}"
        self._loop, self._directory = loop, directory
        self.start()
        for schema in (FLIGHTS, COPY):
            self.ask(lambda client, schema=schema: client.create_collection(schema, shards=2))

    def start(self) -> None:
        self.wal: Wal = self._loop.run(RocksMQ.open(str(self._directory / "log"), segment_bytes=4 << 20))
        self._node = Standalone(self.wal, self._directory / "tables")
        self._loop.run(self._node.__aenter__())

    def ask(self, question: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
        async def asked() -> Any:
            async with self._node.client() as client:
                return await question(client)

        return self._loop.run(asked())

    def apply(self, rows: list[Row]) -> None:
        """Write, and store a cut behind it."""
        self.ask(lambda client: client.apply("flights", rows))
        self.ask(lambda client: client.cut("flights"))

    def rows(self, collection: str) -> dict[str, Row]:
        answer = self.ask(lambda client: client.query(collection, consistency="strong"))
        return {row["flight"]: row for row in answer.table.to_pylist()}

    def versions(self, collection: str) -> dict[str, int]:
        return dict(self.ask(lambda client: client.stats(collection, consistency="strong")).versions)

    def close(self) -> None:
        self._loop.run(self._node.close())
        self._loop.run(self.wal.close())


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def node(loop: Loop, tmp_path: Path) -> Iterator[Node]:
    made = Node(loop, tmp_path)
    yield made
    made.close()


def run_stream(frame: Any, checkpoint: Path, **options: str) -> None:
    """To the newest there is."""
    query = (
        frame.writeStream.format("tidewal")
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(200)


def forget_last_commit(checkpoint: Path) -> int:
    """As if Spark had died before it noted its last batch as done: it runs that batch again."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
    return int(last.name)


async def content(wal: Wal, topic: str) -> list[Record]:
    last = await wal.latest_id(topic)
    if last is None:
        return []
    async with aclosing(upto(wal, topic, From.EARLIEST, last)) as entry_lists:
        return [decode(entry.payload) async for entries in entry_lists for entry in entries]


def test_source_to_sink_to_source(spark: Any, node: Node, tmp_path: Path, rng: random.Random) -> None:
    """The last batch runs twice, and the workers' connections outlive the node that they were made to."""
    stream = spark.readStream.format("tidewal").options(wal=node.url, collection="flights", startingOffsets="earliest")
    checkpoint = tmp_path / "checkpoint"
    written = Counter(insert=0, upsert=0, delete=0)
    for round in range(2):
        for _ in range(3):
            rows = [random_row(rng) for _ in range(40)]
            written.update(str(row["_op"]) for row in rows)
            node.apply(rows)
        for _ in range(round + 1):
            run_stream(stream.load(), checkpoint, wal=node.url, collection="copy")
            assert node.rows("copy") == node.rows("flights")
            assert node.versions("copy") == written
            forget_last_commit(checkpoint)
        node.close()
        node.start()
    node.ask(lambda client: client.cut("copy"))
    again = spark.read.format("tidewal").options(wal=node.url, collection="copy").load()
    assert Counter(row["_op"] for row in again.select("_op").collect()) == written


@pytest.mark.long
def test_shuffled_batches_that_run_again_change_nothing(spark: Any, node: Node, tmp_path: Path) -> None:
    """An aggregation in complete mode, and one in update mode by way of `foreachBatch`."""
    flights = [{**random_row(random.Random(1)), "_op": "insert", "place": [0.0, 1.0]} for _ in range(200)]
    node.apply([{**row, "flight": f"F{number}"} for number, row in enumerate(flights)])
    stream = spark.readStream.format("tidewal").options(wal=node.url, collection="flights", startingOffsets="earliest")
    counted = (
        stream.load()
        .groupBy(F.concat(F.lit("group "), F.substring("flight", -1, 1)).alias("flight"))
        .agg(F.count("*").cast("short").alias("stops"))
        .withColumn("place", F.array(F.lit(0.5), F.lit(1.5)))
    )
    target = {"wal": node.url, "collection": "copy"}

    def upsert(frame: Any, number: int) -> None:
        once = {"txnAppId": "means", "txnVersion": str(number)}
        frame.write.format("tidewal").mode("append").options(**target, **once).save()

    def run_twice(query: Any, checkpoint: Path) -> Iterator[int]:
        """The last batch runs again. How many there are by now."""
        for _ in range(2):
            running = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
            assert running.awaitTermination(200)
            yield 1 + forget_last_commit(checkpoint)

    complete = counted.writeStream.format("tidewal").outputMode("complete").options(**target)
    for batches in run_twice(complete, tmp_path / "complete"):  # each has all groups
        assert node.versions("copy")["upsert"] == 10 * batches
    before = 10 * batches
    updates = counted.writeStream.foreachBatch(upsert).outputMode("update")
    for _ in run_twice(updates, tmp_path / "updates"):  # nothing changes behind the first
        assert node.versions("copy")["upsert"] == before + 10
    assert {row["flight"]: row["stops"] for row in node.rows("copy").values()} == {f"group {n}": 20 for n in range(10)}


def topic_frame(spark: Any, count: int, salt: str) -> Any:
    key = F.col("id").cast("string")
    return spark.range(count).select(key.alias("key"), F.concat(F.lit(salt), key).alias("value"))


def test_batches_into_a_collection(spark: Any, node: Node) -> None:
    frame = spark.range(500).select(
        F.concat(F.lit("F"), "id").alias("flight"), F.array(F.lit(1.0), F.col("id") / 2).alias("place")
    )
    writer = frame.write.format("tidewal").mode("append").options(wal=node.url, collection="flights")
    writer.save()
    assert node.rows("flights")["F7"]["place"] == [1.0, 3.5]
    for _ in range(2):  # a version that is there is not written again, however it is divided
        frame.repartition(3).write.format("tidewal").mode("append").options(
            wal=node.url, collection="flights", txnAppId="loader", txnVersion="4"
        ).save()
    once = frame.write.format("tidewal").mode("append").options(wal=node.url, collection="flights", txnAppId="loader")
    with pytest.raises(PySparkException, match="batch 3 is not written: batch 4 is done, and this one is older"):
        once.option("txnVersion", "3").save()
    once.option("txnVersion", "4").option("operation", "delete")
    with pytest.raises(PySparkException, match="batch 4 is not written: this batch is done, and had other rows"):
        once.save()
    once.option("allowOldBatches", "true").save()
    assert node.versions("flights") == {"insert": 0, "upsert": 1000, "delete": 0}
    writer.option("operation", "delete").save()
    assert node.rows("flights") == {}
    frame.drop("place").write.format("tidewal").mode("append").options(
        wal=node.url, collection="made", primaryKey="flight"
    ).save()
    assert node.rows("made").keys() == {f"F{number}" for number in range(500)}
    assert node.versions("flights") == {"insert": 0, "upsert": 1000, "delete": 500}


def test_what_does_not_fit_is_told_in_words(spark: Any, node: Node, tmp_path: Path) -> None:
    frame = spark.range(5).select(
        F.col("id").cast("string").alias("flight"), F.array(F.lit(1.0), F.lit(2.0)).alias("place")
    )

    def save(frame: Any, mode: str = "append", **options: str) -> None:
        frame.write.format("tidewal").mode(mode).options(**{"wal": node.url, "collection": "flights", **options}).save()

    for wrong, options, text in [
        (frame, {"collection": "trains"}, "no collection 'trains' .*there are: copy, flights.*primaryKey"),
        (frame, {"wal": f"rocksmq://{tmp_path}/nowhere"}, r"start one \(tidewal run"),
        (frame, {"operations": "delete"}, "unknown option 'operations' of a write; did you mean"),
        (frame.drop("place"), {}, "column 'place' is missing: it cannot be null in collection 'flights'"),
        (frame.withColumn("delay", F.lit("1")), {}, "column 'delay' is string, which does not convert to double"),
        (
            frame.withColumn("place", F.array(F.lit(1.0))),
            {},
            r"'place' of the row with the key '\d' has 1 floats, not 2",
        ),
        (frame.withColumn("flight", F.lit(None).cast("string")), {}, "the key 'flight' of . rows is null"),
        (frame.withColumn("place", F.array(F.lit(1.0), F.lit(float("nan")))), {}, r"NaN.*\(the row with flight='\d'\)"),
        (topic_frame(spark, 1, ""), {"collection": "", "topic": "nowhere"}, "no topic 'nowhere': create the channel"),
    ]:
        with pytest.raises(PySparkException, match=text):
            save(wrong, **options)
    with pytest.raises(PySparkException, match=r"Tidewal adds to what is there: use mode\('append'\)"):
        save(frame, "overwrite")
    assert node.versions("flights") == {"insert": 0, "upsert": 0, "delete": 0}


@pytest.mark.parametrize(
    "log",
    ["rocksmq", *cases_in_turn(("kafka", "pulsar"), pytest.mark.broker, pytest.mark.slow, pytest.mark.long)],
)
def test_topics(spark: Any, log: str, loop: Loop, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Batches and a stream into two channels; the stream's last batch runs twice, and once more from its middle."""
    last = 2 if log == "rocksmq" else 0  # Spark does the same on each log, and takes longer on brokers
    url = f"rocksmq://{tmp_path / 'log'}" if log == "rocksmq" else log_url(log, request.getfixturevalue(log))
    wal = loop.run(open_wal(url, **({"own": True} if log == "rocksmq" else {})))

    def values() -> Counter[str]:
        return Counter(bytes(each.body).decode() for topic in ("a", "b") for each in loop.run(content(wal, topic)))

    try:
        for topic in ("a", "b"):
            loop.run(wal.create_channel(topic, ChannelPolicy()))
        topic_frame(spark, 100, "job ").write.format("tidewal").mode("append").options(wal=url, topic="a, b").save()
        expected = Counter(f"job {number}" for number in range(100))
        assert values() == expected
        assert [name for name in loop.run(wal.channels()) if "spark" in name] == []
        keys = [{bytes(each.key) for each in loop.run(content(wal, topic))} for topic in ("a", "b")]
        assert all(keys)
        assert not keys[0] & keys[1]

        for count in (50, 50, 49):
            once = (
                topic_frame(spark, count, "once ")
                .write.format("tidewal")
                .mode("append")
                .options(wal=url, topic="a,b", txnAppId="app", txnVersion="1")
            )
            if count == 50:
                once.save()
            else:
                with pytest.raises(PySparkException, match="this batch is done, and had other rows"):
                    once.save()
        expected.update(f"once {number}" for number in range(50))
        assert values() == expected

        folder = tmp_path / "in"
        folder.mkdir()
        lines = spark.readStream.text(str(folder)).select(F.col("value").alias("key"), "value").repartition(3)
        for round in range(last + 1):
            (folder / f"{round}.txt").write_text("".join(f"line {round} {number}\n" for number in range(60)))
            run_stream(lines, tmp_path / "checkpoint", wal=url, topic="a,b")
            expected.update(f"line {round} {number}" for number in range(60))
            assert values() == expected
            forget_last_commit(tmp_path / "checkpoint")
            run_stream(lines, tmp_path / "checkpoint", wal=url, topic="a,b")
            assert values() == expected
        forget_last_commit(tmp_path / "checkpoint")
        (tmp_path / f"checkpoint/offsets/{last}").unlink()  # as in a copy of the checkpoint from before that batch
        (folder / "new.txt").write_text("new\n")
        refused = f"batch {last} is not written: this batch is done, and had other"
        with pytest.raises(StreamingQueryException, match=refused):
            run_stream(lines, tmp_path / "checkpoint", wal=url, topic="a,b")
        assert values() == expected
    finally:
        loop.run(wal.close())


def test_a_column_names_the_topic_and_a_wrong_one_stops_the_batch(spark: Any, loop: Loop, tmp_path: Path) -> None:
    url = f"rocksmq://{tmp_path / 'log'}"
    wal = loop.run(open_wal(url, own=True))
    try:
        for topic in ("a", "b"):
            loop.run(wal.create_channel(topic, ChannelPolicy()))
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "0.txt").write_text("".join(f"{number}\n" for number in range(100)))
        lines = spark.readStream.text(str(folder))
        by_column = lines.withColumn("topic", F.when(F.col("value").cast("int") % 2 == 0, "a").otherwise("b"))
        run_stream(by_column, tmp_path / "checkpoint", wal=url)
        assert sorted(int(bytes(each.body)) for each in loop.run(content(wal, "b"))) == list(range(1, 100, 2))
        (folder / "1.txt").write_text("".join(f"{number}\n" for number in range(100, 200)))
        missing = lines.withColumn("topic", F.lit("nowhere"))
        with pytest.raises(StreamingQueryException, match="nowhere"):
            run_stream(missing, tmp_path / "checkpoint", wal=url)
        run_stream(by_column, tmp_path / "checkpoint", wal=url)
        assert sorted(int(bytes(each.body)) for each in loop.run(content(wal, "a"))) == list(range(0, 200, 2))
    finally:
        loop.run(wal.close())
