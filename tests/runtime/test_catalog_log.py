"""The catalog as followers and leaders know it: one order for all, and snapshots that hide nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidewal.runtime import catalog_log
from tidewal.runtime.catalog import Collection
from tidewal.runtime.catalog_log import CatalogLog
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import BadRecord, Closed, DeadlineExceeded, Fenced, Unavailable
from tidewal.runtime.names import Names
from tidewal.runtime.schema import CollectionSchema, Field
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

NAMES = Names()


def created(id: int) -> dict[str, object]:
    schema = CollectionSchema(f"c{id}", (Field("id", "int64"),), "id")
    return {"kind": "create", "collection": Collection(id, schema, (f"p_{id}v0",), 1).to_wire()}


@asynccontextmanager
async def following(wal: MemoryWal) -> AsyncIterator[CatalogLog]:
    catalog = CatalogLog(wal, NAMES, HybridClock(VirtualClock()))
    await catalog.open()
    try:
        yield catalog
    finally:
        await catalog.close()


def test_followers_see_what_the_leader_wrote() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader, following(wal) as follower:
            await leader.claim("a")
            await leader.append(created(1))
            assert sorted(leader.catalog.collections) == ["c1"], "what is written is known to its writer"
            assert sorted((await follower.catch_up()).collections) == ["c1"]
            assert follower.catalog.leader == "a"
        async with following(wal) as late:
            assert late.catalog.snapshot() == leader.catalog.snapshot()

    run_virtual(main())


def test_only_a_leader_is_heard() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as one, following(wal) as two:
            with pytest.raises(Fenced):
                await one.append(created(1))
            await one.claim("one")
            await two.claim("two")
            with pytest.raises(Fenced):
                await one.append(created(1))
            await two.append(created(2))
            assert sorted((await one.catch_up()).collections) == ["c2"]
            assert one.catalog.snapshot() == two.catalog.snapshot()

    run_virtual(main())


def test_of_many_that_claim_at_once_all_agree_on_one() -> None:
    async def main() -> None:
        wal = MemoryWal()
        logs = [CatalogLog(wal, NAMES, HybridClock(VirtualClock())) for _ in range(5)]
        await asyncio.gather(*(each.open() for each in logs))
        await asyncio.gather(*(each.claim(f"node-{number}") for number, each in enumerate(logs)))
        for each in logs:
            await each.catch_up()
        assert len({each.catalog.leader for each in logs}) == 1
        writes = await asyncio.gather(
            *(each.append(created(number + 1)) for number, each in enumerate(logs)), return_exceptions=True
        )
        assert [type(result) for result in writes].count(Fenced) == 4
        assert len((await logs[0].catch_up()).collections) == 1
        await asyncio.gather(*(each.close() for each in logs))

    run_virtual(main())


def test_snapshots_hide_nothing_that_is_written_at_the_same_time(monkeypatch, seed: int) -> None:
    monkeypatch.setattr(catalog_log, "SNAPSHOT_EVENTS", 3)

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log, FaultPlan(seed, Rates(delay=0.5)))
        async with following(wal) as leader, following(wal) as follower:
            await leader.claim("a")
            await asyncio.gather(*(leader.append(created(id)) for id in range(1, 60)))
            names = sorted(f"c{id}" for id in range(1, 60))
            assert sorted(leader.catalog.collections) == names
            await follower.catch_up()
            assert sorted(follower.catalog.collections) == names
            assert len(log.channels[NAMES.catalog].entries) < 10, "what lies before a snapshot is removed"
            async with following(wal) as late:
                assert late.catalog.snapshot() == leader.catalog.snapshot()
                await late.claim("b")
                assert late.catalog.term > 1

    run_virtual(main())


def test_a_write_of_unknown_outcome_is_an_error_that_may_be_tried_again() -> None:
    async def main() -> None:
        plan = FaultPlan(0)
        wal = MemoryWal(faults=plan)
        async with following(wal) as leader:
            await leader.claim("a")
            plan.rates = Rates(fail=1.0)
            with pytest.raises(Unavailable):
                await leader.append(created(1))
            plan.rates = Rates()
            await leader.append(created(1))
            assert sorted(leader.catalog.collections) == ["c1"]

    run_virtual(main())


def test_waiting_ends_with_the_change_the_deadline_or_the_log() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader:
            await leader.claim("a")
            waiting = asyncio.create_task(leader.wait_for(lambda catalog: "c1" in catalog.collections, deadline_s=5))
            changed = asyncio.create_task(leader.changed())
            await asyncio.sleep(0)
            await leader.append(created(1))
            assert "c1" in (await waiting).collections
            await changed
            with pytest.raises(DeadlineExceeded):
                await leader.wait_for(lambda catalog: "c2" in catalog.collections, deadline_s=5)
            forever = asyncio.create_task(leader.changed())
            await asyncio.sleep(0)
            await wal.close()
            with pytest.raises(Closed):
                await forever

    run_virtual(main())


def test_a_record_that_cannot_be_read_is_an_error_and_not_a_silence() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader:
            await leader.claim("a")
            await wal.append(NAMES.catalog, b"garbage")
            with pytest.raises(BadRecord):
                await leader.changed()

    run_virtual(main())
