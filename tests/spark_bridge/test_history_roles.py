"""A real node stores, flushes and lets go of the log; a hybrid read gets every row that was acknowledged."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.backends import Backend, fill_segment
from tests.turns import cases_in_turn
from tidewal.actors.client import Client
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.standalone import Standalone
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.replicated.replica import Replica
from tidewal.runtime.tables.table_store import LOG, open_tables
from tidewal.spark_bridge.connection_cache import close_idle
from tidewal.spark_bridge.options import ReadOptions
from tidewal.spark_bridge.plan.open_plan import open_plan
from tidewal.spark_bridge.scan.channel_range import ChannelRange
from tidewal.spark_bridge.scan.columns import arrow_columns
from tidewal.spark_bridge.scan.scanner import scan

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, Row, random_row

COLUMNS = tuple(arrow_columns(FLIGHTS))
Applied = dict[int, list[tuple[str, str]]]


def read(url: str, tables: Path, starting: str, ending: str) -> tuple[list[Row], int]:
    """The rows between two cuts, as Spark's processes get them, and how many of them came from the log."""
    with closing(open_plan(ReadOptions(url, "flights", history=str(tables), starting=starting, ending=ending))) as plan:
        tasks = plan.all_tasks()
    rows: list[Row] = []
    unstored = 0
    for task in tasks:
        some = [row for batch in scan(task, COLUMNS) for row in batch.to_pylist()]
        rows += some
        unstored += len(some) if isinstance(task, ChannelRange) else 0
    close_idle()
    return rows, unstored


def left_in_log(url: str) -> int:
    with closing(open_plan(ReadOptions(url, "flights"))) as plan:
        tasks = plan.all_tasks()
    return sum(batch.num_rows for task in tasks for batch in scan(task, ("_ts",)))


def by_time(rows: list[Row]) -> Applied:
    found: Applied = {}
    for row in rows:
        found.setdefault(int(str(row["_ts"])), []).append((str(row["flight"]), str(row["_op"])))
    return {ts: sorted(each) for ts, each in found.items()}


async def write(client: Client, rng: random.Random, applied: Applied, batches: int = 3) -> None:
    for _ in range(batches):
        rows = [random_row(rng) for _ in range(rng.randrange(1, 30))]
        ts = (await client.apply("flights", rows)).ts
        applied[ts] = sorted((str(row["flight"]), str(row["_op"])) for row in rows)


async def forget(backend: Backend, wal: Wal) -> None:
    """Let retention remove all that no hold keeps."""
    names = Names()
    for channel in await wal.channels():
        latest = await wal.latest_id(channel)
        kept = channel in (names.catalog, names.cluster) or channel.startswith(names.pchannel(0)[:-1])
        if latest is not None and not kept:
            await wal.truncate(channel, latest)
    await fill_segment(wal)
    for shard in range(2):
        latest = await wal.latest_id(names.pchannel(shard))
        assert latest is not None
        await backend.remove_before(wal, names.pchannel(shard), latest)


def heartbeat_ends_the_last_pack(tables: Path, now: int) -> None:
    """A T that lies behind the entry of its position, and behind all that is in the log."""
    log = LogTable.open(open_tables(tables).table("flights", LOG))
    times = {vchannel: log.flushed(vchannel) for vchannel in log.positions()}
    log.flush([], start=times, end=dict.fromkeys(times, now), positions=log.positions())


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["rocksmq-socket", *cases_in_turn(("kafka", "pulsar"), pytest.mark.broker, pytest.mark.long)],
    indirect=True,
)
async def test_what_a_node_has_stored_and_forgotten_is_read_from_its_tables(
    backend: Any, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "snapshot_due", True)  # so that the catalog holds no old segment
    tables = tmp_path / "tables"
    settings = Settings.model_validate({"dataNode": {"flushIntervalS": 3600}})
    applied: Applied = {}
    starting = "earliest"

    async def check(client: Client, *, unstored: bool) -> None:
        cut = str(await client.cut("flights"))
        rows, from_log = await asyncio.to_thread(read, backend.url, tables, "earliest", cut)
        assert by_time(rows) == applied
        assert (from_log > 0) == unstored
        some, _ = await asyncio.to_thread(read, backend.url, tables, starting, cut)
        assert by_time(some) == {
            ts: rows for ts, rows in applied.items() if starting == "earliest" or ts > int(starting)
        }

    wal = await backend.wal()
    async with Standalone(wal, tables, settings=settings) as node, node.client() as client:
        await client.create_collection(FLIGHTS, shards=2)
        await write(client, rng, applied)
        await check(client, unstored=True)
        for _ in range(3):
            await write(client, rng, applied)
            starting = str(await client.cut("flights"))
            await client.flush("flights")
            await check(client, unstored=False)
            await forget(backend, wal)
            await write(client, rng, applied)
            await check(client, unstored=True)
        await client.flush("flights")
        await fill_segment(wal)
        await client.flush("flights")  # without rows: the log is let go of, so the position must move too
        await forget(backend, wal)
        await check(client, unstored=False)
        assert await asyncio.to_thread(left_in_log, backend.url) < sum(map(len, applied.values()))
    await fill_segment(wal)
    heartbeat_ends_the_last_pack(tables, node.node.clock.last)
    async with Standalone(wal, tables, settings=settings) as node, node.client() as client:
        await client.cut("flights")  # the last one lies where the log is to be removed
        await forget(backend, wal)  # but for what lies behind the table's position, where a read goes on
        await check(client, unstored=False)
        await write(client, rng, applied)
        await check(client, unstored=True)
        await client.flush("flights")
        await forget(backend, wal)
        await check(client, unstored=False)
