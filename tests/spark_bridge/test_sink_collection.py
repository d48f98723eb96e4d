"""Collections are written exactly once: tasks as Spark runs them, killed, repeated and doubled, against a real node."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import DeadlineExceeded, InvalidRequest, InvalidRows
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import From, Wal
from tidewal.runtime.ownership import producers
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.rpc.client import RpcClient
from tidewal.runtime.testing.clock import VirtualLoop, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.spark_bridge.sink.chunks import chunks
from tidewal.spark_bridge.sink.collection import ChunkSender, Division, Task, division
from tidewal.spark_bridge.sink.ledger import upto

sys.path.insert(0, str(Path(__file__).parent))
from story import Row, batch_of

SCHEMA = CollectionSchema("numbers", (Field("key", "varchar"), Field("value", "int64", nullable=True)), "key")
LOGS = [
    "memory",
    "rocksmq-socket",
    pytest.param("kafka", marks=pytest.mark.broker),
    pytest.param("pulsar", marks=pytest.mark.broker),
]


class Cluster:
    """A node, and what Spark's processes have of it."""

    def __init__(self, wal: Wal, client: Client, rpc_client: RpcClient, collection: Collection) -> None:
        self.wal, self.client, self.collection = wal, client, collection
        self._rpc_client = rpc_client

    async def rpc_client(self) -> RpcClient:
        return self._rpc_client

    def sender(self, batch: int, partition: int, deadline_s: float = 30.0) -> ChunkSender:
        return ChunkSender(self.rpc_client, self.collection, Task("q", batch, partition), deadline_s)

    async def write(self, batch: int, partition: int, rows: list[Row], divided: Division) -> None:
        """One task."""
        sender = self.sender(batch, partition)
        given = [batch_of(SCHEMA, rows[at : at + 7]) for at in range(0, len(rows), 7)]
        found = chunks(given, SCHEMA, shards=divided.shards, chunk_bytes=divided.chunk_bytes)
        for number, chunk in enumerate(found):
            await sender.send(number, chunk)


@asynccontextmanager
async def cluster(wal: Wal, tables: Path, **settings: Any) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Standalone(wal, tables, **settings))
        client = await stack.enter_async_context(node.client())
        collection = await client.create_collection(SCHEMA, shards=2)
        rpc_client = RpcClient(wal, Names(), name="spark", shared=True)
        await rpc_client.open()
        stack.push_async_callback(rpc_client.close)
        yield Cluster(wal, client, rpc_client, collection)


def rows_of(batch: int, partition: int, count: int) -> list[Row]:
    return [
        {"key": f"{batch}/{partition}/{number}", "value": batch * 1000 + number, "_op": "upsert"}
        for number in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backend", LOGS, indirect=True)
async def test_each_row_is_written_once_whichever_attempt_dies(
    backend: Any, tmp_path: Path, rng: random.Random
) -> None:
    async with cluster(await backend.wal(), tmp_path) as spark:
        expected: dict[str, int] = {}
        divided = (await division(spark.wal, spark.collection))._replace(chunk_bytes=400)
        for batch in range(4):
            for _ in range(rng.randrange(1, 3)):  # once more: Spark died between our commit and its own
                attempts: list[asyncio.Future[None]] = []
                for partition in range(2):
                    rows = rows_of(batch, partition, 40 + batch)
                    expected |= {str(row["key"]): int(str(row["value"])) for row in rows}
                    for _ in range(rng.randrange(3)):  # killed at some point, with a request on its way or none
                        task = asyncio.ensure_future(
                            spark.write(batch, partition, rng.sample(rows, len(rows)), divided)
                        )
                        await asyncio.wait([task], timeout=rng.uniform(0, 0.02))
                        if rng.random() < 0.5:
                            task.cancel()
                        attempts.append(task)  # else it is a zombie beside the next one
                    attempts.append(
                        asyncio.ensure_future(spark.write(batch, partition, rng.sample(rows, len(rows)), divided))
                    )
                for result in await asyncio.gather(*attempts, return_exceptions=True):
                    assert result is None or isinstance(result, asyncio.CancelledError)
        stats = await spark.client.stats("numbers", consistency="strong")
        assert stats.versions["upsert"] == len(expected) == stats.rows
        table = (await spark.client.query("numbers", consistency="strong")).table
        assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "rates"),
    [
        ("-re", Rates(drop=0.2, duplicate=0.2, delay=0.2, delay_s_max=0.5)),  # requests and replies
        ("dml", Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.1)),  # where the rows go: new terms decide
    ],
)
def test_each_row_is_written_once_over_a_log_that_fails(
    channels: str, rates: Rates, tmp_path: Path, rng: random.Random
) -> None:
    async def in_place(call: Any) -> Any:
        return call()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        node: dict[str, Any] = {"clock": loop.clock, "threads": False, "blocking": in_place, "name": "node"}
        wal = MemoryWal()
        async with cluster(wal, tmp_path, **node) as spark:
            wal.faults = FaultPlan(rng.randrange(2**32), rates, channels=channels)
            for batch in range(5):
                rows = [rows_of(batch, partition, 30) for partition in range(2)]
                attempts = [
                    asyncio.ensure_future(
                        spark.write(batch, partition, rng.sample(rows[partition], 30), Division(1, 300))
                    )
                    for partition in (0, 1, 0, 1)  # each beside a zombie
                ]
                await asyncio.gather(*attempts)
            wal.faults = None
            stats = await spark.client.stats("numbers", consistency="strong")
            assert (stats.versions["upsert"], stats.rows) == (300, 300)

    run_virtual(main())


def chunk(rows: list[Row]) -> Any:
    return next(chunks([batch_of(SCHEMA, rows)], SCHEMA))


async def test_other_rows_under_a_number_are_an_error_that_says_so(tmp_path: Path) -> None:
    async with cluster(MemoryWal(), tmp_path) as spark:
        await spark.sender(7, 1).send(0, chunk(rows_of(7, 1, 10)))
        await spark.sender(7, 1).send(0, chunk(rows_of(7, 1, 10)[::-1]))  # the order is no matter
        for others in (rows_of(7, 1, 9), rows_of(8, 1, 10)):
            with pytest.raises(InvalidRequest, match=r"batch 7 has been written in part .* partition 1 .*rand\(\)"):
                await spark.sender(7, 1).send(0, chunk(others))
        stats = await spark.client.stats("numbers", consistency="strong")
        assert stats.versions["upsert"] == 10


async def test_a_chunk_that_is_long_forgotten_is_known_to_have_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "REMEMBERED_PER_PRODUCER", 5)
    async with cluster(MemoryWal(), tmp_path) as spark:
        parts = [chunk(rows_of(0, number, 3)) for number in range(20)]
        for _ in range(2):
            sender = spark.sender(0, 0)
            for number, each in enumerate(parts):
                await sender.send(number, each)
            sender.finish()
        stats = await spark.client.stats("numbers", consistency="strong")
        assert stats.versions["upsert"] == 60


async def test_what_is_forgotten_is_compared_by_what_comes_behind_it_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "REMEMBERED_PER_PRODUCER", 5)
    async with cluster(MemoryWal(), tmp_path) as spark:
        parts = [chunk(rows_of(0, number, 3)) for number in range(20)]
        sender = spark.sender(3, 0)
        for number, each in enumerate(parts):
            await sender.send(number, each)
        other = spark.sender(3, 0)
        await other.send(0, chunk(rows_of(0, 77, 3)))  # nothing tells yet that these are others

        async def send_on() -> None:
            for number in range(1, 20):
                await other.send(number, parts[number])

        # each of the two channels remembers five
        with pytest.raises(InvalidRequest, match=r"chunk 1\d of partition 0 had 3 rows, now it has 3, or other values"):
            await send_on()
        shorter = spark.sender(3, 0)
        await shorter.send(0, parts[0])
        with pytest.raises(InvalidRequest, match="batch 3 was begun so long ago that it is not known any more"):
            shorter.finish()
        with pytest.raises(InvalidRequest, match="batch 2 is not written: batch 3 is done, and this one is older"):
            await spark.sender(2, 0).send(0, parts[0])
        for batch in (0, 2):
            allowed = ChunkSender(spark.rpc_client, spark.collection, Task("q", batch, 0), 30.0, allow_old=True)
            await allowed.send(0, chunk(rows_of(0, 77, 3)))
            allowed.finish()
        allowed = ChunkSender(spark.rpc_client, spark.collection, Task("q", 3, 0), 30.0, allow_old=True)
        await allowed.send(0, parts[0])
        with pytest.raises(InvalidRequest, match="batch 3 was begun so long ago"):  # it is not old
            allowed.finish()
        assert (await spark.client.stats("numbers", consistency="strong")).versions["upsert"] == 60


async def test_another_operation_and_other_values_under_a_number_are_an_error(tmp_path: Path) -> None:
    async with cluster(MemoryWal(), tmp_path) as spark:
        rows = rows_of(0, 0, 5)
        await spark.sender(0, 0).send(0, chunk(rows))
        for other in ({"_op": "delete"}, {"value": -1}, {"value": None}):
            with pytest.raises(InvalidRequest, match="or other values"):
                await spark.sender(0, 0).send(0, chunk([*rows[:4], rows[4] | other]))
        await spark.sender(0, 0).send(0, chunk(rows[::-1]))


async def test_rows_that_the_proxy_refuses_are_named_by_their_key(tmp_path: Path) -> None:
    schema = CollectionSchema("ratios", (Field("key", "varchar"), Field("ratio", "double")), "key")
    async with cluster(MemoryWal(), tmp_path) as spark:
        collection = await spark.client.create_collection(schema, shards=1)
        sender = ChunkSender(spark.rpc_client, collection, Task("q", 0, 0), 5.0)
        rows: list[Row] = [{"key": "a", "ratio": 1.0, "_op": "insert"}, {"key": "b", "ratio": None, "_op": "insert"}]
        with pytest.raises(InvalidRows, match=r"'ratio' is null and cannot be \(the row with key='b'\)"):
            await sender.send(0, next(chunks([batch_of(schema, rows)], schema)))
        gone = replace(collection, id=collection.id + 1)
        with pytest.raises(InvalidRows, match="'ratios' was dropped or changed while batch 3 was being written"):
            await ChunkSender(spark.rpc_client, gone, Task("q", 3, 0), 5.0).send(
                0, next(chunks([batch_of(schema, rows[:1])], schema))
            )


@pytest.mark.slow
async def test_a_node_that_refuses_is_asked_again_until_the_deadline(tmp_path: Path) -> None:
    settings = Settings.model_validate({"quotaAndLimits": {"limitWriting": {"forceDeny": True}}})
    async with cluster(MemoryWal(), tmp_path, settings=settings) as spark:
        with pytest.raises(DeadlineExceeded, match=r"batch 0 could not be written within 0\.5 s .*forceDeny"):
            await spark.sender(0, 0, deadline_s=0.5).send(0, chunk(rows_of(0, 0, 1)))


@pytest.mark.broker
@pytest.mark.parametrize("backend", ["kafka", "pulsar"], indirect=True)
async def test_where_channels_are_not_written_together_a_chunk_is_one_message(backend: Any, tmp_path: Path) -> None:
    wal = await backend.wal()
    async with cluster(wal, tmp_path) as spark:
        divided = await division(wal, spark.collection)
        assert divided.shards == 2
        rows: list[Row] = [
            {"key": f"{number}" + "x" * 5000, "value": number, "_op": "insert"} for number in range(2500)
        ]
        found = list(chunks([batch_of(SCHEMA, rows)], SCHEMA, shards=2, chunk_bytes=divided.chunk_bytes))
        assert len(found) > 2
        for number, each in enumerate(found):
            await spark.sender(0, 0).send(number, each)
        assert await spark.client.count("numbers", consistency="strong") == 2500
        records: list[Record] = []
        for name in map(pchannel_of, spark.collection.vchannels):
            last = await wal.latest_id(name)
            assert last is not None
            async with aclosing(upto(wal, name, From.EARLIEST, last)) as entry_lists:
                records += [decode(entry.payload) async for entries in entry_lists for entry in entries]
        written = [record for record in records if record.type is RecordType.ROWS]
        assert len(written) == len(found)
        assert all(record.part is None for record in written)
