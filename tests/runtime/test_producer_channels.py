"""Which channel belongs to which named producer, whatever retention removes and whatever is dropped."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from tests.named_producers import CHANNELS, LEASE_S, CutOffWal, clock_of, everything
from tidewal.runtime.clock import HybridClock, add_ms
from tidewal.runtime.errors import (
    BadRecord,
    ChannelNotFound,
    InvalidRequest,
    PreconditionFailed,
    Unavailable,
)
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.ownership.producer import Producer, open_producer
from tidewal.runtime.ownership.producer_channels import GIVE_UP, TAKE, ProducerChannels
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.memory_channel import sequence_id


def test_a_name_keeps_the_channels_that_it_had():
    """What it wrote there counts when its batches are numbered, so it must be read there."""

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
        async with open_producer(wal, "shop", ["orders-1"]) as producer:
            assert set(producer.channels) == set(CHANNELS)
            assert producer.last_sequence == 1
            await producer.send([("orders-1", b"two")])
        assert [body for _, body in await everything(log, 2)] == [b"one", b"two"]

    run_virtual(main())


def test_a_channel_that_was_dropped_does_not_keep_the_name_from_being_opened():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"one"), ("orders-1", b"two")])
        await wal.drop_channel("orders-0")
        async with open_producer(wal, "shop", ["orders-1"]) as producer:
            assert (producer.channels, producer.last_sequence) == (("orders-1",), 1)
            await producer.send([("orders-1", b"three")])
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"four")])
        assert [body for _, body in await everything(wal.log, 3)] == [b"two", b"three", b"four"]

    run_virtual(main())


def test_a_channel_that_was_dropped_and_made_again_is_owned_again():
    """What is known of the one before, from where it must be read, is nothing to the new one."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            producer._owner._snapshots._every_records = 3
            for _ in range(2):
                for _ in range(20):
                    await producer.send([("orders-0", b"gone")])
                producer._owner.tick_all()
        assert producer._state.fold.state.channels["orders-0"].checkpoint
        await wal.drop_channel("orders-0")
        async with open_producer(wal, "shop", CHANNELS) as producer:
            assert producer.last_sequence == 40
            await producer.send([("orders-0", b"new")])
        assert [body for _, body in await everything(wal.log, 1)] == [b"new"]

    run_virtual(main())


def test_a_channel_of_another_name_is_refused():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
            for _ in range(3):  # an attempt is no claim that the next one could go beyond
                with pytest.raises(InvalidRequest, match="orders-0 belongs to the producer 'shop'"):
                    async with open_producer(wal, "other", ["orders-0", "orders-1"]):
                        pass
            await producer.send([("orders-0", b"two")])
        assert [body for _, body in await everything(wal.log, 2, ["orders-0"])] == [b"one", b"two"]
        async with open_producer(wal, "other", ["orders-1"]) as other:
            assert other.channels == ("orders-1",)
            with pytest.raises(InvalidRequest, match="orders-1 belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            assert producer.channels == ("orders-0",)

    run_virtual(main())


def test_who_was_killed_before_it_knew_its_fence_owns_its_channel():
    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        producer = Producer(MemoryWal(log), "shop", ["orders-0"], ChannelPolicy(), LEASE_S, clock_of(clock))
        propose = producer._state.propose

        async def refused(event: dict[str, object]) -> None:
            if event["kind"] == "fences":
                raise Unavailable("not now")
            await propose(event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(producer._state, "propose", refused)
            with pytest.raises(Unavailable):
                await producer.open()
        await producer._state.close()
        async with open_producer(MemoryWal(log), "shop", ["orders-0"], clock=clock_of(clock)) as again:
            await again.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)


def test_a_channel_that_was_owned_by_hand_is_refused():
    async def main() -> None:
        wal, clock = MemoryWal(MemoryLog()), HybridClock()
        await wal.create_channel("orders-0", ChannelPolicy())
        owner = ChannelOwner(wal, clock)
        await owner.acquire(ChannelGrant("orders-0", 3, 0, add_ms(clock.now(), 60_000)))
        with pytest.raises(InvalidRequest, match="by a ChannelOwner"):
            async with open_producer(wal, "shop", ["orders-0"]):
                pass

    run_virtual(main())


async def empty(wal: MemoryWal, channel: str) -> None:
    """Remove all entries of a channel, as retention does where nothing is written."""
    latest = await wal.latest_id(channel)
    assert latest is not None
    await wal.truncate(channel, sequence_id(int.from_bytes(latest) + 1))
    assert (await wal.describe(channel)).first_id is None


async def drop_and_give_up(wal: MemoryWal, name: str, channel: str) -> None:
    await wal.drop_channel(channel)
    async with open_producer(wal, name, []) as producer:
        assert channel not in producer.channels


def test_a_channel_that_retention_has_emptied_is_still_its_producers():
    """Nothing in it says whose it is."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await producer.send([("orders-0", b"one")])
            await elapse(60.0)
            await empty(wal, "orders-0")
            with pytest.raises(InvalidRequest, match="belongs to the producer 'shop'") as raised:
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            assert (raised.value.fields["channel"], raised.value.fields["owner"]) == ("orders-0", "shop")
            await producer.send([("orders-0", b"two")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"two"]

    run_virtual(main())


def test_a_channel_that_was_dropped_is_still_its_producers():
    """An incarnation that runs goes on under its terms, which would hide what another name writes under its own."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", ["orders-0"]) as producer:
            await wal.drop_channel("orders-0")
            with pytest.raises(InvalidRequest, match=r"open_producer\(wal, 'shop', \[\]\)"):
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            assert "orders-0" not in await wal.channels(), "a producer that is refused makes nothing"
            with pytest.raises(
                ChannelNotFound, match="orders-0 of the producer shop was dropped: open the producer again"
            ):
                await producer.send([("orders-0", b"lost")])
            await wal.create_channel("orders-0", ChannelPolicy())
            with pytest.raises(InvalidRequest, match="belongs to the producer 'shop'"):
                async with open_producer(wal, "other", ["orders-0"]):
                    pass
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"one"]

    run_virtual(main())


def test_a_producer_whose_channel_is_dropped_while_an_outcome_is_unknown_says_so():
    """It cannot own the channel anew, and ends."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "shop", CHANNELS) as producer:
            wal.faults = FaultPlan(1, Rates(unknown=1.0), channels="orders")
            sending = asyncio.create_task(producer.send([("orders-0", b"one")]))
            await asyncio.sleep(0)
            await wal.drop_channel("orders-0")
            wal.faults = FaultPlan()
            with pytest.raises(ChannelNotFound, match="orders-0 of the producer shop was dropped") as raised:
                await sending
            assert raised.value.fields["outcome_unknown"]
            with pytest.raises(ChannelNotFound, match="orders-0 of the producer shop was dropped"):
                await producer.send([("orders-1", b"two")])
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"three")])
        assert [body for _, body in await everything(wal.log, 1)] == [b"three"]

    run_virtual(main())


def test_a_channel_that_was_given_up_goes_on_above_all_earlier_terms():
    """A reader drops what comes under a lower term than it knows."""

    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        for _ in range(5):
            async with open_producer(wal, "shop", CHANNELS) as producer:
                await producer.send([("orders-0", b"gone"), ("orders-1", b"kept")])
        term = producer._state.fold.state.channels["orders-0"].term
        await drop_and_give_up(wal, "shop", "orders-0")
        async with open_producer(wal, "other", ["orders-0"]) as other:
            assert other._state.fold.state.channels["orders-0"].term > term
            await other.send([("orders-0", b"others")])
            async with open_producer(wal, "shop", []) as producer:
                assert (producer.channels, producer.last_sequence) == (("orders-1",), 5)
            with pytest.raises(InvalidRequest, match="belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
            await other.send([("orders-0", b"others too")])
        assert [body for _, body in await everything(wal.log, 2, ["orders-0"])] == [b"others", b"others too"]
        await drop_and_give_up(wal, "other", "orders-0")
        async with open_producer(wal, "shop", CHANNELS) as producer:
            await producer.send([("orders-0", b"back")])
        assert [body for _, body in await everything(wal.log, 1, ["orders-0"])] == [b"back"]

    run_virtual(main())


def test_of_names_that_open_at_once_one_has_the_channel():
    async def main(clock: VirtualClock, seed: int) -> None:
        log = MemoryLog()
        opened: list[Producer] = []

        async def run(name: str) -> None:
            plan = FaultPlan(seed, Rates(delay=0.5), channels="")
            async with open_producer(MemoryWal(log, plan), name, ["orders-0"], clock=clock_of(clock)) as producer:
                opened.append(producer)
                await producer.send([("orders-0", name.encode())])
                await asyncio.sleep(5.0)

        results = await asyncio.gather(*(run(name) for name in "abc"), return_exceptions=True)
        assert len(opened) == 1
        assert [type(each) for each in results if each is not None] == [InvalidRequest, InvalidRequest]
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [opened[0].name.encode()]

    for seed in range(10):
        clock = VirtualClock()
        run_virtual(main(clock, seed), clock)


def test_a_producer_that_is_refused_leaves_the_one_that_is_open_alone():
    async def main() -> None:
        wal = MemoryWal(MemoryLog())
        async with open_producer(wal, "other", ["orders-1"]), open_producer(wal, "shop", ["orders-0"]) as producer:
            with pytest.raises(InvalidRequest, match="orders-1 belongs to the producer 'other'"):
                async with open_producer(wal, "shop", CHANNELS):
                    pass
            await elapse(LEASE_S)
            await producer.send([("orders-0", b"one")])

    run_virtual(main())


def test_an_incarnation_that_was_replaced_gives_nothing_up():
    """It saw that the channel was gone before the next one made it again."""

    async def main() -> None:
        state = ProducerChannels()
        state.apply({"kind": TAKE, "name": "shop", "incarnation": 1, "channels": ["orders-0"]})
        state.apply({"kind": TAKE, "name": "shop", "incarnation": 2, "channels": ["orders-0"]})
        with pytest.raises(PreconditionFailed):
            state.apply({"kind": GIVE_UP, "name": "shop", "incarnation": 1, "channels": {"orders-0": 7}})
        with pytest.raises(PreconditionFailed):
            state.apply({"kind": TAKE, "name": "other", "incarnation": 9, "channels": ["orders-1", "orders-0"]})
        assert (state.of("shop"), state.of("other")) == (["orders-0"], [])
        state.apply({"kind": GIVE_UP, "name": "shop", "incarnation": 2, "channels": {"orders-0": 7}})
        restored = ProducerChannels()
        restored.restore(msgpack.unpackb(msgpack.packb(state.snapshot())))
        assert (restored.find("orders-0"), restored.of("shop")) == (state.find("orders-0"), [])
        assert restored.find("orders-0").term == 7
        for event in (
            {"kind": "other"},
            {"kind": TAKE},
            {"kind": TAKE, "name": "a", "incarnation": "x", "channels": []},
        ):
            with pytest.raises(BadRecord):
                restored.apply(event)
        with pytest.raises(BadRecord):
            restored.restore([1])

    run_virtual(main())


@pytest.mark.parametrize("steps", range(1, 20))
def test_a_process_that_is_killed_while_it_opens_keeps_no_name_from_its_channels(steps):
    """After any number of steps of the event loop: the name opens again, and what it gives up another name may have."""

    async def main(clock: VirtualClock) -> None:
        log = MemoryLog()
        killed = Producer(CutOffWal(log), "shop", ["orders-0"], ChannelPolicy(), LEASE_S, clock_of(clock))
        opening = asyncio.create_task(killed.open())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert isinstance(killed._wal, CutOffWal)
        killed._wal.cut_off = True
        opening.cancel()
        await asyncio.wait({opening})
        killed._heartbeat.stop()
        if killed._renewing is not None:
            killed._renewing.cancel()
        await killed._state.close()

        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders-0"], clock=clock_of(clock)) as producer:
            await producer.send([("orders-0", b"one")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"one"]
        await drop_and_give_up(wal, "shop", "orders-0")
        async with open_producer(wal, "other", ["orders-0"], clock=clock_of(clock)) as other:
            await other.send([("orders-0", b"two")])
        assert [body for _, body in await everything(log, 1, ["orders-0"])] == [b"two"]

    clock = VirtualClock()
    run_virtual(main(clock), clock)
