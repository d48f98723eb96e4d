"""The catalog as followers and leaders have it: one order for all, and snapshots that hide nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.clock import MAX_TIMESTAMP, HybridClock
from tidewal.runtime.errors import (
    BadRecord,
    Closed,
    CorruptLog,
    DeadlineExceeded,
    DiskPressure,
    Fenced,
    FormatTooNew,
    MessageTooLarge,
    Overloaded,
    Unavailable,
)
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import ControlAppend
from tidewal.runtime.replicated import replica
from tidewal.runtime.replicated.records import Claim, FeatureLevels, claim_event, decode_event, encode_event
from tidewal.runtime.replicated.replica import SnapshotPacing
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.clock import EPOCH_MS, VirtualClock, run_virtual
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


def foreign(leader: CatalogLog, event: dict[str, object], number: int) -> bytes:
    """An event that the leader did not write, under its name and claim."""
    return encode(encode_event(RecordType.CATALOG, event, leader.leader.node, number, leader.leader))


def test_followers_see_what_the_leader_wrote() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader, following(wal) as follower:
            await leader.claim("a")
            await leader.append(created(1))
            assert sorted(leader.catalog.collections) == ["c1"], "what is written is known to its writer"
            assert sorted((await follower.catch_up()).collections) == ["c1"]
            assert follower.leader.node == "a"
        async with following(wal) as late:
            assert late.catalog.snapshot() == leader.catalog.snapshot()

    run_virtual(main())


def test_only_a_leader_has_an_effect() -> None:
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


def test_the_loser_of_an_election_has_no_effect_under_the_winners_term(monkeypatch) -> None:
    monkeypatch.setattr(replica, "CLAIMS_MAX", 1)

    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as one, following(wal) as two:
            await one.claim("one")

            async def behind() -> Claim:
                return Claim()  # as it was before that claim

            monkeypatch.setattr(two, "_last_claim", behind)
            with pytest.raises(Fenced, match="lost an election"):
                await two.claim("two")
            with pytest.raises(Fenced, match="claim first"):
                await two.append(created(2))
            await one.append(created(1))
            assert sorted(one.catalog.collections) == ["c1"]

    run_virtual(main())


def test_of_many_that_claim_at_once_all_agree_on_one() -> None:
    async def main() -> None:
        wal = MemoryWal()
        logs = [CatalogLog(wal, NAMES, HybridClock(VirtualClock())) for _ in range(5)]
        await asyncio.gather(*(each.open() for each in logs))
        await asyncio.gather(*(each.claim(f"node-{number}") for number, each in enumerate(logs)))
        for each in logs:
            await each.catch_up()
        assert len({each.leader for each in logs}) == 1
        writes = await asyncio.gather(
            *(each.append(created(number + 1)) for number, each in enumerate(logs)), return_exceptions=True
        )
        assert [type(result) for result in writes].count(Fenced) == 4
        assert len((await logs[0].catch_up()).collections) == 1
        await asyncio.gather(*(each.close() for each in logs))

    run_virtual(main())


def test_snapshots_hide_nothing_that_is_written_at_the_same_time(seed: int) -> None:
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log, FaultPlan(seed, Rates(delay=0.5)))
        async with following(wal) as leader, following(wal) as follower:
            leader.pacing = SnapshotPacing(records=3, factor=0)
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
                assert late.leader.term > 1

    run_virtual(main())


@pytest.mark.parametrize("step", ["write", "truncate"])
@pytest.mark.parametrize("error", [DiskPressure, Unavailable, MessageTooLarge])
def test_a_snapshot_that_fails_does_not_fail_the_event_before_it(caplog, step, error) -> None:
    class Refusing(MemoryWal):
        failing = True

        def submit(self, entries, done) -> None:
            event = decode_event(decode(entries[0].payload))
            if step == "write" and self.failing and event["kind"] == "page":
                raise error("not now")
            super().submit(entries, done)

        async def truncate(self, channel, id) -> None:
            if step == "truncate" and self.failing:
                raise error("not now")
            await super().truncate(channel, id)

    async def main() -> None:
        log = MemoryLog()
        wal = Refusing(log)
        async with following(wal) as leader, following(MemoryWal(log)) as follower:
            leader.pacing = SnapshotPacing(records=10, retry_records=4, factor=0)
            await leader.claim("a")
            for id in range(1, 18):
                await leader.append(created(id))
            assert len([each for each in caplog.records if "without a new snapshot: not now" in each.message]) == 3
            wal.failing = False
            for id in range(18, 23):
                await leader.append(created(id))
            assert len(log.channels[NAMES.catalog].entries) < 10, "what lies before a snapshot is removed"
            names = sorted(f"c{id}" for id in range(1, 23))
            assert sorted(leader.catalog.collections) == sorted((await follower.catch_up()).collections) == names
            async with following(MemoryWal(log)) as late:
                assert sorted(late.catalog.collections) == names

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


def test_what_is_no_event_is_counted_handed_over_and_skipped() -> None:
    async def main() -> None:
        wal = MemoryWal()
        handed: list[tuple[str, str]] = []
        clock = HybridClock(VirtualClock())
        follower = CatalogLog(wal, NAMES, clock, on_bad=lambda name, _, error: handed.append((name, str(error.reason))))
        async with following(wal) as leader:
            await follower.open()
            await leader.claim("a")
            await wal.append(NAMES.catalog, b"garbage")
            await wal.append(NAMES.catalog, encode(Record(RecordType.ROWS, ts=MAX_TIMESTAMP)))
            await wal.append(NAMES.catalog, encode(Record(RecordType.CATALOG, ts=MAX_TIMESTAMP, term=1, cseq=99)))
            await leader.append(created(1))
            assert sorted((await follower.catch_up()).collections) == ["c1"]
            assert handed == [(NAMES.catalog, reason) for reason in ("length", "type", "body")]
            assert follower.skipped == leader.skipped == 3
            assert clock.ahead_ms < 1000, "only what counts moves the clock"
            async with following(wal) as late:
                assert late.catalog.snapshot() == leader.catalog.snapshot()
        await follower.close()

    run_virtual(main())


def test_an_event_of_an_unknown_kind_is_refused_and_stops_nobody() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader:
            await leader.claim("a")
            with pytest.raises(BadRecord, match="unheard_of"):
                await leader.append({"kind": "unheard_of"})
            await leader.append(created(1))
            assert (leader.skipped, sorted(leader.catalog.collections)) == (1, ["c1"])

    run_virtual(main())


def test_a_node_that_cannot_read_the_catalog_to_its_end_neither_opens_nor_claims() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader:
            leader.fold.levels = FeatureLevels(1, 3)
            await leader.claim("new")
            await leader.raise_level(3)
            old = CatalogLog(wal, NAMES, HybridClock(VirtualClock()))
            entries = list(wal.log.channels[NAMES.catalog].entries)
            for attempt in (old.open(), old.catch_up(), old.claim("old")):
                with pytest.raises(FormatTooNew):
                    await attempt
            assert wal.log.channels[NAMES.catalog].entries == entries
            await leader.append(created(1))

    run_virtual(main())


def test_an_event_days_ahead_counts_and_moves_no_clock() -> None:
    async def main() -> None:
        wal, ahead = MemoryWal(), VirtualClock(EPOCH_MS + 30 * 86_400_000)
        leader = CatalogLog(wal, NAMES, HybridClock(ahead))
        clock = HybridClock(VirtualClock())
        follower = CatalogLog(wal, NAMES, clock)
        for each in (leader, follower):
            await each.open()
        await leader.claim("a")
        await leader.append(created(1))
        assert sorted((await follower.catch_up()).collections) == ["c1"]
        assert clock.ahead_ms < 1000
        for each in (leader, follower):
            await each.close()

    run_virtual(main())


def test_a_leader_goes_on_behind_what_another_wrote_under_its_term() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with following(wal) as leader:
            await leader.claim("a")
            await wal.append(NAMES.catalog, foreign(leader, {"kind": "noop"}, 500))
            await leader.catch_up()
            await leader.append(created(1))
            assert sorted(leader.catalog.collections) == ["c1"]

    run_virtual(main())


@pytest.mark.parametrize("error", [Unavailable, Overloaded, DiskPressure])
def test_a_claim_that_the_log_refuses_ends_with_that_error_and_not_as_a_lost_election(error) -> None:
    class Refusing(MemoryWal):
        def submit(self, entries, done) -> None:
            raise error("not now")

    async def main() -> None:
        log = MemoryLog()
        async with following(MemoryWal(log)):
            pass
        async with following(Refusing(log)) as node:
            began = asyncio.get_running_loop().time()
            with pytest.raises(error):
                await node.claim("a")
            assert 3 < asyncio.get_running_loop().time() - began < 30, "it waits between its tries"

    run_virtual(main())


def test_a_claim_is_made_again_when_the_log_has_recovered() -> None:
    class Recovering(MemoryWal):
        refusals = 5

        def submit(self, entries, done) -> None:
            if self.refusals:
                self.refusals -= 1
                raise DiskPressure("not now")
            super().submit(entries, done)

    async def main() -> None:
        async with following(Recovering()) as node:
            await node.claim("a")
            assert node.leader.node == "a"

    run_virtual(main())


def test_the_loser_of_every_election_is_fenced() -> None:
    class Overtaken(MemoryWal):
        """Another node's claim comes before each claim of this one."""

        def submit(self, entries, done) -> None:
            claim = other.leader
            event, stand = claim_event("b", claim), Claim(b"", claim.term + 1)
            payload = encode(encode_event(RecordType.CATALOG, event, "b", 1, stand))
            super().submit([entries[0]._replace(payload=payload)], lambda _: None)
            super().submit(entries, done)

    async def main() -> None:
        nonlocal other
        log = MemoryLog()
        async with following(MemoryWal(log)) as other, following(Overtaken(log)) as node:
            with pytest.raises(Fenced, match="lost an election to b"):
                await node.claim("a")

    other: CatalogLog
    run_virtual(main())


class Slow(MemoryWal):
    """Its reader waits for `may` before each batch, and may be overtaken meanwhile."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.may = asyncio.Event()
        self.may.set()

    async def read(self, channel, start):
        async for entries in super().read(channel, start):
            await self.may.wait()
            yield entries


@pytest.mark.parametrize("times", [1, 3])
def test_a_follower_that_a_snapshot_has_overtaken_begins_anew_with_it(times) -> None:
    async def main() -> None:
        log = MemoryLog()
        slow = Slow(log)
        async with following(MemoryWal(log)) as leader, following(slow) as follower:
            await leader.claim("a")
            seen: list[int] = []
            for round in range(1, times + 1):
                await follower.catch_up()
                slow.may.clear()
                for id in range(10 * round, 10 * round + 3):
                    await leader.append(created(id))
                await leader.claim(f"leader {round}")
                await leader.snapshot()
                await leader.append(created(10 * round + 3))
                slow.may.set()
                waiting = asyncio.create_task(follower.catch_up())
                while not waiting.done():
                    seen.append(len(follower.catalog.collections))
                    await asyncio.sleep(0)
                assert (await waiting).snapshot() == leader.catalog.snapshot()
            assert seen == sorted(seen), "nothing that was known is unknown meanwhile"
            await follower.claim("b")
            await follower.append(created(99))
            assert (await leader.catch_up()).snapshot() == follower.catalog.snapshot()

    run_virtual(main())


def test_a_write_that_was_removed_before_it_was_read_back_has_an_unknown_outcome() -> None:
    async def main() -> None:
        log = MemoryLog()
        slow = Slow(log)
        async with following(MemoryWal(log)) as other, following(slow) as leader:
            await leader.claim("a")
            slow.may.clear()
            await slow.append_many([ControlAppend(NAMES.catalog, b"so that the reader waits behind it", 1)])
            writing = asyncio.create_task(leader.append(created(1)))
            await asyncio.sleep(0.1)
            await other.claim("b")
            await other.append(created(2))
            await other.snapshot()
            slow.may.set()
            with pytest.raises(Unavailable) as caught:
                await writing
            assert caught.value.outcome_unknown
            assert sorted(leader.catalog.collections) == sorted(other.catalog.collections) == ["c1", "c2"]
            with pytest.raises(Fenced):
                await leader.append(created(3))

    run_virtual(main())


def test_a_catalog_that_lost_entries_without_a_snapshot_is_damaged() -> None:
    async def main() -> None:
        log = MemoryLog()
        slow = Slow(log)
        async with following(MemoryWal(log)) as leader, following(slow) as follower:
            await leader.claim("a")
            await follower.catch_up()
            slow.may.clear()
            for id in range(1, 5):
                await leader.append(created(id))
            latest = await slow.latest_id(NAMES.catalog)
            assert latest is not None
            await slow.truncate(NAMES.catalog, latest)
            slow.may.set()
            with pytest.raises(CorruptLog, match="no snapshot"):
                await follower.catch_up()

    run_virtual(main())
