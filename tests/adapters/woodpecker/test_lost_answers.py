"""Requests of the sidecar that etcd carries out, and whose answers are lost: all of them can be made again."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.brokers.proxy import Proxy
from tests.brokers.woodpecker import Etcd, Sidecar, local
from tidewal.adapters.woodpecker import open_wal
from tidewal.runtime.errors import ChannelNotFound, Unavailable
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal
from tidewal.runtime.testing.conformance.helpers import payloads, take

pytestmark = pytest.mark.broker

STORED_WITHIN_S = 20.0
CHANNEL = "tidewal/channels/a"  # where the sidecar keeps the record of the channel


class LosingEtcd:
    """A log whose sidecar reaches etcd through a proxy, which can lose the answer to one request."""

    def __init__(self, etcd: Etcd, proxy: Proxy, prefix: str, wal: Wal) -> None:
        self._etcd, self._proxy, self._prefix = etcd, proxy, prefix
        self.wal = wal

    async def lose_answer(self, call: Awaitable[object], expected: str) -> Unavailable:
        """The error of `call` where etcd stores a record of the channel with `expected` in it, and the sidecar gets no
        answer to that."""
        self._proxy.lose_answers_to(expected.encode())
        calling = asyncio.ensure_future(call)
        async with asyncio.timeout(STORED_WITHIN_S):
            while expected not in await asyncio.to_thread(self._record):
                pass
        self._proxy.cut()
        with pytest.raises(Unavailable) as caught:
            await calling
        return caught.value

    def _record(self) -> str:
        key = base64.b64encode(f"{self._prefix}/{CHANNEL}".encode()).decode()
        web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        asked = urllib.request.Request(f"http://{self._etcd.endpoint}/v3/kv/range", json.dumps({"key": key}).encode())
        with web.open(asked, timeout=STORED_WITHIN_S) as answer:
            return "".join(base64.b64decode(found["value"]).decode() for found in json.load(answer).get("kvs", []))


@pytest.fixture
async def losing(etcd: Etcd, new_sidecar: Callable[..., Sidecar], tmp_path: Path) -> AsyncIterator[LosingEtcd]:
    proxy = Proxy()
    proxy.broker_port = etcd.port
    sidecar = new_sidecar(settings=local(tmp_path), endpoint=f"127.0.0.1:{await proxy.start()}")
    await asyncio.to_thread(sidecar.start)
    async with await open_wal(sidecar.url) as wal:
        yield LosingEtcd(etcd, proxy, sidecar.prefix, wal)
    await proxy.stop()


async def test_a_hold_that_was_stored_unheard_can_be_moved(losing: LosingEtcd) -> None:
    wal = losing.wal
    await wal.create_channel("a", ChannelPolicy())
    ids = [await wal.append("a", b"%d" % number) for number in range(3)]
    await losing.lose_answer(wal.hold("a", "reader", ids[0]), "reader")
    await wal.hold("a", "reader", ids[1])
    await wal.truncate("a", ids[2])
    assert payloads(await take(wal, "a", From.EARLIEST, 2)) == [b"1", b"2"]


async def test_a_channel_that_was_made_unheard_can_be_made(losing: LosingEtcd) -> None:
    wal = losing.wal
    await losing.lose_answer(wal.create_channel("a", ChannelPolicy()), "policy")
    await wal.create_channel("a", ChannelPolicy())
    await wal.append("a", b"first")
    assert payloads(await take(wal, "a", From.EARLIEST, 1)) == [b"first"]


async def test_a_channel_whose_drop_is_not_known_goes_on_until_it_is_dropped_again(losing: LosingEtcd) -> None:
    wal = losing.wal
    await wal.create_channel("a", ChannelPolicy())
    await wal.append("a", b"before")
    error = await losing.lose_answer(wal.drop_channel("a"), '"dropped":true')
    assert "drop it again" in error.message
    last = await wal.append("a", b"behind")
    assert payloads(await take(wal, "a", From.EARLIEST, 2)) == [b"before", b"behind"]
    await wal.drop_channel("a")
    assert await wal.channels() == []
    with pytest.raises(ChannelNotFound):
        await wal.append("a", b"too late")
    await wal.create_channel("a", ChannelPolicy())
    assert await wal.append("a", b"new") > last
