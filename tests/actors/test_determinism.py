"""Guarantee 12: over the memory log and on virtual time, one seed gives one run, byte by byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.tables.local_store import IDENTITY_FILE
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

SCHEMA = CollectionSchema("things", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id")
RATES = Rates(drop=0.05, duplicate=0.05, delay=0.1, unknown=0.02, fail=0.02, delay_s_max=0.5)

Run = tuple[list[tuple[str, bytes, bytes]], list[str], list[str]]


async def in_place(call):
    return call()


def run(seed: int, tables: Path) -> Run:
    """A node under load and faults: its durable log, the faults, and what the clients were told."""
    log, plan, clock = MemoryLog(), FaultPlan(seed, RATES), VirtualClock()
    told: list[str] = []
    # the ids of a cluster and of its tables are random otherwise
    settings = Settings.model_validate({"cluster": {"id": "cluster"}})
    tables.mkdir()
    (tables / IDENTITY_FILE).write_text("tables")

    async def work(client: Client, source: random.Random) -> None:
        for _ in range(60):
            ids = [source.randrange(100) for _ in range(source.randrange(1, 10))]
            call = source.choice(
                [
                    lambda ids=ids: client.upsert("things", [{"id": id, "name": f"n{id}"} for id in ids]),
                    lambda ids=ids: client.delete("things", ids),
                    lambda: client.count("things", consistency="strong"),
                    lambda: client.flush("things"),
                ]
            )
            try:
                told.append(str(await call()))
            except TidewalError as error:
                told.append(repr(error))
            await asyncio.sleep(source.random())

    async def main() -> None:
        wal = MemoryWal(log, plan)
        options = {"clock": clock, "threads": False, "blocking": in_place, "name": "node", "settings": settings}
        async with Standalone(wal, tables, **options) as node, node.client("a") as one, node.client("b") as two:
            while True:
                try:
                    await one.create_collection(SCHEMA)
                    break
                except TidewalError as error:
                    told.append(repr(error))
            await asyncio.gather(work(one, random.Random(seed)), work(two, random.Random(seed + 1)))
        await wal.close()

    run_virtual(main(), clock)
    return log.dump(), plan.trace, told


@pytest.mark.slow
def test_one_seed_is_one_run(tmp_path: Path, seed: int) -> None:
    first, second = (run(seed, tmp_path / name) for name in ("first", "second"))
    assert first[1] == second[1]
    assert first[2] == second[2]
    for at, (one, two) in enumerate(zip(first[0], second[0], strict=False)):
        assert one == two, f"the logs differ from entry {at} on"
    assert len(first[0]) == len(second[0])
    assert len(first[0]) > 100
    assert first[1], "the plan did nothing: the test shows nothing"


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path: Path, seed: int) -> None:
    assert run(seed, tmp_path / "first")[0] != run(seed + 1, tmp_path / "second")[0]
