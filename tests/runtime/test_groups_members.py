"""Members over the memory WAL on virtual time: exactly once through crashes, connections that are lost, limits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidewal.runtime.errors import Fenced, Overloaded, TidewalError, Unavailable
from tidewal.runtime.groups import member_fetcher
from tidewal.runtime.groups.group_consumer import start_member
from tidewal.runtime.groups.local_coordinator_client import LocalCoordinatorClient
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import elapse, run_virtual, until
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

PLAIN = ChannelPolicy()
CHANNELS = ["in-1", "in-2", "in-3"]


async def filled(wal, count=10, channels=("a",)):
    ids = []
    for channel in channels:
        await wal.create_channel(channel, PLAIN)
        ids += await wal.append_many([Append(channel, f"{channel}:{n}".encode()) for n in range(count)])
    return ids


# ---- exactly once ---------------------------------------------------------------------------------------------------


async def transform(wal, chance):
    """Consume, transform, produce. Any trouble: leave, join again, go on from the position."""
    while True:
        member = await wal.join("transformers", ["in-*"])
        try:
            async for delivered in member:
                outputs = [Append("out", bytes(entry.payload).upper()) for entry in delivered.entries]
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                await member.commit([delivered], outputs)
        except (Unavailable, Fenced):
            await elapse(chance.random())
        finally:
            await member.aclose()


async def crashing_transformers(seed):
    chance = random.Random(seed)
    log = MemoryLog()
    calm = MemoryWal(log)
    for channel in ("in-1", "in-2", "out"):
        await calm.create_channel(channel, PLAIN)
    shaky = MemoryWal(log, FaultPlan(seed, Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.3)))
    workers = [asyncio.create_task(transform(shaky, chance)) for _ in range(3)]
    expected: Counter[bytes] = Counter()
    for step in range(30):
        if step == 15:
            await calm.create_channel("in-3", PLAIN)
        channel = chance.choice(CHANNELS[: 2 + (step >= 15)])
        payloads = [f"{channel}:{step}:{n}".encode() for n in range(chance.randrange(1, 5))]
        await calm.append_many([Append(channel, payload) for payload in payloads])
        expected.update(payload.upper() for payload in payloads)
        await elapse(chance.random() * 0.2)
        if chance.random() < 0.3:  # at any point of its work, a commit in flight perhaps
            crashed = chance.randrange(len(workers))
            workers[crashed].cancel()
            await asyncio.gather(workers[crashed], return_exceptions=True)
            workers[crashed] = asyncio.create_task(transform(shaky, chance))
    await elapse(120)
    assert not [worker for worker in workers if worker.done()]
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await shaky.close()
    return expected, log


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@example(115799)  # a channel stays empty
@given(st.integers(0, 2**32))
def test_each_input_has_its_output_once_whatever_crashes(seed):
    expected, log = run_virtual(crashing_transformers(seed))
    outputs = [bytes(entry.payload) for entry in log.channels["out"].entries]
    assert Counter(outputs) == expected
    for channel in CHANNELS:
        of_channel = [output for output in outputs if output.startswith(channel.upper().encode())]
        order = [tuple(map(int, output.decode().split(":")[1:])) for output in of_channel]
        assert order == sorted(order), "a channel's order was not kept"
        assert log.channels[channel].groups["transformers"].acked_to == log.groups.end(channel)


def test_equal_seeds_give_equal_runs():
    assert run_virtual(crashing_transformers(7))[1].dump() == run_virtual(crashing_transformers(7))[1].dump()


# ---- connections that are lost --------------------------------------------------------------------------------------


class FlakyCoordinatorClient(LocalCoordinatorClient):
    """Loses the owner while `down` is set: every call fails, and those that wait too."""

    def __init__(self, coordinator):
        super().__init__(coordinator)
        self.down = asyncio.Event()
        self.joins: list[From] = []

    async def join(self, group, member, channels, start, session_timeout_s):
        self._check()
        self.joins.append(start)
        await super().join(group, member, channels, start, session_timeout_s)

    async def assignment(self, group, member, seen, wait_s):
        self._check()
        answer = asyncio.ensure_future(super().assignment(group, member, seen, wait_s))
        lost = asyncio.ensure_future(self.down.wait())
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return await answer
        finally:
            answer.cancel()
            lost.cancel()

    async def commit(self, group, member, acks, outputs):
        self._check()
        return await super().commit(group, member, acks, outputs)

    def _check(self):
        if self.down.is_set():
            raise Unavailable("the owner is gone")


async def flaky_member(**options):
    wal = MemoryWal()
    ids = await filled(wal)
    wal.log.groups.use(wal._submit)
    client = FlakyCoordinatorClient(wal.log.groups.coordinator)
    return wal, ids, client, await start_member(wal, client, "g", ["a"], start=From.LATEST, member="m", **options)


def test_a_member_joins_again_by_itself_and_misses_nothing():
    async def main():
        wal, _, client, member = await flaky_member()
        ids = await wal.append_many([Append("a", b"x")] * 4)
        delivered = await anext(member)
        await member.acknowledge(delivered, ids[:2])
        client.down.set()
        await until(lambda: not member.channels)
        with pytest.raises(Fenced):
            await member.acknowledge(delivered)
        await elapse(5)
        client.down.clear()
        again = await anext(member)
        assert [entry.id for entry in again.entries] == ids[2:]
        assert client.joins == [From.LATEST, From.EARLIEST], "what was created meanwhile is read from its start"
        await member.acknowledge(again)
        await member.aclose()

    run_virtual(main())


def test_an_unknown_member_joins_again_by_itself():
    async def main():
        wal, _, _, member = await flaky_member()
        ids = await wal.append_many([Append("a", b"x")] * 2)
        delivered = await anext(member)
        wal.log.groups.coordinator.leave("g", "m")  # as its session would end
        again = await anext(member)
        assert [entry.id for entry in again.entries] == [entry.id for entry in delivered.entries] == ids
        assert again.assignment_epoch > delivered.assignment_epoch
        await member.aclose()

    run_virtual(main())


def test_an_owner_that_stays_away_is_reported_and_still_awaited():
    async def main():
        wal, _, client, member = await flaky_member(session_timeout_s=10.0)
        client.down.set()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await anext(member)
        client.down.clear()
        (id,) = await wal.append_many([Append("a", b"x")])
        assert (await anext(member)).entries[0].id == id
        client.down.set()
        await member.aclose()

    run_virtual(main())


def test_a_subscription_that_can_never_be_had_again_is_an_error_for_good():
    async def main():
        wal, _, client, member = await flaky_member()
        client.down.set()
        await until(lambda: not member.channels)
        await wal.drop_channel("a")
        client.down.clear()
        for _ in range(2):
            with pytest.raises(TidewalError, match="no channel a"):
                await anext(member)
        await member.aclose()

    run_virtual(main())


class BlippingWal(MemoryWal):
    """Reads entry by entry, and fails once in each channel, behind its first entry."""

    def __init__(self, log, chance):
        super().__init__(log)
        self.blipped: set[str] = set()
        self.may_blip = asyncio.Event()
        self._chance = chance

    async def read(self, channel, start):
        async for batch in super().read(channel, start):
            for entry in batch:
                await elapse(self._chance.random() * 0.003)
                yield [entry]
                if channel not in self.blipped:
                    await self.may_blip.wait()
                    self.blipped.add(channel)
                    raise Unavailable("the log is away for a moment")


async def blips_while_a_member_comes_and_goes(seed):
    chance = random.Random(seed)
    log = MemoryLog()
    calm, wal = MemoryWal(log), BlippingWal(log, chance)
    ids = await filled(calm, 60, ["a", "b"])
    member = await wal.join("g", ["a", "b"])
    handled = [await anext(member), await anext(member)]
    wal.may_blip.set()
    await until(lambda: wal.blipped == {"a", "b"})
    other = await calm.join("g", ["a", "b"])
    await elapse(0.2)  # one of the channels is asked back
    await other.aclose()  # before the handler has ended, so it stays where it is
    await elapse(0.2)
    delivered: list[tuple[str, bytes]] = []
    async with asyncio.timeout(60):
        while True:
            for batch in handled:
                delivered += [(batch.channel, entry.id) for entry in batch.entries]
                await member.acknowledge(batch)
                await elapse(chance.random() * 0.006)
            if len(set(delivered)) == len(ids):
                break
            handled = []
            with suppress(Unavailable):
                handled = [await anext(member)]
    assert len(delivered) == len(ids)
    await member.aclose()
    await wal.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_read_that_fails_while_a_member_comes_and_goes_loses_and_doubles_nothing(seed):
    run_virtual(blips_while_a_member_comes_and_goes(seed))


# ---- revocation, turns and limits ----------------------------------------------------------------------------------


def test_a_channel_that_is_never_acknowledged_is_taken_after_the_timeout():
    async def main():
        wal = MemoryWal()
        await filled(wal, 3, ["a", "b"])
        greedy = await wal.join("g", ["*"], session_timeout_s=10.0)
        held = {each.channel: each for each in [await anext(greedy), await anext(greedy)]}
        patient = await wal.join("g", ["*"], session_timeout_s=10.0)
        waiting = asyncio.ensure_future(anext(patient))
        await elapse(9)
        assert not waiting.done()
        await elapse(2)
        taken = await waiting
        assert taken.entries == held[taken.channel].entries
        with pytest.raises(Fenced):
            await greedy.acknowledge(held[taken.channel])
        await wal.close()

    run_virtual(main())


@pytest.mark.slow
async def test_reading_ahead_is_one_batch_per_channel():
    read: Counter[str] = Counter()

    class Counting(MemoryWal):
        async def read(self, channel, start):
            async for batch in super().read(channel, start):
                read[channel] += 1
                yield batch

    wal = Counting()
    await filled(wal, 2000, ["a", "b"])
    member = await wal.join("g", ["*"])
    for taken in range(1, 5):
        await anext(member)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(read.values()) == taken + 2
    await wal.close()


async def test_too_much_unacknowledged_is_refused_and_goes_on_after_an_acknowledgement(monkeypatch):
    monkeypatch.setattr(member_fetcher, "MAX_UNACKNOWLEDGED_BATCHES", 2)
    wal = MemoryWal()
    await filled(wal, 1000)
    member = await wal.join("g", ["a"])
    delivered = [await anext(member), await anext(member)]
    for _ in range(2):
        with pytest.raises(Overloaded) as refused:
            await anext(member)
        assert refused.value.limit == "unacknowledged_batches"
    await member.acknowledge(delivered[-1])
    assert (await anext(member)).entries[0].id > delivered[-1].entries[-1].id
    await wal.close()


async def test_what_reset_to_moves_is_counted():
    metrics = Metrics()
    wal = MemoryWal()
    ids = await filled(wal)
    member = await wal.join("g", ["a"])
    await member.aclose()
    await wal.truncate("a", ids[4])
    member = await start_member(
        wal,
        LocalCoordinatorClient(wal.log.groups.coordinator),
        "g",
        ["a"],
        reset_to=From.EARLIEST,
        resets=metrics.counter("wal_group_reset_total"),
    )
    assert (await anext(member)).entries[0].id == ids[4]
    assert metrics.value("wal_group_reset_total") == 1
    await member.aclose()


async def test_a_cancelled_wait_loses_nothing():
    wal = MemoryWal()
    await wal.create_channel("a", PLAIN)
    member = await wal.join("g", ["a"])
    for n in range(20):
        waiting = asyncio.ensure_future(anext(member))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        id = await wal.append("a", str(n).encode())
        for _ in range(n % 3):
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
        (result,) = await asyncio.gather(waiting, return_exceptions=True)
        delivered = await anext(member) if isinstance(result, asyncio.CancelledError) else result
        assert [entry.id for entry in delivered.entries] == [id]
    await wal.close()


async def test_no_task_is_left_behind():
    wal = MemoryWal()
    await filled(wal, 3, ["a", "b"])
    before = asyncio.all_tasks()
    member = await wal.join("g", ["*"])
    await anext(member)
    await member.aclose()
    assert asyncio.all_tasks() == before
    member = await wal.join("g", ["*"])
    await wal.close()
    assert asyncio.all_tasks() == before
