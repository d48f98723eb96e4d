"""Two sidecars of one log: the newer one has it, and the older one acknowledges nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.brokers.processes import BrokerFailed
from tests.brokers.proxy import Proxy
from tests.brokers.woodpecker import Etcd, Sidecar, VersityGateway
from tidewal.adapters.woodpecker import open_wal
from tidewal.runtime.errors import Fenced, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, Wal
from tidewal.runtime.testing.conformance.helpers import payloads, take

pytestmark = pytest.mark.broker

WITHIN_S = 60.0


@pytest.fixture
async def two(
    new_sidecar: Callable[..., Sidecar], object_store: VersityGateway
) -> AsyncIterator[tuple[Sidecar, Wal, Sidecar]]:
    """A running sidecar with the log open on it, and another of the same log that does not run yet."""
    old, new = (new_sidecar(name, object_store.settings) for name in ("old", "new"))
    old.start()
    async with await open_wal(old.url) as wal:
        await wal.create_channel("a", ChannelPolicy())
        await wal.append("a", b"old")
        yield old, wal, new


async def test_the_older_sidecar_is_fenced_and_reads_on(two: tuple[Sidecar, Wal, Sidecar]) -> None:
    _, old, newer = two
    newer.start()
    async with await open_wal(newer.url) as new:
        await new.append("a", b"new")
        with pytest.raises(TidewalError):  # by etcd, or by the fence in the object store
            await old.append("a", b"zombie")
        with pytest.raises(Fenced):
            await old.append("a", b"zombie")
        with pytest.raises(Fenced):
            await old.create_channel("b", ChannelPolicy())
        assert payloads(await take(old, "a", From.EARLIEST, 2)) == [b"old", b"new"]
        await new.append("a", b"newer")
        assert payloads(await take(old, "a", From.EARLIEST, 3)) == [b"old", b"new", b"newer"]


async def test_one_that_was_stopped_meanwhile_acknowledges_nothing(two: tuple[Sidecar, Wal, Sidecar]) -> None:
    """It wakes with appends on their way, before etcd has told it anything: Woodpecker's own fence stops it."""
    older, old, newer = two
    await asyncio.to_thread(older.process.pause)
    zombies = [asyncio.create_task(old.append("a", b"zombie %d" % number)) for number in range(20)]
    await asyncio.sleep(0.1)  # they lie in the socket of a process that is stopped
    newer.start()
    async with await open_wal(newer.url) as new:
        await new.append("a", b"new")
        older.process.resume()
        async with asyncio.timeout(WITHIN_S):
            results = await asyncio.gather(*zombies, return_exceptions=True)
        assert all(isinstance(result, TidewalError) for result in results), results
        await new.append("a", b"newer")
        assert payloads(await take(new, "a", From.EARLIEST, 3)) == [b"old", b"new", b"newer"]


async def test_one_that_hears_nothing_of_etcd_is_fenced_by_woodpecker(
    etcd: Etcd, new_sidecar: Callable[..., Sidecar], object_store: VersityGateway
) -> None:
    """Its segment is open, and needs no etcd: only the fence in the object store can stop it."""
    proxy = Proxy()
    proxy.broker_port = etcd.port
    older = new_sidecar("old", object_store.settings, f"127.0.0.1:{await proxy.start()}")
    newer = new_sidecar("new", object_store.settings)
    await asyncio.to_thread(older.start)
    async with await open_wal(older.url) as old:
        await old.create_channel("a", ChannelPolicy())
        await old.append("a", b"old")
        proxy.half_close()
        await asyncio.to_thread(newer.start)
        async with await open_wal(newer.url) as new:
            await new.append("a", b"new")
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(TidewalError):
                    await old.append("a", b"zombie")
            await new.append("a", b"newer")
            assert payloads(await take(new, "a", From.EARLIEST, 3)) == [b"old", b"new", b"newer"]
    await proxy.stop()


async def test_what_was_in_flight_at_a_takeover_is_in_the_log_where_it_was_acknowledged(
    two: tuple[Sidecar, Wal, Sidecar],
) -> None:
    _, old, newer = two
    acknowledged: list[bytes] = []

    async def produce() -> None:
        while True:
            acknowledged.append((await old.append_many([Append("a", b"x")]))[0])

    producing = asyncio.create_task(produce())
    await asyncio.to_thread(newer.start)
    async with await open_wal(newer.url) as new:
        first = await new.append("a", b"new")
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(TidewalError):
                await producing
        assert all(id < first for id in acknowledged)
        entries = await take(new, "a", From.EARLIEST, len(acknowledged) + 2)
        assert {entry.id for entry in entries} >= {*acknowledged, first}


async def test_local_storage_has_one_sidecar(new_sidecar: Callable[..., Sidecar]) -> None:
    old, new = new_sidecar("old"), new_sidecar("new")
    old.start()
    with pytest.raises(BrokerFailed, match="has a sidecar already"):
        new.start()
