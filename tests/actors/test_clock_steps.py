"""Nodes whose wall clocks are set forward and back while clients write and read, against a model: what was acknowledged
is there once, what was refused is not, and no strong read is older than what was acknowledged before it began."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.client import Client
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import DeadlineExceeded, TidewalError
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.rows.row_codec import decode_rows
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import MachineClock
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

HOUR_MS = 3_600_000
DAYS_MS = 30 * 24 * HOUR_MS
RATES = Rates(unknown=0.01, lost=0.01, fail=0.02, delay=0.1, delay_s_max=0.3)


class Shared(MemoryWal):
    """As on brokers: every process with the address may open it, and leases alone decide its owner."""

    capabilities = replace(MemoryWal.capabilities, one_node=False, one_machine=False)


class Model:
    """What clients were told."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self.acknowledged: set[int] = set()
        self.unknown: set[int] = set()
        self.refused: set[int] = set()
        self.reads = 0
        self._client = client
        self._rng = rng
        self._next = 0

    async def write(self) -> None:
        while True:
            self._next += 1
            id = self._next
            try:
                await self._client.insert("people", [{"id": id, "name": "", "height": 0.0}], deadline_s=60)
                self.acknowledged.add(id)
            except TidewalError as error:
                unknown = isinstance(error, DeadlineExceeded) or error.fields.get("outcome_unknown")
                (self.unknown if unknown else self.refused).add(id)
            await asyncio.sleep(self._rng.uniform(0, 0.6))

    async def read(self) -> None:
        while True:
            before = set(self.acknowledged)
            with contextlib.suppress(TidewalError):
                found = await self._client.query("people", columns=["id"], consistency="strong", deadline_s=60)
                ids = found.table["id"].to_pylist()
                assert before <= set(ids), "a strong read is older than what was acknowledged before it"
                assert not self.refused & set(ids), "what was refused is there"
                assert len(ids) == len(set(ids))
                self.reads += 1
            await asyncio.sleep(self._rng.uniform(0, 1))


async def ids_in(node, wal: MemoryWal) -> Counter[int]:
    """What a reader finds from the first entry on, in packs, up to the present time."""
    catalog = CatalogLog(wal, Names(), HybridClock(asyncio.get_running_loop().clock))
    await catalog.open()
    collection = catalog.catalog.collection("people")
    stream = TtMsgStream(wal, grants=catalog)
    stream.as_consumer(sorted({pchannel_of(vchannel) for vchannel in collection.vchannels}))
    present = await role_of(node, "querynode").owners.sync(collection, deadline_s=60)  # of all owners
    for channel, last in present.channels.items():
        stream.announce(channel, last.term, last.cseq, present.time)
    found: Counter[int] = Counter()
    while stream.end_ts < present.time:
        for record in (await asyncio.wait_for(anext(stream), 60)).messages:
            if record.type is RecordType.ROWS:
                found.update(decode_rows(record.body, collection.schema.row_arrow())["id"].to_pylist())
    assert stream.late == 0
    assert sum(counts.bad for counts in stream.counts.values()) == 0
    await stream.close()
    await catalog.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("round", range(2))
async def test_wall_clocks_that_are_set_lose_and_double_nothing(home, seed, round) -> None:
    rng = random.Random(seed + round)
    home.memory = Shared
    leap_at = rng.randrange(20)
    async with contextlib.AsyncExitStack() as stack:
        clock = MachineClock(asyncio.get_running_loop().clock)
        node = await stack.enter_async_context(home.node(name="0", clock=clock))
        wal = await home.wal()
        client = await stack.enter_async_context(Client(wal, prefix="by-dev", name="model"))
        await client.create_collection(home.PEOPLE, shards=2)
        home.faults = node.node.wal.faults = FaultPlan(seed + round, RATES, channels="dml")
        model = Model(client, rng)
        tasks = [asyncio.ensure_future(work()) for work in (model.write, model.write, model.read)]
        for number in range(20):
            await home.elapse(rng.uniform(0.5, 3))
            clock.jump_wall(DAYS_MS if number == leap_at else rng.choice([-HOUR_MS, HOUR_MS, 0]))
            if rng.random() < 0.1:
                clock = MachineClock(asyncio.get_running_loop().clock)
                clock.jump_wall(rng.randrange(-HOUR_MS, HOUR_MS))
                node = await stack.enter_async_context(home.node(name=f"{number + 1}", clock=clock))
            for task in tasks:
                assert not task.done(), task.exception()
        home.faults.rates = node.node.wal.faults.rates = Rates()
        await home.elapse(20)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        read = set((await client.query("people", columns=["id"], consistency="strong")).table["id"].to_pylist())
        found = await ids_in(node, wal)
        assert set(found.values()) == {1}, "a row is there twice"
        assert model.acknowledged <= set(found)
        assert not model.refused & set(found)
        assert read == set(found), "two readers see the same"
        assert min(len(model.acknowledged), model.reads) > 20
