"""The turn to commit: a loop commits what is small, the thread the rest, and goes on where a loop does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from random import Random

import pytest

from tidewal.adapters.rocksmq.journal import journal
from tidewal.runtime.disk import Disk, Syncer
from tidewal.runtime.errors import JournalFailed
from tidewal.runtime.event_file import EventFile
from tidewal.runtime.log.wal import Append, ChannelPolicy, Durability, From, Payload

BOUND_S = 20.0
PLAIN = ChannelPolicy()


class HeldSyncer:
    """Ends a sync when the test says so."""

    def __init__(self, disk: HeldDisk) -> None:
        self._event = EventFile(blocking=False)
        self.file = self._event.file
        self._disk = disk

    def start(self, file: int) -> bool:
        self._disk.started.set()
        if self._disk.refusing:
            return False
        if not self._disk.holding:
            self.end()
        return True

    def end(self) -> None:
        self._event.set()

    def finish(self) -> bool:
        if self._disk.loops_are_quicker and threading.current_thread().name == "tidewal-journal":
            return False
        try:
            self._event.take()
        except BlockingIOError:
            return False
        if self._disk.error is not None:
            raise self._disk.error
        return True


class HeldDisk(Disk):
    """Remembers which threads write and sync."""

    def __init__(self) -> None:
        self.holding = self.refusing = self.loops_are_quicker = False
        self.error: OSError | None = None
        self.started = threading.Event()
        self.writers: list[str] = []
        self.synced_by: list[str] = []
        self.made: list[HeldSyncer] = []

    def write(self, file: int, buffers: Sequence[Payload], offset: int) -> int:
        self.writers.append(threading.current_thread().name)
        return super().write(file, buffers, offset)

    def sync(self, file: int) -> None:
        self.synced_by.append(threading.current_thread().name)
        super().sync(file)

    def syncer(self) -> Syncer:
        self.made.append(HeldSyncer(self))
        return self.made[-1]

    def release(self) -> None:
        self.holding = False
        for syncer in self.made:
            syncer.end()


@pytest.fixture
def disk() -> HeldDisk:
    return HeldDisk()


@pytest.fixture
async def store(open_rocksmq, disk, helpers):
    store = await open_rocksmq(disk=disk, segment_bytes=32 * 1024 * 1024)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)
    await at_rest(store)
    disk.writers.clear()
    disk.synced_by.clear()
    return store


async def begun(disk: HeldDisk, append: asyncio.Future[bytes]) -> None:
    """Let the loop turn until the append waits for its sync."""
    while not disk.started.is_set():
        assert not append.done()
        await asyncio.sleep(0)
    assert not append.done()


async def at_rest(store) -> None:
    """Wait until the thread has released the turn: what it did last may be answered before."""
    while store._journal._turn is not None:  # noqa: ASYNC110 -- shown in no other way
        await asyncio.sleep(0)


def submit_elsewhere(store, payload: bytes) -> threading.Event:
    """Append from a thread; an event for its answer."""
    answered = threading.Event()
    thread = threading.Thread(target=lambda: store.submit([Append("a", payload)], lambda _: answered.set()))
    thread.start()
    thread.join()
    return answered


async def payloads(store, helpers, count: int) -> list[bytes]:
    return helpers.payloads(await helpers.take(store, "a", From.EARLIEST, count))


async def test_small_commits_are_the_loops_and_others_the_threads(store, disk):
    here = threading.current_thread().name
    await store.append("a", b"small")
    await store.append_many([Append("a", b"small")] * 3)
    assert (set(disk.writers), disk.synced_by) == ({here}, [])
    disk.writers.clear()
    await store.append_many([Append("a", bytes(1024 * 1024))] * 3)
    assert (set(disk.writers), set(disk.synced_by)) == ({"tidewal-journal"}, {"tidewal-journal"})
    disk.writers.clear()
    await asyncio.to_thread(lambda: submit_elsewhere(store, b"small").wait(BOUND_S))
    assert set(disk.writers) == {"tidewal-journal"}


async def test_what_is_acknowledged_before_the_sync_is_the_threads(store, disk):
    await store.create_channel("early", ChannelPolicy(acks=Durability.ONE))
    disk.writers.clear()
    await store.append("early", b"x")
    assert set(disk.writers) == {"tidewal-journal"}


async def test_a_blocked_loop_does_not_hold_up_others(store, disk, helpers):
    disk.holding = True
    append = asyncio.ensure_future(store.append("a", b"here"))
    await begun(disk, append)
    answered = submit_elsewhere(store, b"there")
    disk.release()
    assert answered.wait(BOUND_S)  # the loop is blocked here
    assert await append
    assert await payloads(store, helpers, 2) == [b"here", b"there"]
    assert disk.synced_by == ["tidewal-journal"]  # of the second alone: no sync twice


async def test_a_caller_that_submits_may_block_the_loop_until_it_is_answered(store, helpers):
    answered = threading.Event()
    store.submit([Append("a", b"x")], lambda _: answered.set())
    assert answered.wait(BOUND_S)
    append = asyncio.ensure_future(store.append("a", b"y"))
    await asyncio.sleep(0)
    answered.clear()
    store.submit([Append("a", b"z")], lambda _: answered.set())
    assert answered.wait(BOUND_S)
    assert await append
    assert await payloads(store, helpers, 3) == [b"x", b"y", b"z"]


async def test_a_loop_that_is_quicker_lets_the_thread_go_on(store, disk, helpers):
    disk.holding = disk.loops_are_quicker = True
    append = asyncio.ensure_future(store.append("a", b"here"))
    await begun(disk, append)
    answered = submit_elsewhere(store, b"there")
    disk.release()
    assert await append
    assert await asyncio.to_thread(answered.wait, BOUND_S)
    assert await payloads(store, helpers, 2) == [b"here", b"there"]


async def test_a_loop_that_has_ended_does_not_hold_up_others(store, disk, helpers):
    disk.holding = True

    async def begin() -> None:
        await begun(disk, asyncio.ensure_future(store.append("a", b"of a loop that ends")))

    await asyncio.to_thread(lambda: asyncio.run(begin()))
    append = asyncio.ensure_future(store.append("a", b"of another"))
    await asyncio.sleep(0)
    disk.release()
    assert await append
    assert await payloads(store, helpers, 2) == [b"of a loop that ends", b"of another"]


async def test_closing_ends_what_a_loop_that_has_ended_began(open_rocksmq, disk, helpers):
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    await at_rest(store)
    disk.holding = True

    async def begin() -> None:
        await begun(disk, asyncio.ensure_future(store.append("a", b"x")))

    await asyncio.to_thread(lambda: asyncio.run(begin()))
    disk.release()
    await store.close()
    store = await open_rocksmq()
    assert await payloads(store, helpers, 1) == [b"x"]


@pytest.mark.slow
async def test_two_loops_commit_in_turn(store, helpers):
    count = 300

    async def produce(name: bytes) -> None:
        for number in range(count):
            await store.append("a", b"%s %d" % (name, number))

    other = asyncio.to_thread(lambda: asyncio.run(produce(b"other")))
    await asyncio.gather(produce(b"one"), other)
    entries = await payloads(store, helpers, 2 * count)
    for name in (b"one", b"other"):
        assert [e for e in entries if e.startswith(name + b" ")] == [b"%s %d" % (name, n) for n in range(count)]


async def test_the_thread_syncs_what_could_not_begin(store, disk):
    disk.refusing = True
    await store.append("a", b"x")
    assert disk.synced_by == ["tidewal-journal"]
    disk.writers.clear()
    await store.append("a", b"y")
    assert set(disk.writers) == {"tidewal-journal"}


async def test_a_failed_sync_poisons(store, disk):
    disk.holding, disk.error = True, OSError(5, "no")
    append = asyncio.ensure_future(store.append("a", b"x"))
    await begun(disk, append)
    late = asyncio.ensure_future(store.append("a", b"y"))
    await asyncio.sleep(0)
    disk.release()
    with pytest.raises(JournalFailed) as failed:
        await append
    assert failed.value.outcome_unknown
    with pytest.raises(JournalFailed) as refused:
        await late
    assert not getattr(refused.value, "outcome_unknown", False)
    with pytest.raises(JournalFailed):
        await store.append("a", b"z")
    assert disk.synced_by == []


async def test_a_disk_that_holds_up_its_writers_is_left_to_the_thread(store, disk, monkeypatch):
    monkeypatch.setattr(journal, "LOOP_WRITE_S", 0.0)
    await store.append("a", b"slow")
    disk.writers.clear()
    await store.append("a", b"x")
    assert set(disk.writers) == {"tidewal-journal"}


@pytest.mark.slow
async def test_loops_and_threads_that_come_and_go_are_all_answered(open_rocksmq, rng):
    """Loops end while a commit of theirs, which holds appends of others, is not synced yet."""

    async def produce(store, random: Random) -> None:
        for _ in range(random.randint(1, 60)):
            match random.randrange(4):
                case 0:
                    await store.append_many([Append("a", bytes(20_000))] * random.randint(1, 9))
                case 1:
                    submit_and_wait(store)
                case _:
                    await store.append("a", bytes(random.choice((10, 1000, 30_000))))

    def submit_and_wait(store) -> None:
        answered = threading.Event()
        store.submit([Append("a", b"x")], lambda _: answered.set())
        assert answered.wait(BOUND_S)

    async def several(store, random: Random) -> None:
        await asyncio.gather(*[produce(store, random) for _ in range(random.randint(1, 6))])

    for _ in range(20):
        store = await open_rocksmq(segment_bytes=1024 * 1024)
        if "a" not in await store.channels():
            await store.create_channel("a", ChannelPolicy(retention_bytes=1024 * 1024))
        seeds = [Random(rng.random()) for _ in range(3)]
        loops = [
            asyncio.to_thread(lambda store=store, random=random: asyncio.run(several(store, random)))
            for random in seeds[:2]
        ]
        thread = asyncio.to_thread(lambda store=store: [submit_and_wait(store) for _ in range(30)])
        await asyncio.wait_for(asyncio.gather(several(store, seeds[2]), thread, *loops), 3 * BOUND_S)
        await asyncio.wait_for(store.close(), BOUND_S)
