"""What survives kills of the sidecar, of etcd and of the object store: what was acknowledged, once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.brokers.woodpecker import Etcd, Sidecar, VersityGateway, local
from tests.brokers.woodpecker_fixtures import require_program
from tidewal.adapters.woodpecker import open_wal
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, Wal
from tidewal.runtime.testing.conformance.helpers import take

pytestmark = pytest.mark.broker

KILLS_WITHIN_S = 120.0
BETWEEN_S = 0.3  # real time: what is killed is a process


class Producer:
    """Appends numbers one behind the other, a few at a time, and notes which were acknowledged. Each number is appended
    once: what has an unknown outcome may be in the log or not."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self.acknowledged: dict[bytes, int] = {}
        self.unknown: set[int] = set()
        self._next = 0

    async def run(self) -> None:
        while True:
            numbers = range(self._next, self._next + 20)
            self._next = numbers.stop
            self.unknown.update(numbers)  # also where this task is cancelled meanwhile
            try:
                ids = await self._wal.append_many([Append("a", b"%d" % number, number + 1) for number in numbers])
                self.acknowledged.update(zip(ids, numbers, strict=True))
            except Unavailable as error:
                if error.outcome_unknown:
                    continue
            self.unknown.difference_update(numbers)

    def check(self, entries: list[Entry]) -> None:
        """Raise unless the log has what was acknowledged under its ids, nothing twice, and all in order."""
        found = {entry.id: int(entry.payload) for entry in entries}
        numbers = list(found.values())
        assert numbers == sorted(set(numbers))
        assert [entry.id for entry in entries] == sorted(found)
        assert {id: found.get(id) for id in self.acknowledged} == self.acknowledged
        assert set(numbers) - set(self.acknowledged.values()) <= self.unknown


async def all_entries(wal: Wal) -> list[Entry]:
    """What the channel has now."""
    latest = await wal.latest_id("a") or b""
    entries: list[Entry] = []
    async for batch in wal.read("a", From.EARLIEST):
        entries += batch
        if entries[-1].id >= latest:  # an append that was given up may come behind it
            break
    return entries


async def survives(sidecar: Sidecar, kill: Callable[[], None], count: int, rng: Random) -> None:
    """Append while `kill` kills something and brings it back, `count` times: every other time before anything was
    appended again."""
    wal = await open_wal(sidecar.url, failover_s=KILLS_WITHIN_S)
    await wal.create_channel("a", ChannelPolicy())
    producer = Producer(wal)
    running = asyncio.create_task(producer.run())
    for kills in range(1, count + 1):
        before = len(producer.acknowledged)
        await asyncio.sleep(rng.uniform(0.0, 1.0) * BETWEEN_S)
        await asyncio.to_thread(kill)
        if kills % 2 and kills < count:
            continue
        async with asyncio.timeout(KILLS_WITHIN_S):
            while len(producer.acknowledged) <= before:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    producer.check(await all_entries(wal))
    await wal.close()


def killed(process: Sidecar | Etcd | VersityGateway) -> Callable[[], None]:
    def kill() -> None:
        process.process.kill()
        process.start()

    return kill


async def test_kills_of_the_sidecar_lose_nothing(sidecar: Sidecar, rng: Random) -> None:
    await survives(sidecar, killed(sidecar), 3, rng)


@pytest.mark.kills
@pytest.mark.timeout(1200)
async def test_twenty_kills_of_the_sidecar_lose_nothing(sidecar: Sidecar, rng: Random) -> None:
    await survives(sidecar, killed(sidecar), 20, rng)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Etcd:
    """An etcd that the test may kill."""
    return Etcd(require_program("etcd"), tmp_path)


@pytest.mark.kills
@pytest.mark.timeout(1800)
async def test_twenty_kills_of_etcd_lose_nothing(
    own_etcd: Etcd, new_sidecar: Callable[..., Sidecar], tmp_path: Path, rng: Random
) -> None:
    """While etcd is away appends go on in the segment that is open."""
    own_etcd.start()
    try:
        sidecar = new_sidecar(settings=local(tmp_path), endpoint=own_etcd.endpoint)
        sidecar.start()
        await survives(sidecar, killed(own_etcd), 20, rng)
    finally:
        own_etcd.process.kill()


@pytest.mark.kills
@pytest.mark.timeout(1800)
async def test_twenty_kills_of_the_object_store_lose_nothing(
    object_store: VersityGateway, new_sidecar: Callable[..., Sidecar], rng: Random
) -> None:
    if not object_store.atomic:
        pytest.skip("without extended attributes a store that is killed may have half of an object")
    sidecar = new_sidecar(settings=object_store.settings)
    sidecar.start()
    await survives(sidecar, killed(object_store), 20, rng)


async def test_what_was_read_is_read_again_after_a_kill(sidecar: Sidecar) -> None:
    async with await open_wal(sidecar.url) as wal:
        await wal.create_channel("a", ChannelPolicy())
        ids = await wal.append_many([Append("a", b"%d" % number) for number in range(100)])
        before = await take(wal, "a", From.EARLIEST, 100)
        await asyncio.to_thread(killed(sidecar))
        assert await take(wal, "a", From.EARLIEST, 100) == before
        assert await wal.latest_id("a") == ids[-1]
        assert await wal.append("a", b"more") > ids[-1]
