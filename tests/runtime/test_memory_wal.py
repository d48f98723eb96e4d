"""What the memory WAL adds to the contract that the conformance suite checks: faults, threads and a shared log."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidewal.runtime.errors import Closed, TidewalError, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


async def read(wal: MemoryWal, channel: str, count: int) -> list[Entry]:
    entries: list[Entry] = []
    batches = wal.read(channel, From.EARLIEST)
    while len(entries) < count:
        entries += await anext(batches)
    await batches.aclose()
    return entries


@pytest.mark.parametrize(
    ("rates", "written", "unknown"),
    [(Rates(fail=1), 0, None), (Rates(unknown=1), 1, True), (Rates(lost=1), 0, True)],
)
async def test_a_fault_is_reported_as_what_it_is(rates, written, unknown):
    plan = FaultPlan(1, rates)
    wal = MemoryWal(faults=plan)
    await wal.create_channel("a", ChannelPolicy())
    with pytest.raises(Unavailable) as caught:
        await wal.append("a", b"x")
    assert caught.value.fields.get("outcome_unknown") is unknown
    assert len(wal.log.channels["a"].entries) == written
    assert len(plan.trace) == 1


def test_a_delayed_append_delays_those_behind_it():
    async def main() -> None:
        plan = FaultPlan(1, Rates(delay=1))
        wal = MemoryWal(faults=plan)
        await wal.create_channel("a", ChannelPolicy())
        loop = asyncio.get_running_loop()
        answered: list[str] = []
        wal.submit([Append("a", b"first")], lambda _: answered.append("first"))
        plan.rates = Rates()
        wal.submit([Append("a", b"second")], lambda _: answered.append("second"))
        assert wal.log.channels["a"].entries == []
        before = loop.time()
        assert [bytes(entry.payload) for entry in await read(wal, "a", 2)] == [b"first", b"second"]
        assert answered == ["first", "second"]
        assert 0 < loop.time() - before <= plan.rates.delay_s_max
        plan.rates = Rates(delay=1)
        wal.submit([Append("a", b"third")], lambda _: answered.append("third"))
        await wal.close()  # finishes what was submitted
        assert answered[-1] == "third"

    run_virtual(main())


async def test_ephemeral_messages_are_lost_and_doubled_and_durable_ones_are_not():
    plan = FaultPlan(1, Rates(drop=1))
    wal = MemoryWal(faults=plan)
    await wal.create_channel("e", ChannelPolicy(ephemeral=True))
    await wal.create_channel("d", ChannelPolicy())
    await wal.append("e", b"lost")
    await wal.append("d", b"kept")
    plan.rates = Rates(duplicate=1)
    assert len(await wal.append_many([Append("e", b"1"), Append("e", b"2")])) == 2
    await wal.append("d", b"once")
    assert [bytes(entry.payload) for entry in await read(wal, "e", 4)] == [b"1", b"2", b"1", b"2"]
    assert [bytes(entry.payload) for entry in wal.log.channels["d"].entries] == [b"kept", b"once"]


async def test_a_full_ephemeral_channel_forgets_its_oldest():
    wal = MemoryWal()
    await wal.create_channel("e", ChannelPolicy(ephemeral=True, ephemeral_bytes=1_000))
    batches = wal.read("e", From.EARLIEST)
    await wal.append("e", b"0" * 100)
    assert len(await anext(batches)) == 1
    for number in range(1, 50):
        await wal.append("e", str(number % 10).encode() * 100)
    assert wal.log.channels["e"].size <= 1_000
    rest = await anext(batches)
    assert len(rest) <= 10
    assert bytes(rest[-1].payload) == b"9" * 100
    await batches.aclose()


async def test_threads_append_while_the_loop_reads():
    wal = MemoryWal()
    await wal.create_channel("a", ChannelPolicy())

    def work(name: int) -> None:
        for number in range(200):
            wal.submit([Append("a", f"{name}:{number}".encode())], lambda _: None)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    entries = await asyncio.wait_for(read(wal, "a", 800), 20)
    for thread in threads:
        thread.join()
    assert len({entry.id for entry in entries}) == 800
    assert [entry.id for entry in entries] == sorted(entry.id for entry in entries)
    for name in range(4):
        mine = [bytes(e.payload).decode() for e in entries if bytes(e.payload).startswith(f"{name}:".encode())]
        assert mine == [f"{name}:{number}" for number in range(200)]


async def test_an_answer_may_append_again():
    wal = MemoryWal()
    await wal.create_channel("a", ChannelPolicy())
    results: list[list[bytes] | TidewalError] = []
    wal.submit([Append("a", b"1")], lambda _: wal.submit([Append("a", b"2")], results.append))
    assert len(results) == 1
    assert len(wal.log.channels["a"].entries) == 2


async def test_a_restarted_node_finds_the_log_of_the_old_one():
    log = MemoryLog()
    old = MemoryWal(log)
    await old.create_channel("a", ChannelPolicy())
    await old.append("a", b"x")
    await old.close()
    with pytest.raises(Closed):
        await old.append("a", b"y")
    new = MemoryWal(log)
    assert [bytes(entry.payload) for entry in await read(new, "a", 1)] == [b"x"]
    assert log.dump() == [("a", bytes(7) + b"\x01", b"x")]


async def test_a_reader_that_went_leaves_nothing_behind():
    wal = MemoryWal()
    await wal.create_channel("a", ChannelPolicy())
    for _ in range(10):
        batches = wal.read("a", From.EARLIEST)
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert wal.log.channels["a"].waiters == []
