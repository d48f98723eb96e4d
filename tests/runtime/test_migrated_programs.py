"""What programs keep in a log goes along in a migration: named producers, their delayed messages, keyed state, and what
Spark's queries have noted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from uuid import UUID, uuid4

import msgpack
import pytest

from tests.dying_wal import DyingWal, Killed
from tests.named_producers import CHANNELS, clock_of, kill
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.dataflow.keyed_state import KeyedState
from tidewal.runtime.errors import InvalidRequest, Moved, PreconditionFailed, Unavailable, Unsupported
from tidewal.runtime.log.ledger_body import STAGED, is_ledger, ledger_channel
from tidewal.runtime.log.migration_state import MigrationPhase, migration_state
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelInfo, ChannelPolicy, Delivered, GroupInfo, Wal
from tidewal.runtime.migration.beginning import fitting
from tidewal.runtime.migration.channel_copy import stored_entries
from tidewal.runtime.migration.log_states import LogStates
from tidewal.runtime.migration.migration import cancel_migration, migrate
from tidewal.runtime.migration.preparation import begin_switch, prepare
from tidewal.runtime.migration.shared_migration import migrate_in_use
from tidewal.runtime.ownership.producer import Producer, open_producer
from tidewal.runtime.ownership.producer_channels import producer_channels
from tidewal.runtime.streams.open_stream import open_stream
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://new"


class SharedWal(MemoryWal):
    """A log to which several processes can write, as to brokers."""

    capabilities = replace(MemoryWal.capabilities, one_node=False, one_machine=False)


def logs() -> tuple[MemoryWal, MemoryWal]:
    """The old log, and the new one."""
    return MemoryWal(MemoryLog()), MemoryWal(MemoryLog())


async def bodies(wal: Wal, count: int, channels: Sequence[str] = CHANNELS) -> list[bytes]:
    """The first messages, as a stream hands them out."""
    stream = open_stream(wal, channels, stalled_after_s=60.0)
    found: list[bytes] = []
    try:
        while len(found) < count:
            found += [bytes(each.body) for each in (await anext(stream)).messages]
    finally:
        await stream.close()
    return found


async def payloads(wal: Wal, channel: str) -> list[bytes]:
    """What a channel has now."""
    return [bytes(entry.payload) async for entry in stored_entries(wal, await wal.describe(channel))]


async def batch(producer: Producer, number: int) -> None:
    """The batch of that number, which may be there."""
    await producer.send([(name, b"%d" % number) for name in CHANNELS], sequence=number)


# ---- named producers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncated", [False, True])
def test_a_named_producer_goes_on_under_its_numbers(truncated: bool) -> None:
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        for first in (1, 4):
            async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)) as producer:
                for number in range(first, first + 3):
                    await batch(producer, number)
        if truncated:  # with the fences
            latest = await old.latest_id("orders-0")
            assert latest is not None
            await old.truncate("orders-0", latest)
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            assert producer.channels == tuple(CHANNELS)
            assert producer.last_sequence == 6
            for number in (7,) if truncated else (5, 6, 7):
                await batch(producer, number)
        channels = ["orders-1"] if truncated else CHANNELS
        found = await bodies(new, 7 * len(channels), channels)
        assert sorted(found) == sorted([b"%d" % number for number in range(1, 8) for _ in channels])
        with pytest.raises(InvalidRequest, match="belongs to the producer 'shop'"):
            async with open_producer(new, "other", ["orders-0"], clock=clock_of(clock)):
                pass

    run_virtual(main(), clock)


def test_a_channel_can_be_given_up_in_the_new_log() -> None:
    """Incarnations are numbered anew there: those of the old log are not later ones."""
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        for _ in range(5):
            async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)):
                pass
        await migrate(old, new, OLD, NEW)
        await new.drop_channel("orders-0")
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            assert producer.channels == ("orders-1",)
        async with open_producer(new, "other", ["orders-0"], clock=clock_of(clock)) as producer:
            await producer.send([("orders-0", b"of the other")])
        assert await bodies(new, 1, ["orders-0"]) == [b"of the other"]

    run_virtual(main(), clock)


def test_a_channel_that_was_dropped_and_one_of_a_name_like_a_state_do_not_disturb() -> None:
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 1)
        await old.drop_channel("orders-0")
        await old.create_channel("producer-of-wine", ChannelPolicy())
        await old.append("producer-of-wine", b"a program's own")
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 2)
        assert sorted(await bodies(new, 3)) == [b"1", b"2", b"2"]
        assert await payloads(new, "producer-of-wine") == [b"a program's own"]

    run_virtual(main(), clock)


def test_delayed_messages_of_a_producer_come_in_the_new_log() -> None:
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock), delays=True) as producer:
            await producer.schedule([("orders-0", b"due"), ("orders-1", b"due")], deliver_after_s=1)
            ids = await producer.schedule([("orders-0", b"cancelled"), ("orders-1", b"later")], deliver_after_s=100)
            await producer.schedule([("orders-1", b"last")], deliver_after_s=200)
            await producer.cancel(ids[0])
            await asyncio.sleep(60)  # the first are done, and noted so, with a head
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            await asyncio.sleep(300)
            assert not producer._delays.pending
        assert sorted(await bodies(new, 4)) == [b"due", b"due", b"last", b"later"]
        assert await bodies(new, 3, ["orders-1"]) == [b"due", b"later", b"last"]

    run_virtual(main(), clock)


def test_one_that_may_be_open_is_waited_for_where_it_can_write_beside_the_migration() -> None:
    """On brokers. Where one process has the log alone, none can."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        old, new = SharedWal(log), MemoryWal(MemoryLog())
        async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 1)
            with pytest.raises(Unavailable, match=r"producer shop has not ended.*open_producer\(wal, 'shop', \[\]\)"):
                await migrate(old, new, OLD, NEW)
            assert await new.channels() == []
            await prepare(old, new, OLD, NEW)
            await batch(producer, 2)
            await kill(producer)
        with pytest.raises(Unavailable, match="producer shop has not ended"):
            await migrate(old, new, OLD, NEW)
        await cancel_migration(old, new, NEW, settle_s=0)
        async with open_producer(old, "shop", [], clock=clock_of(clock)):
            pass
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            await batch(producer, 2)
            await batch(producer, 3)
        assert sorted(await bodies(new, 6)) == [b"1", b"1", b"2", b"2", b"3", b"3"]

    run_virtual(main(), clock)


def test_none_is_opened_in_a_log_that_is_migrated_since_it_was_opened() -> None:
    """Its program has the log open from before, as brokers let it."""
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        old, program, new = SharedWal(log), SharedWal(log), MemoryWal(MemoryLog())
        async with open_producer(program, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 1)
        await prepare(old, new, OLD, NEW)
        await begin_switch(old, new)
        before = await payloads(old, "orders-0"), await payloads(old, "producer-shop")
        for name in ("shop", "other"):
            with pytest.raises(Unavailable, match="the migration of this log has not ended"):
                async with open_producer(program, name, [f"of-{name}"], clock=clock_of(clock)):
                    pass
        await migrate(old, new, OLD, NEW)
        with pytest.raises(Moved) as moved:
            async with open_producer(program, "shop", [], clock=clock_of(clock)):
                pass
        assert moved.value.fields["url"] == NEW
        assert before == (await payloads(old, "orders-0"), await payloads(old, "producer-shop"))

    run_virtual(main(), clock)


class LateLooks(SharedWal):
    """A program's view of a log, which is migrated between the look with which a producer is begun and its grant."""

    switch: Callable[[], Awaitable[object]] | None = None

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        if self.switch is not None and channel == "producer-shop":
            switch, self.switch = self.switch, None
            await switch()
        await super().create_channel(channel, policy)


@pytest.mark.parametrize("ended", [False, True])
def test_one_that_is_opened_beside_the_switch_acknowledges_nothing(ended: bool) -> None:
    clock = VirtualClock()

    async def main() -> None:
        log = MemoryLog()
        old, program, new = SharedWal(log), LateLooks(log), MemoryWal(MemoryLog())
        async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 1)
        await prepare(old, new, OLD, NEW)

        async def switch() -> None:
            await begin_switch(old, new)
            if ended:
                await migrate(old, new, OLD, NEW)

        program.switch = switch
        with pytest.raises(Moved if ended else Unavailable):
            async with open_producer(program, "shop", [], clock=clock_of(clock)) as producer:
                await batch(producer, 2)
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            await batch(producer, 2)
        assert sorted(await bodies(new, 4)) == [b"1", b"1", b"2", b"2"]

    run_virtual(main(), clock)


def test_one_that_is_open_is_seen_beside_the_command_in_a_directory() -> None:
    """The command reads and writes through the process that has the directory, which may be a program."""
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        async with open_producer(old, "shop", CHANNELS, clock=clock_of(clock)) as producer:
            await batch(producer, 1)
            migrating = asyncio.create_task(migrate_in_use(old, new, OLD, NEW, leave_s=20))
            for _ in range(9):
                await asyncio.sleep(2)
                assert (await migration_state(old)).phase is MigrationPhase.PREPARING, "nodes go on"
                assert not migrating.done()
            with pytest.raises(Unavailable, match="producer shop has not ended"):
                await migrating
            await batch(producer, 2)
            migrating = asyncio.create_task(migrate_in_use(old, new, OLD, NEW))
            await asyncio.sleep(10)
        await migrating  # it was waited for
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as producer:
            assert producer.last_sequence == 2

    run_virtual(main(), clock)


class OpenedBetween(SharedWal):
    """A log in which a program opens a name for the first time, between two requests of a preparation."""

    opens: Callable[[], Awaitable[object]] | None = None
    at = 0  # the request of this number finds it opened
    asked = 0

    async def channels(self) -> list[str]:
        if self.opens is not None:
            self.asked += 1
            if self.asked == self.at:
                opens, self.opens = self.opens, None
                await opens()
        return await super().channels()


def test_a_name_that_is_opened_first_beside_a_preparation_does_not_end_it() -> None:
    clock = VirtualClock()

    async def main() -> None:
        for at in range(1, 40):
            log, new = MemoryLog(), MemoryWal(MemoryLog())
            old = OpenedBetween(log)
            await old.create_channel("plain", ChannelPolicy())

            async def opens(log: MemoryLog = log) -> None:
                async with open_producer(SharedWal(log), "shop", CHANNELS, clock=clock_of(clock)) as producer:
                    await batch(producer, 1)

            old.opens, old.at = opens, at
            await prepare(old, new, OLD, NEW)
            if old.opens is not None:
                assert at > 5
                return
            await migrate(old, new, OLD, NEW)
            assert sorted(await bodies(new, 2)) == [b"1", b"1"]
        raise AssertionError("a preparation asks less often")

    run_virtual(main(), clock)


def test_a_killed_one_waits_for_its_lease_in_the_new_log() -> None:
    clock = VirtualClock()

    async def main() -> None:
        old, new = logs()
        producer = Producer(old, "shop", CHANNELS, ChannelPolicy(), 10.0, clock_of(clock))
        await producer.open()
        await batch(producer, 1)
        await kill(producer)
        await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", [], clock=clock_of(clock)) as successor:
            await batch(successor, 1)
            await batch(successor, 2)
        assert sorted(await bodies(new, 4)) == [b"1", b"1", b"2", b"2"]

    run_virtual(main(), clock)


async def test_a_migration_that_is_killed_at_each_write_goes_on_with_producers() -> None:
    steps, ended, behind = 0, False, False
    while not ended:
        steps, behind = steps + 1, not behind
        old, new = logs()
        async with open_producer(old, "shop", CHANNELS, delays=True) as producer:
            await batch(producer, 1)
            await producer.schedule([("orders-0", b"later")], deliver_after_s=3600)
        left = [steps]
        try:
            dying = [DyingWal(wal.log, left, behind=behind) for wal in (old, new)]
            await migrate(*dying, OLD, NEW)
            ended = True
        except Killed:
            await migrate(old, new, OLD, NEW)
        async with open_producer(new, "shop", []) as producer:
            await batch(producer, 1)
            await batch(producer, 3)  # 2 is the delayed one
            assert producer._delays.pending == 1
        assert sorted(await bodies(new, 4)) == [b"1", b"1", b"3", b"3"]
    assert steps > 15


async def test_what_is_no_state_of_a_producer_is_refused() -> None:
    old, new = logs()
    await old.create_channel("producer-none", ChannelPolicy())
    await old.append("producer-none", encode(Record(RecordType.PRODUCER, body=b"none")))
    with pytest.raises(Unsupported, match="producer-none is named like the state of nodes or of a named producer"):
        await migrate(old, new, OLD, NEW)
    assert await new.channels() == []


# ---- keyed state --------------------------------------------------------------------------------------------------


def count(delivered: Delivered, state: KeyedState) -> list[Append]:
    counts = state.table("counts")
    for entry in delivered.entries:
        counts[bytes(entry.payload)] = counts.get(bytes(entry.payload), 0) + 1
    return [Append("out", msgpack.packb(sorted(counts.items())))]


async def counted(wal: Wal, words: Sequence[bytes]) -> dict[bytes, int]:
    """Send words, and count until all are; what the state has then."""
    before = await wal.latest_id("out")
    for word in words:
        await wal.append("words", word)
    joined = await wal.join("g", ["words"])

    async def handle(delivered: Delivered, state: KeyedState) -> list[Append]:
        return count(delivered, state)

    processing = asyncio.create_task(process_keyed(wal, joined, handle, "counting", commit_interval_s=0))
    latest = await wal.latest_id("words")
    while True:
        done = {group.name: group for group in await wal.groups()}["g"].positions.get("words")
        if done == latest and await wal.latest_id("out") != before:
            break
        await asyncio.sleep(0.01)
    processing.cancel()
    await asyncio.gather(processing, return_exceptions=True)
    await joined.aclose()
    return dict(msgpack.unpackb((await payloads(wal, "out"))[-1]))


def test_keyed_state_goes_along() -> None:
    async def main() -> None:
        old, new = logs()
        for name in ("words", "out"):
            await old.create_channel(name, ChannelPolicy())
        assert await counted(old, [b"a", b"b", b"a"]) == {b"a": 2, b"b": 1}
        await migrate(old, new, OLD, NEW)
        assert await counted(new, [b"a", b"c"]) == {b"a": 3, b"b": 1, b"c": 1}

    run_virtual(main(), VirtualClock())


# ---- Spark's ledgers ----------------------------------------------------------------------------------------------


def ledger_record(**body: object) -> bytes:
    return encode(Record(RecordType.LEDGER, body=msgpack.packb({"v": 1, **body})))


async def test_a_ledger_goes_along_when_its_batches_are_done() -> None:
    old, new = logs()
    channel = ledger_channel("by-dev", str(uuid4()))
    await old.create_channel(channel, ChannelPolicy())
    await old.create_channel(f"{channel}-staged", ChannelPolicy())
    await old.append(f"{channel}-staged", encode(Record(RecordType.LEDGER, tags={"token": "t"}, body=b"rows")))
    for number in range(2):
        await old.append(channel, ledger_record(batch=number, run="r", attempts=[], ends={}))
        if not number:
            await old.append(channel, ledger_record(done=number, run="r", digest=7))
    await old.append(channel, b"a stranger's")
    with pytest.raises(Unavailable, match=r"batch 1 of a Spark query is decided and not done \(by-dev-spark-"):
        await migrate(old, new, OLD, NEW)
    assert await new.channels() == []
    await prepare(old, new, OLD, NEW)  # a query may go on meanwhile
    await old.append(channel, ledger_record(done=1, run="r", digest=8))
    await migrate(old, new, OLD, NEW)
    assert await payloads(new, channel) == await payloads(old, channel)
    assert len(await payloads(new, f"{channel}-staged")) == 1


class DecidedMeanwhile(MemoryWal):
    """A log in which a batch of Spark is decided behind the look at the ledgers."""

    decide: Callable[[], Awaitable[object]] | None = None

    async def groups(self) -> list[GroupInfo]:
        if self.decide is not None and (await migration_state(self)).phase is MigrationPhase.MIGRATING:
            decide, self.decide = self.decide, None
            await decide()
        return await super().groups()


@pytest.mark.parametrize("known", [False, True])
async def test_a_batch_that_is_decided_while_the_log_is_copied_does_not_go_along(known: bool) -> None:
    """Its driver was not stopped, and then dies: in the new log the ids of the decision would name other entries."""
    old, new = DecidedMeanwhile(MemoryLog()), MemoryWal(MemoryLog())
    channel = ledger_channel("by-dev", str(UUID(int=7)))
    await old.create_channel("plain", ChannelPolicy())
    if known:
        await old.create_channel(channel, ChannelPolicy())

    async def decide() -> None:
        await old.create_channel(channel, ChannelPolicy())
        await old.append(channel, ledger_record(batch=0, run="r", attempts=[], ends={}))

    old.decide = decide
    with pytest.raises(Unavailable, match="batch 0 of a Spark query is decided and not done"):
        await migrate(old, new, OLD, NEW)
    assert (await migration_state(old)).phase is MigrationPhase.MIGRATING
    await cancel_migration(old, new, NEW)
    await old.append(channel, ledger_record(done=0, run="r", digest=7))
    await migrate(old, new, OLD, NEW)
    assert await payloads(new, channel) == await payloads(old, channel)


async def test_a_record_that_is_none_of_a_ledger_is_passed_over() -> None:
    """As bytes of a stranger are: Spark's writer refuses it, there as here."""
    old, new = logs()
    channel = ledger_channel("by-dev", str(UUID(int=7)))
    await old.create_channel(channel, ChannelPolicy())
    for body in ({}, {"batch": "none"}, {"done": None}):
        await old.append(channel, ledger_record(**body))
    await migrate(old, new, OLD, NEW)
    assert await payloads(new, channel) == await payloads(old, channel)


@pytest.mark.parametrize("writer", [str(UUID(int=7)), UUID(int=7).hex])
def test_a_ledger_is_known_by_its_name(writer: str) -> None:
    """What a program has named nearly so is not read to its end while the log stands still."""
    assert is_ledger(ledger_channel("by-dev", writer))
    for other in (f"{ledger_channel('by-dev', writer)}{STAGED}", ledger_channel("events", "raw"), "producer-of-wine"):
        assert not is_ledger(other)


async def test_a_channel_that_is_dropped_while_a_preparation_looks_does_not_end_it() -> None:
    class LateWal(MemoryWal):
        """One in which a channel goes between two requests."""

        async def describe(self, channel: str) -> ChannelInfo:
            if channel == "producer-of-wine" and channel in await self.channels():
                await self.drop_channel(channel)
            return await super().describe(channel)

    log = MemoryLog()
    async with open_producer(MemoryWal(log), "shop", CHANNELS):
        pass
    wal = LateWal(log)
    await wal.create_channel("producer-of-wine", ChannelPolicy())
    states = await fitting(lambda: LogStates.read_states(wal), in_use=True)
    assert "producer-shop" in states._written


async def test_producers_channels_of_the_new_log_are_read_as_ever() -> None:
    old, new = logs()
    async with open_producer(old, "shop", CHANNELS):
        pass
    await migrate(old, new, OLD, NEW)
    async with producer_channels(new, "reader", lambda: 1) as belonging:
        state = belonging.fold.state
        assert state.of("shop") == sorted(CHANNELS)
        with pytest.raises(PreconditionFailed, match="belongs to shop"):
            state.apply({"kind": "take", "name": "other", "incarnation": 1, "channels": ["orders-0"]})
