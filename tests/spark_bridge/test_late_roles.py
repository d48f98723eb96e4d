"""The real roles over slow channels, concurrent writers, and a query that crashes: each micro-batch is held against
what was acknowledged. Nothing of the log is written by hand here; see test_cuts.py for what real roles do seldom.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import ChannelNotFound, PositionLost
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop, elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

sys.path.insert(0, str(Path(__file__).parent))
from late_wal import LateWal
from micro_batches import Query
from story import FLIGHTS, Row, random_row

PCHANNELS = 4
SHARDS = 6  # so that two channels carry two shards, and get batches in parts
LATE = ("dml_1", "dml_2", "dml_3")
WRITERS = 5
WRITES = 30  # of each writer, per incarnation of the node
LIVES = 3
OPTIONS = {"wal": "rocksmq:///not/on/disk", "collection": "flights", "startingOffsets": "earliest"}


class Lists:
    """A memory log as the bridge sees a log."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def channels(self) -> list[str]:
        return sorted(self._log.channels)

    def latest_id(self, channel: str) -> bytes | None:
        entries = self._entries(channel)
        return entries[-1].id if entries else None

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        entries = self._entries(channel)
        if after is not None and entries[0].id > after:
            raise PositionLost(f"{after.hex()} is gone", requested=after, first_available=entries[0].id)
        first = after or b""
        wanted = [each for each in entries if each.id > first or (inclusive and each.id == first)]
        yield [each for each in wanted if upto is None or each.id <= upto]

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return next((each.id for each in self._entries(channel) if each.timestamp >= timestamp), None)

    def alive(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _entries(self, channel: str) -> list[Entry]:
        if channel not in self._log.channels:
            raise ChannelNotFound(f"no channel {channel}", channel=channel)
        return self._log.channels[channel].entries


class Cluster:
    """Incarnations of one node, its writers, and a query beside them, on virtual time."""

    def __init__(self, tables: Path, rng: random.Random) -> None:
        self.log = MemoryLog()
        self.tables = tables
        self.rng = rng
        self.written: dict[int, list[Row]] = {}  # by timestamp
        self.query = Query()
        self.crashes = 0

    async def live(self) -> None:
        """One incarnation of the node; its StreamingNode crashes on the way, so that channels get new owners."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        wal = LateWal(MemoryWal(self.log), LATE, lambda: self.rng.expovariate(8))
        settings = Settings.model_validate({"rootCoord": {"dmlChannelNum": PCHANNELS}})
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(
                Standalone(
                    wal,
                    self.tables,
                    settings=settings,
                    clock=loop.clock,
                    threads=False,
                    blocking=in_place,
                    name="node",
                )
            )
            client = await stack.enter_async_context(node.client())
            await client.create_collection(FLIGHTS, shards=SHARDS)
            reading = asyncio.create_task(self.read())
            await asyncio.gather(*(self.write(client) for _ in range(WRITERS)), self.crash_owner(node))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await client.cut("flights")
        await wal.close()

    async def write(self, client: Client) -> None:
        for _ in range(WRITES):
            rows = [random_row(self.rng) for _ in range(self.rng.randrange(1, 12))]
            written = await client.apply("flights", rows, deadline_s=300)
            assert self.written.setdefault(written.ts, rows) is rows, "two batches under one timestamp"
            await elapse(self.rng.expovariate(10))

    async def crash_owner(self, node: Standalone) -> None:
        for _ in range(2):
            await elapse(self.rng.uniform(0, 5))
            cell = next(cell for cell in node.system._cells.values() if cell.name == "streamingnode")
            while cell._life is None:  # it is on its way back from the crash before
                await elapse(0.01)
            cell._life.actor.crash(RuntimeError("a bug"))

    async def read(self) -> None:
        """Trigger after trigger, now and then with a crash in the middle."""
        while True:
            await elapse(self.rng.expovariate(3))
            self.trigger()

    def trigger(self) -> bool:
        if self.rng.random() < 0.3 or self.query.stopped:
            self.crashes += 1
            limit = self.rng.choice([{}, {"maxRowsPerTrigger": str(self.rng.randrange(1, 200))}])
            self.query.start(OPTIONS | limit)
        if not (self.query.unfinished or self.query.plan()):
            return False
        rows = self.query.read()
        if self.rng.random() < 0.8:
            self.query.commit(rows)
        else:
            self.query.crash()
        return True


async def in_place(call: Any) -> Any:
    """There are no other threads on virtual time."""
    return call()


@pytest.mark.long
def test_each_micro_batch_holds_what_was_acknowledged_in_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    cluster = Cluster(tmp_path / "tables", rng)
    monkeypatch.setattr(
        "tidewal.adapters.rocksmq.client.blocking_client.BlockingClient", lambda *_, **__: Lists(cluster.log)
    )
    clock = VirtualClock()
    for _ in range(LIVES):
        run_virtual(cluster.live(), clock)
    while cluster.trigger() or cluster.query.stopped:
        pass
    begin = cluster.query.begin
    for end, batch in zip(cluster.query.ends(), cluster.query.committed, strict=True):
        expected = {ts: keys_and_ops(rows) for ts, rows in cluster.written.items() if begin < ts <= end}
        assert by_time(batch) == expected
        begin = end
    assert sum(map(len, cluster.query.committed)) == sum(map(len, cluster.written.values()))
    assert len(cluster.query.committed) > 10
    assert cluster.crashes > 3


def by_time(rows: list[Row]) -> dict[object, list[tuple[str, str]]]:
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row["_ts"], []).append(row)
    return {ts: keys_and_ops(some) for ts, some in found.items()}


def keys_and_ops(rows: list[Row]) -> list[tuple[str, str]]:
    return sorted((str(row["flight"]), str(row["_op"])) for row in rows)
