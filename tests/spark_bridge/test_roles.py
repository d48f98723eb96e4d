"""What the real roles write is what the bridge reads: nothing of the log is written by hand here."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.turns import cases_in_turn
from tidewal.actors.standalone import Standalone
from tidewal.runtime.clock import compose, physical_ms
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.collection import CollectionPlan
from tidewal.spark_bridge.scan.columns import arrow_columns
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, Row, random_row

on_each_log = pytest.mark.parametrize(
    "backend",
    ["rocksmq-socket", *cases_in_turn(("kafka", "pulsar"), pytest.mark.broker, pytest.mark.long)],
    indirect=True,
)


def read(url: str, starting: str, ending: str) -> list[Row]:
    """The rows between two cuts, as Spark's processes get them."""
    log = open_log(url)
    tasks = CollectionPlan(log, ReadOptions(url, "flights", starting=starting, ending=ending)).all_tasks()
    batches = [batch for each in tasks for batch in scan_channel(log, each, tuple(arrow_columns(FLIGHTS)))]
    log.close()
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.slow
@on_each_log
async def test_each_interval_between_cuts_holds_what_was_acknowledged_in_it(
    backend: Any, tmp_path: Path, rng: random.Random
) -> None:
    url = backend.url
    starting = "earliest"
    wal = await backend.wal()
    async with Standalone(wal, tmp_path / "tables") as node, node.client() as client:
        await client.create_collection(FLIGHTS, shards=2)
        for _ in range(5):
            batches = [[random_row(rng) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
            expected = {(await client.apply("flights", rows)).ts: rows for rows in batches}
            cut = str(await client.cut("flights"))
            got = await asyncio.to_thread(read, url, starting, cut)
            assert {row["_watermark"] for row in got} == {int(cut)}
            by_time: dict[object, list[Row]] = {}
            for row in got:
                by_time.setdefault(row["_ts"], []).append(row)
            assert {ts: keys_and_ops(rows) for ts, rows in by_time.items()} == {
                ts: keys_and_ops(rows) for ts, rows in expected.items()
            }
            starting = cut


@pytest.mark.slow
@on_each_log
async def test_limits_splits_and_times_over_what_roles_wrote(backend: Any, tmp_path: Path, rng: random.Random) -> None:
    wal = await backend.wal()
    async with Standalone(wal, tmp_path / "tables") as node, node.client() as client:
        await client.create_collection(FLIGHTS, shards=2)
        written: list[tuple[int, str]] = []
        for _ in range(8):
            rows = [random_row(rng) for _ in range(rng.randrange(1, 20))]
            ts = (await client.apply("flights", rows)).ts
            written += [(ts, str(row["flight"])) for row in rows]
            await client.cut("flights")
        middle = written[len(written) // 2][0]
        await asyncio.to_thread(check_plans, backend.url, sorted(written), middle)


def check_plans(url: str, written: list[tuple[int, str]], middle: int) -> None:
    plan = CollectionPlan(open_log(url), ReadOptions(url, "flights", min_partitions=8))
    try:
        at, upto, found = plan.begin(), plan.newest(), list[tuple[int, str]]()
        assert upto is not None
        batches = 0
        while (end := plan.next(at, upto, MicroBatchLimits(rows=15, bytes=20_000))) is not None:
            found += rows_of(url, plan.tasks(at, end))
            at, batches = end, batches + 1
        assert sorted(found) == written
        assert batches > 1
        whole = plan.tasks(plan.begin(), upto)
        assert len(whole) > 2
        assert sorted(rows_of(url, whole)) == written
        assert not plan.has_rows(plan.begin(), upto, len(written) + 1)
    finally:
        plan.close()
    ms = compose(physical_ms(middle))
    for times, keeps in [
        ({"starting_time": ms}, lambda ts: ts >= ms),
        ({"ending_time": ms}, lambda ts: ts < ms),
    ]:
        part = CollectionPlan(open_log(url), ReadOptions(url, "flights", **times))
        try:
            assert sorted(rows_of(url, part.all_tasks())) == [row for row in written if keeps(row[0])]
        finally:
            part.close()


def rows_of(url: str, tasks: Any) -> list[tuple[int, str]]:
    with closing(open_log(url)) as log:
        batches = [batch for task in tasks for batch in scan_channel(log, task, ("_ts", "flight"))]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def keys_and_ops(rows: list[Row]) -> list[tuple[str, str]]:
    return sorted((str(row["flight"]), str(row["_op"])) for row in rows)
