"""Named producers on every log: run twice, taken over, killed; what was acknowledged is read once and in order."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.backends import Backend, log_url
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.errors import Fenced, InvalidRequest
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.ownership.producer import open_producer
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.streams.open_stream import open_stream

CHANNELS = ["orders-0", "orders-1"]
WITHIN_S = 60.0
PROGRAM = """
import asyncio, sys
import tidewal

async def main(url):
    wal = await tidewal.open_wal(url)
    async with tidewal.open_producer(wal, "shop", ["orders-0", "orders-1"], lease_s=0.5) as producer:
        number = producer.last_sequence
        print("opened", number, flush=True)
        while True:
            number += 1
            await producer.send([(f"orders-{number % 2}", str(number).encode())], sequence=number)
            print("acked", number, flush=True)

asyncio.run(main(sys.argv[1]))
"""


async def read(wal: Wal, count: int, positions: Sequence[Position] = ()) -> tuple[list[bytes], list[Position]]:
    """The bodies of the next `count` records, and the positions behind them."""
    stream = open_stream(wal, () if positions else CHANNELS, positions=positions)
    found: list[bytes] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            pack = await anext(stream)
            found += [bytes(record.body) for record in pack.messages]
    await stream.close()
    return found, list(pack.end_positions.values())


async def test_what_is_sent_by_one_run_after_another_is_read_in_order(backend: Backend):
    wal = await backend.wal()
    positions: list[Position] = []
    for run in range(3):
        async with open_producer(wal, "shop", CHANNELS) as producer:
            assert producer.last_sequence == 2 * run
            both = [("orders-0", b"%d.a" % run), ("orders-1", b"%d.b" % run)]
            first = await producer.send(both)
            assert (await producer.send(both, sequence=2 * run + 1)).ts == first.ts
            await producer.send([("orders-1", b"%d.c" % run)])
            found, positions = await read(wal, 3, positions)
            assert sorted(found) == [b"%d.%c" % (run, letter) for letter in b"abc"]
            assert found[-1] == b"%d.c" % run
    found, _ = await read(wal, 9)
    assert [body[:1] for body in found] == [b"0"] * 3 + [b"1"] * 3 + [b"2"] * 3


async def test_an_idle_channel_does_not_hold_the_others_back(backend: Backend):
    """The stream hears by heartbeats that nothing comes there."""
    wal = await backend.wal()
    async with open_producer(wal, "shop", CHANNELS) as producer:
        await producer.send([("orders-0", b"one")])
        assert (await read(wal, 1))[0] == [b"one"]


async def test_the_newest_takes_over(backend: Backend):
    wal = await backend.wal()
    async with open_producer(wal, "shop", CHANNELS, lease_s=0.5) as old:
        await old.send([("orders-0", b"old")])
        async with open_producer(wal, "shop", CHANNELS, lease_s=0.5) as new:
            await new.send([("orders-0", b"new")])
            with pytest.raises(Fenced):
                await old.send([("orders-0", b"late")])
            await new.send([("orders-1", b"newer")])
    assert (await read(wal, 3))[0] == [b"old", b"new", b"newer"]


async def test_delayed_messages_come_in_the_order_of_their_due_times(backend: Backend):
    """Over two runs of the program; what was cancelled does not come."""
    wal = await backend.wal()
    async with open_producer(wal, "shop", CHANNELS, delays=True) as producer:
        third_due = time.monotonic() + 3.0  # or later
        await producer.schedule([("orders-0", b"third")], deliver_after_s=3.0)
        [cancelled] = await producer.schedule([("orders-1", b"never")], deliver_after_s=2.9)
        await producer.schedule([("orders-0", b"first"), ("orders-1", b"first")], deliver_after_s=0.1)
        assert await producer.cancel(cancelled)
        assert (await read(wal, 2))[0] == [b"first", b"first"]
    async with open_producer(wal, "shop", []) as producer:
        await producer.schedule([("orders-0", b"second")], deliver_after_s=0.0)
        in_time = time.monotonic() < third_due  # a busy machine may need longer for all this
        found, _ = await read(wal, 4)
        assert (found if in_time else sorted(found)) == [b"first", b"first", b"second", b"third"]


async def test_a_channel_belongs_to_one_name_until_that_gives_it_up(backend: Backend):
    """What the name wrote is removed, and the channel is dropped, and made again: another name is refused."""
    wal = await backend.wal()
    async with open_producer(wal, "shop", CHANNELS, lease_s=0.5) as shop:
        await shop.send([("orders-0", b"one")])
        latest = await wal.latest_id("orders-0")
        assert latest is not None
        await wal.truncate("orders-0", latest)
        for drop in (False, True):
            if drop:
                await wal.drop_channel("orders-0")
            with pytest.raises(InvalidRequest, match="orders-0 belongs to the producer 'shop'"):
                async with open_producer(wal, "other", ["orders-0"], lease_s=0.5):
                    pass
    clock = HybridClock()  # of one clock, what ends last has the highest time: else a reader may wait for the other one
    async with open_producer(wal, "shop", [], lease_s=0.5, clock=clock) as shop:
        assert shop.channels == ("orders-1",)
        async with open_producer(wal, "other", ["orders-0"], lease_s=0.5, clock=clock) as other:
            await other.send([("orders-0", b"others")])
            await shop.send([("orders-1", b"own")])
    assert sorted((await read(wal, 2))[0]) == [b"others", b"own"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "log",
    ["rocksmq", pytest.param("kafka", marks=pytest.mark.broker), pytest.param("pulsar", marks=pytest.mark.broker)],
)
async def test_a_killed_process_loses_and_doubles_nothing(log: str, tmp_path: Path, request: pytest.FixtureRequest):
    url = f"rocksmq://{tmp_path / 'log'}" if log == "rocksmq" else log_url(log, request.getfixturevalue(log))
    acked = 0
    for run in range(3):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, url), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WITHIN_S):
                word, opened_at = (await process.stdout.readline()).split()
                assert word == b"opened"
                assert int(opened_at) >= acked, "it goes on behind all that was acknowledged"
                while acked < 40 * (run + 1):
                    acked = max(acked, int((await process.stdout.readline()).split()[1]))
        finally:
            process.kill()
            await process.wait()
    wal = await open_wal(url)
    async with open_producer(wal, "shop", CHANNELS, lease_s=0.5) as producer:
        last = producer.last_sequence
        assert last >= acked
        found, _ = await read(wal, last)
    await wal.close()
    assert [int(body) for body in found] == list(range(1, last + 1))
