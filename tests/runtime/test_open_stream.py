"""A stream that is opened before the channels that it reads are made."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.errors import ChannelNotFound, InvalidRequest
from tidewal.runtime.log.wal import From, FromTime
from tidewal.runtime.ownership.producer import open_producer
from tidewal.runtime.streams.open_stream import CHANNEL_DEADLINE_S, open_stream
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


async def read_on(stream: TtMsgStream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("start", [From.EARLIEST, From.LATEST, FromTime(1)])
def test_a_reader_that_is_there_first_reads_all_that_the_writer_writes(start):
    async def main() -> None:
        log = MemoryLog()
        stream = open_stream(MemoryWal(log), ["orders-0", "orders-1"], start=start)
        reading = asyncio.create_task(anext(stream))
        await elapse(CHANNEL_DEADLINE_S - 1)
        async with open_producer(MemoryWal(log), "shop", ["orders-0", "orders-1"]) as producer:
            await producer.send([("orders-0", b"one"), ("orders-1", b"two")])
            found = [bytes(record.body) for record in (await reading).messages]
            while len(found) < 2:
                found += [bytes(record.body) for record in (await anext(stream)).messages]
            assert found == [b"one", b"two"]
        await stream.close()

    run_virtual(main())


def test_where_nothing_makes_the_channel_the_reader_says_so():
    async def main(clock: VirtualClock) -> None:
        wal = MemoryWal(MemoryLog())
        for options, waited_s in (({}, CHANNEL_DEADLINE_S), ({"channel_deadline_s": 0}, 0)):
            began_s = clock.monotonic()
            stream = open_stream(wal, ["orders"], **options)
            with pytest.raises(ChannelNotFound, match=r"no channel orders, .*made it within.*open_producer") as raised:
                await anext(stream)
            assert raised.value.fields["channel"] == "orders"
            assert clock.monotonic() - began_s == pytest.approx(waited_s, abs=0.2)
            await stream.close()

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_channel_that_was_dropped_is_not_waited_for():
    async def main(clock: VirtualClock) -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders"]) as producer:
            await producer.send([("orders", b"one")])
        stream = open_stream(wal, ["orders"])
        saved = list((await anext(stream)).end_positions.values())
        await wal.drop_channel("orders")
        began_s = clock.monotonic()
        for dropped in (stream, open_stream(wal, positions=saved)):
            with pytest.raises(ChannelNotFound):
                await read_on(dropped)
            await dropped.close()
        assert clock.monotonic() - began_s < 1.0

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_wrong_deadline_is_named():
    async def main() -> None:
        with pytest.raises(InvalidRequest, match="channel_deadline_s"):
            open_stream(MemoryWal(MemoryLog()), ["orders"], channel_deadline_s="soon")

    run_virtual(main())
