"""Several nodes of one log, whose clocks are apart and which are killed, and a replica that takes its place without
it: what was acknowledged up to the line is there once, what lies above is salvaged, and nothing else is anywhere."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.conftest import PEOPLE, POINTS, in_place, people
from tests.actors.nodes import Nodes
from tests.actors.test_forced_promotion import NEW
from tests.actors.test_forced_promotion_model import check_channels
from tests.actors.test_inputs_over_owners import BrokerWal
from tests.actors.test_node_replication import REPLICA, SOURCE, TIMES
from tests.actors.test_node_replication_model import FarLockedWal, LockedWal, taken
from tests.dying_wal import Killed
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.runtime.errors import InvalidRequest, TidewalError
from tidewal.runtime.log.record import RecordType, decode, read_header
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.replication.forced_promotion import line_of, promote_at_line
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries
from tidewal.runtime.rows.row_codec import decode_rows
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

APART_MS = 4_000  # of the nodes' clocks
STEPS = 60


class Cluster:
    """Nodes that come and go, and what they have acknowledged: rows and messages, with their times."""

    def __init__(self, nodes: Nodes, rng: random.Random) -> None:
        self.nodes, self._rng = nodes, rng
        self.ahead = {name: rng.randrange(APART_MS) for name in "abc"}
        self.rows: list[tuple[int, int]] = []
        self.sent: list[tuple[int, str]] = []
        self.done: list[str] = []
        self.unsent: set[str] = set()
        self._next = 0
        print("ahead", self.ahead)

    async def start(self, name: str) -> None:
        await self.nodes.start(name, ahead_ms=self.ahead[name])

    async def run(self, steps: int) -> None:
        async with self.nodes.client() as client:
            if not self._next:
                await client.create_collection(PEOPLE, shards=3)
                await client.create_topic("orders", 3)
            for _ in range(steps):
                work = self._rng.choice((self._insert, self._insert, self._send, self._send, self._take, self._ddl))
                await work(client)
                await asyncio.sleep(self._rng.random() / 3)
                if self._rng.random() < 0.15:
                    with suppress(TidewalError):
                        await client.flush("people")
                if self._rng.random() < 0.1:
                    await self._change()

    async def _change(self) -> None:
        """A node is killed, leaves or comes back."""
        running = self.nodes.running
        gone = sorted({*"abc"} - running.keys())
        if gone and self._rng.random() < 0.6:
            print("start", gone[0])
            await self.start(gone[0])
        elif len(running) > 1:
            name = self._rng.choice(sorted(running))
            kill = self._rng.random() < 0.5
            print("kill" if kill else "end", name)
            await (self.nodes.kill(name) if kill else self.nodes.end(name))

    async def _insert(self, client: tidewal.Client) -> None:
        keys = range(self._next, self._next + self._rng.randrange(1, 9))
        self._next = keys.stop
        with suppress(TidewalError):
            result = await client.insert("people", people(*keys), deadline_s=60)
            self.rows += [(result.ts, key) for key in keys]

    async def _send(self, client: tidewal.Client) -> None:
        text = f"m{self._next}"
        self._next += 1
        try:
            self.sent.append(((await client.send("orders", text, key=text, deadline_s=60)).ts, text))
        except TidewalError:
            self.unsent.add(text)

    async def _take(self, client: tidewal.Client) -> None:
        with suppress(TidewalError):
            self.done += await taken(client, "orders", 1)

    async def _ddl(self, client: tidewal.Client) -> None:
        name = f"c{self._next}"
        self._next += 1
        with suppress(TidewalError):
            await client.create_collection(replace(POINTS, name=name))
            await client.insert(name, [{"id": 1, "at": [0.0, 0.0, 0.0, 1.0]}])
            if self._rng.random() < 0.5:
                await client.flush(name)
            if self._rng.random() < 0.3:
                await client.drop_collection(name)


async def replicators(source: MemoryLog, replica: MemoryLog, rng: random.Random, clock: Any) -> None:
    """One after another, each of which dies at a write."""
    while True:
        left, behind = [rng.randrange(50, 1500)], rng.random() < 0.5
        old, new = LockedWal(source, left, behind=behind), FarLockedWal(replica, left, behind=behind)
        with suppress(Killed):
            await Replicator(old, new, SOURCE, times=TIMES, clock=clock).run()


async def forced(nodes: Nodes, replica: MemoryLog, new: MemoryLog, directory: Path) -> Any:
    """Promote, as an operator does who is told of tables that came or went above the line."""
    tables, dropped = MovedTables(open_tables(directory / "tables"), in_place), frozenset[str]()
    for _ in range(STEPS):
        try:
            return await promote_at_line(
                MemoryWal(replica), MemoryWal(new), REPLICA, NEW, tables=tables, dropped=dropped, settle_s=0
            )
        except InvalidRequest as error:
            print(error)
            name = error.fields["table"]
            if "move it away" in error.message:
                (directory / "tables" / name).rename(directory / f"away-{name}")
            else:
                dropped |= {name}
    raise AssertionError("the tables are told one by one")


def of_owner(channel: str) -> bool:
    return "-dml_" in channel or "-topic_" in channel


def written(log: MemoryLog, time: int) -> set[int]:
    """The keys of `PEOPLE` that owners have written up to that time: each its part of an insert, whose result has the
    highest of their times."""
    found = set[int]()
    for name, channel in log.channels.items():
        for record in (decode(each.payload) for each in channel.entries if "-dml_" in name):
            if record.type is RecordType.ROWS and record.ts <= time and "_1v" in record.vchannel:
                found.update(decode_rows(record.body, PEOPLE.row_arrow())["id"].to_pylist())
    return found


def keyed(entry: Any) -> tuple[int, int]:
    """The term and the number of a record."""
    header = read_header(entry.payload)
    assert header is not None
    return header[2:4]


@pytest.mark.parametrize("run", range(6))
async def test_what_nodes_have_acknowledged_up_to_the_line_is_there_and_the_rest_is_salvaged(
    home: Any, tmp_path: Path, seed: int, run: int
) -> None:
    rng = random.Random(f"{seed} {run}")
    nodes, replica, new = Nodes(tmp_path, rng, BrokerWal), MemoryLog(), MemoryLog()
    cluster = Cluster(nodes, rng)
    for name in "abc":
        await cluster.start(name)
    mirroring = asyncio.create_task(replicators(nodes.log, replica, random.Random(rng.random()), nodes.loop.clock))
    await cluster.run(STEPS)
    if rng.random() < 0.5:
        mirroring.cancel()
        await asyncio.wait([mirroring])
        await cluster.run(rng.randrange(1, 10))
    else:
        mirroring.cancel()
        await asyncio.wait([mirroring])
    await nodes.stop()
    line = line_of(await replication_state(MemoryWal(replica)))
    await forced(nodes, replica, new, tmp_path)
    print(f"{sum(ts > line.time for ts, _ in cluster.rows)} of {len(cluster.rows)} rows above the line")
    check_channels(nodes.log, new, line.time)
    brought = {
        (name, keyed(each)) for name, channel in new.channels.items() for each in channel.entries if of_owner(name)
    }
    after = Nodes(tmp_path, rng, BrokerWal)
    after.log = new
    for name in "ab":
        await after.start(name, ahead_ms=cluster.ahead[name])
    async with after.client("after") as client:
        found = (await client.query("people", consistency="strong")).table["id"].to_pylist()
        below = {key for ts, key in cluster.rows if ts <= line.time}
        assert len(found) == len({*found})
        assert below <= {*found} <= written(nodes.log, line.time)
        got = await taken(client, "orders")
        sent = {text for ts, text in cluster.sent if ts <= line.time}
        assert sent - {*cluster.done} <= {*got} <= sent | cluster.unsent
        assert len(got) == len({*got})
        await client.insert("people", people(10_000))
        await client.flush("people")
    await after.stop()
    await promote(MemoryWal(nodes.log), MemoryWal(replica), SOURCE, REPLICA)
    source = MemoryWal(nodes.log)
    salvaged = {(name, entry.id) async for name, entry in unreplicated_entries(source, await replication_state(source))}
    for name, channel in nodes.log.channels.items():
        for entry in channel.entries if of_owner(name) else ():
            if decode(entry.payload).type in (RecordType.ROWS, RecordType.MESSAGE):
                is_there = (name, keyed(entry)) in brought
                assert is_there or (name, entry.id) in salvaged, (name, entry.id, decode(entry.payload).ts, line.time)
                assert not (is_there and (name, entry.id) in salvaged), (name, entry.id)
