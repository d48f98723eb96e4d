"""What the real roles write is what the bridge reads: nothing of the log is written by hand here."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tidewal.actors.standalone import Standalone
from tidewal.spark_bridge.columns import arrow_columns
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.planning import Planner
from tidewal.spark_bridge.rows import arrow_batches

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, Row, random_row


def read(url: str, starting: str, ending: str) -> list[Row]:
    """The rows between two cuts, as Spark's processes get them."""
    log = open_log(url)
    planner = Planner(log, url, "flights", "by-dev")
    ranges = planner.ranges(planner.resolve(starting), planner.resolve(ending))
    batches = [batch for each in ranges for batch in arrow_batches(log, each, tuple(arrow_columns(FLIGHTS)))]
    log.close()
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "backend",
    [
        "rocksmq-socket",
        pytest.param("kafka", marks=pytest.mark.broker),
        pytest.param("pulsar", marks=pytest.mark.broker),
    ],
    indirect=True,
)
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


def keys_and_ops(rows: list[Row]) -> list[tuple[str, str]]:
    return sorted((str(row["flight"]), str(row["_op"])) for row in rows)
