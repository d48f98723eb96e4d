"""Lost wake-ups: each waiter is woken by what it waits for, never by a timer that hides a lost wake-up.

In each round a task waits while another thread produces, a random moment earlier or later; threads take turns as
often as they can, so each gets in between any two steps of another. Timers of the test's loop are watched: none may
fire. A long poll waits longer than the tests may take, so what only its end would complete fails.
"""

from __future__ import annotations

import asyncio
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tidewal.adapters.rocksmq import open_wal, wire
from tidewal.adapters.rocksmq.client import owner_connection, shared_reader
from tidewal.runtime.disk import Disk
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Wal

ROUNDS = 10_000
BUSY_STEPS = 400  # the longest jitter of a thread, in turns of an empty loop
LOOP_TURNS = 3
POLL_S = 3600.0  # longer than any test may take: a wake-up that is lost ends it

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _restless_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class UnsyncedDisk(Disk):
    """Syncs cost most of a round and say nothing about wake-ups."""

    def sync(self, file: int) -> None:
        pass


class Producer(threading.Thread):
    """Appends one entry on each request, after a random while."""

    def __init__(self, produce: Callable[[int], None], rng: random.Random) -> None:
        super().__init__(name="producer", daemon=True)
        self.rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._produce, self._random = produce, rng

    def run(self) -> None:
        while (number := self.rounds.get()) is not None:
            for _ in range(self._random.randrange(BUSY_STEPS)):
                pass
            self._produce(number)


@pytest.fixture
def start(rng: random.Random) -> Iterator[Callable[[Callable[[int], None]], Producer]]:
    producers: list[Producer] = []

    def start(produce: Callable[[int], None]) -> Producer:
        producers.append(Producer(produce, random.Random(rng.random())))
        producers[-1].start()
        return producers[-1]

    yield start
    for producer in producers:
        producer.rounds.put(None)
        producer.join()


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The timers of the test's loop that went off. Sockets and owners are not looked at again by a timer."""
    monkeypatch.setattr(wire, "SECOND_LOOK_S", POLL_S)
    monkeypatch.setattr(owner_connection, "TIMEOUT_S", POLL_S)  # how often it is looked whether the owner is silent
    went_off: list[object] = []
    call_at = asyncio.BaseEventLoop.call_at

    def watched(self, when, callback, *args, context=None):
        def go(*args):
            went_off.append(callback)
            callback(*args)

        return call_at(self, when, go, *args, context=context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", watched)
    return went_off


async def turns(rng: random.Random) -> None:
    for _ in range(rng.randrange(LOOP_TURNS)):
        await asyncio.sleep(0)


async def wait_and_produce(reading: Wal, writing: Wal, start, rng: random.Random) -> None:
    """A reader that waits for each entry before it asks for the next."""
    producer = start(lambda number: writing.submit([Append("a", number.to_bytes(4, "big"))], lambda _: None))
    reader = reading.read("a", From.EARLIEST)
    for number in range(ROUNDS):
        producer.rounds.put(number)
        await turns(rng)
        (entry,) = await anext(reader)
        assert bytes(entry.payload) == number.to_bytes(4, "big")
    await reader.aclose()


@pytest.mark.parametrize("policy", [ChannelPolicy(), ChannelPolicy(ephemeral=True)], ids=["durable", "ephemeral"])
async def test_readers_in_the_process(open_rocksmq, start, rng, fired, policy):
    store = await open_rocksmq(disk=UnsyncedDisk(), segment_bytes=1024 * 1024)
    await store.create_channel("a", policy)
    await wait_and_produce(store, store, start, rng)
    assert fired == []


async def test_readers_over_the_socket(open_rocksmq, start, rng, fired, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_reader, "POLL_S", POLL_S)
    store = await open_rocksmq(disk=UnsyncedDisk(), segment_bytes=1024 * 1024, serve=True)
    await store.create_channel("a", ChannelPolicy())
    remote = await open_wal(f"rocksmq://{tmp_path}/log", own=False)
    try:
        await wait_and_produce(remote, store, start, rng)
    finally:
        await remote.close()
    assert fired == []


@pytest.mark.parametrize("over", ["process", "socket"])
async def test_appends(open_rocksmq, rng, fired, tmp_path, over):
    store = await open_rocksmq(disk=UnsyncedDisk(), segment_bytes=1024 * 1024, serve=over == "socket")
    await store.create_channel("a", ChannelPolicy())
    wal = store if over == "process" else await open_wal(f"rocksmq://{tmp_path}/log", own=False)
    last = b""
    try:
        for _ in range(ROUNDS):
            await turns(rng)
            id = await wal.append("a", b"x")
            assert id > last
            last = id
    finally:
        await wal.close()
    assert fired == []
