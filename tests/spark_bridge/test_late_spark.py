"""The source in Spark over a node whose channels are slow, and over one most of whose channels are idle."""

from __future__ import annotations

import asyncio
import datetime
import random
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import functions as F

from tidewal.actors.rows import split_by_shard, to_batch
from tidewal.actors.standalone import standalone

sys.path.insert(0, str(Path(__file__).parent))
from kill_facts import LAST_ID, NUMBERS, SHARDS
from kill_kit import Node

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 4000


@pytest.mark.long
def test_micro_batches_over_slow_channels_hold_what_was_acknowledged(spark, tmp_path: Path, rng: random.Random) -> None:
    node = Node(f"rocksmq://{tmp_path}/log", tmp_path, rng)
    batches: list[list[Any]] = []
    try:
        frame = (
            spark.readStream.format("tidewal")
            .options(wal=node.url, collection=NUMBERS.name, startingOffsets="earliest", maxRowsPerTrigger="500")
            .load()
            .select("id", "_ts", "_watermark", "_channel")
        )
        query = (
            frame.writeStream.foreachBatch(lambda batch, _: batches.append(batch.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        node.follow(ROWS)
        end = node.stop_writing()
        query.processAllAvailable()
        query.stop()
    finally:
        node.end()
    begin = 0
    for batch in filter(None, batches):
        [upto] = {row["_watermark"] for row in batch}
        expected = {
            (id, ts) for ts, first, count in node.rows if begin < ts <= upto for id in range(first, first + count)
        }
        found = [(row["id"], row["_ts"]) for row in batch if row["id"] != LAST_ID]
        assert len(found) == len(expected)
        assert set(found) == expected
        begin = upto
    assert begin >= end  # the node makes cuts of its own too
    assert len(batches) > 3
    assert len({row["_channel"] for batch in batches for row in batch}) == SHARDS


class Background:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.mark.long
def test_event_time_advances_while_all_channels_but_one_are_idle(spark, background: Background, tmp_path: Path) -> None:
    stack = AsyncExitStack()

    async def begin() -> Any:
        node = await stack.enter_async_context(standalone(tmp_path / "home"))
        client = await stack.enter_async_context(node.client())
        await client.create_collection(NUMBERS, shards=SHARDS)
        return client

    client = background.run(begin())
    try:
        some = to_batch([{"id": id} for id in range(1000)], NUMBERS, op="insert")
        busy = split_by_shard(some, NUMBERS, SHARDS)[2]
        assert busy is not None
        ids = busy.column("id").to_pylist()
        rows = (
            spark.readStream.format("tidewal")
            .options(wal=f"rocksmq://{tmp_path}/home/log", collection=NUMBERS.name, startingOffsets="earliest")
            .load()
        )
        windows = rows.withWatermark("_time", "0 seconds").groupBy(F.window("_time", "10 milliseconds")).count()
        query = (
            windows.writeStream.outputMode("append")
            .format("memory")
            .queryName("windows")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        written: list[int] = []
        for id in ids[:5]:
            written.append(background.run(client.insert(NUMBERS.name, [{"id": id}])).ts)
            background.run(client.cut(NUMBERS.name))
            query.processAllAvailable()  # takes longer than a window
        found = {
            int(row["window"]["start"].timestamp() * 1000): row["count"] for row in spark.table("windows").collect()
        }
        watermark = query.lastProgress["eventTime"]["watermark"]
        query.stop()
        assert found == dict.fromkeys([(ts >> 18) // 10 * 10 for ts in written[:-1]], 1)
        last = datetime.datetime.fromtimestamp((written[-1] >> 18) / 1000, datetime.UTC)
        assert datetime.datetime.fromisoformat(watermark) == last
    finally:
        background.run(stack.aclose())
