"""`ack_timeout_s` of members that are iterated by hand, over the memory WAL on virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.errors import Fenced, InvalidRequest
from tidewal.runtime.groups.group_consumer import start_member
from tidewal.runtime.groups.local_coordinator_client import LocalCoordinatorClient
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.record_member import RecordMember
from tidewal.runtime.groups.retry_policy import RetryPolicy
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

TIMEOUT_S = 10.0


async def opened(*channels):
    wal = MemoryWal(MemoryLog())
    for channel in channels:
        await wal.create_channel(channel, ChannelPolicy())
        await wal.append_many([Append(channel, b"%d" % number) for number in range(4)])
    return wal


def now():
    return asyncio.get_running_loop().time()


async def no_more(member):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await anext(member)


def test_what_is_held_for_too_long_comes_again_and_only_that():
    async def main():
        metrics = Metrics()
        wal = await opened("a", "b")
        wal.log.groups.use(wal._submit)
        client = LocalCoordinatorClient(wal.log.groups.coordinator)
        counter = metrics.counter("wal_group_ack_timeout_total", group="g")
        member = await start_member(wal, client, "g", ["a", "b"], ack_timeout_s=TIMEOUT_S, ack_timeouts=counter)
        first = {each.channel: each for each in [await anext(member), await anext(member)]}
        await member.acknowledge(first["b"])
        again = await anext(member)
        assert now() == pytest.approx(TIMEOUT_S, rel=0.02)
        assert (again.channel, again.entries) == ("a", first["a"].entries)
        with pytest.raises(Fenced):
            await member.acknowledge(first["a"])
        with pytest.raises(Fenced):
            member.extend_ack_timeout(first["a"])
        await member.acknowledge(again)
        await elapse(10 * TIMEOUT_S)
        await no_more(member)
        assert metrics.value("wal_group_ack_timeout_total", group="g") == 1
        assert member.ack_timeout_s == TIMEOUT_S
        await wal.close()

    run_virtual(main())


def test_another_member_gets_it_where_the_holder_has_too_many_channels():
    async def main():
        wal = await opened("a", "b")
        holder = await wal.join("g", ["a", "b"], ack_timeout_s=TIMEOUT_S)
        held = [await anext(holder), await anext(holder)]
        other = await wal.join("g", ["a", "b"])  # its share is revoked, and not let go while something is held
        found = await anext(other)
        assert now() == pytest.approx(TIMEOUT_S, rel=0.02)
        assert found.entries in [each.entries for each in held]
        await wal.close()

    run_virtual(main())


def test_an_extension_gives_time_and_never_takes_any():
    async def main():
        wal = await opened("a")
        member = await wal.join("g", ["a"], ack_timeout_s=TIMEOUT_S)
        held = await anext(member)
        await elapse(6)
        member.extend_ack_timeout(held, 1.0)
        await elapse(3)
        await member.annotate(held, b"it is this member's")
        member.extend_ack_timeout(held)
        await elapse(9)
        first, *others = held.parts()
        assert others
        member.extend_ack_timeout(first, 60.0)
        for timeout_s in (0, -1.0):
            with pytest.raises(InvalidRequest, match="timeout_s"):
                member.extend_ack_timeout(held, timeout_s)
        await anext(member)
        assert now() == pytest.approx(18 + 60, rel=0.02)
        await wal.close()

    run_virtual(main())


def test_time_for_which_the_loop_stands_still_does_not_count():
    clock = VirtualClock()

    async def main():
        wal = await opened("a")
        member = await wal.join("g", ["a"], ack_timeout_s=TIMEOUT_S)
        held = await anext(member)
        for _ in range(5):
            clock.advance(60.0)  # no timer runs meanwhile
            await elapse(0.5)
        await member.acknowledge(held)
        await wal.close()

    run_virtual(main(), clock)


def test_no_time_is_refused():
    async def main():
        wal = await opened("a")
        for timeout_s in (0, -1.0):
            with pytest.raises(InvalidRequest, match="ack_timeout_s"):
                await wal.join("g", ["a"], ack_timeout_s=timeout_s)
        await no_groups(wal)
        await wal.close()

    async def no_groups(wal):
        assert [group for group in await wal.groups() if group.members] == []

    run_virtual(main())


def test_retries_have_a_time_of_their_own():
    async def main():
        wal = await opened("a")
        member = await wal.join("g", ["a"], ack_timeout_s=TIMEOUT_S)

        async def handle(delivered):
            raise AssertionError("it is refused before")

        with pytest.raises(InvalidRequest, match="policy"):
            await process(wal, member, handle, Semantics.AT_LEAST_ONCE, retry=RetryPolicy())
        await wal.close()

    run_virtual(main())


def test_of_a_handler_that_hangs_the_batch_comes_again():
    """`process` without retries: what it commits too late is refused, and what came again is done once."""

    async def main():
        wal = await opened("a", "out")
        member = await wal.join("g", ["a"], ack_timeout_s=TIMEOUT_S)
        calls = 0

        async def handle(delivered):
            nonlocal calls
            calls += 1
            await elapse(2 * TIMEOUT_S if calls == 1 else 1)
            return [Append("out", bytes(entry.payload) * 2) for entry in delivered.entries]

        await process(wal, member, handle, Semantics.EXACTLY_ONCE, count=1)
        assert calls == 2
        outputs = [payload for channel, _, payload in wal.log.dump() if channel == "out"]
        assert outputs[4:] == [b"00", b"11", b"22", b"33"]
        await wal.close()

    run_virtual(main())


def test_of_records_the_time_begins_where_a_pack_is_delivered():
    """What waits in the member for the rest of its batch is not held by anybody."""

    async def main():
        wal = MemoryWal(MemoryLog())
        await wal.create_channel("a", ChannelPolicy())
        parts = [
            encode(Record(RecordType.ROWS, body=b"%d" % n, ts=5, term=1, cseq=n + 1, part=BatchPart(1, n, 2)))
            for n in range(2)
        ]
        member = RecordMember(wal, await wal.join("g", ["a"], ack_timeout_s=TIMEOUT_S))
        delivered = asyncio.ensure_future(anext(member))
        await wal.append("a", parts[0])
        await elapse(5 * TIMEOUT_S)
        await wal.append("a", parts[1])
        pack = await delivered
        since = now()
        member.extend_ack_timeout(pack, 2 * TIMEOUT_S)
        again = await anext(member)
        assert now() - since == pytest.approx(2 * TIMEOUT_S, rel=0.02)
        assert [bytes(record.body) for record in again.records] == [bytes(record.body) for record in pack.records]
        await member.acknowledge(again)
        await elapse(5 * TIMEOUT_S)
        await no_more(member)
        await wal.close()

    run_virtual(main())


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_passed_or_taken_back_early(seed):
    chance = random.Random(seed)

    async def worker(member, given_s, done):
        async for delivered in member:
            since = now()
            first = (delivered.channel, delivered.entries[0].id)
            before = given_s.get(first)
            assert before is None or since >= before - 1e-6, f"seed {seed}: came again early"
            given_s[first] = since + TIMEOUT_S
            with suppress(Fenced):
                while chance.random() < 0.4:
                    await elapse(chance.random() * 8)
                    if chance.random() < 0.5:
                        member.extend_ack_timeout(delivered)
                        given_s[first] = max(given_s[first], now() + TIMEOUT_S)
                if chance.random() < 0.7:
                    await elapse(chance.random() * 12)
                    if chance.random() < 0.5:
                        wanted = [entry.id for entry in delivered.entries if chance.random() < 0.5]
                        await member.acknowledge(delivered, wanted)
                        done.update((delivered.channel, id) for id in wanted)
                    else:
                        given_s.pop(first, None)
                        await member.acknowledge(delivered)
                        done.update((delivered.channel, entry.id) for entry in delivered.entries)

    async def main():
        channels = ["a", "b", "c"]
        wal = await opened(*channels)
        member = await wal.join("g", channels, ack_timeout_s=TIMEOUT_S)
        done: set[tuple[str, bytes]] = set()
        working = asyncio.ensure_future(worker(member, {}, done))
        for _ in range(200):
            await elapse(TIMEOUT_S)
            if working.done() or len(done) == 12:
                break
        assert len(done) == 12, f"seed {seed}: {working}"
        await member.aclose()
        await working
        await wal.close()

    run_virtual(main())
