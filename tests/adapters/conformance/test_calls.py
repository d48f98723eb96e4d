"""Any backend: requests and replies through the log."""

from __future__ import annotations

import asyncio

from tidewal.runtime.log.names import Names
from tidewal.runtime.rpc.client import RpcClient
from tidewal.runtime.rpc.server import RpcServer


async def test_a_caller_whose_channel_another_process_drops_creates_it_again(backend):
    names, wal = Names(), await backend.wal()
    other = await backend.wal() if backend.name in ("kafka", "pulsar") else wal
    caller, inbox = RpcClient(wal, names, first_retry_s=0.01), RpcServer(other, "role", names)
    await inbox.open()

    async def serve() -> None:
        async for pack in inbox:
            for request in pack.requests:
                request.reply({"name": request.method})

    serving = asyncio.create_task(serve())
    await caller.open()
    for method in ("one", "two", "three"):
        assert (await caller.call("role", method, deadline_s=30)).values == {"name": method}
        await other.drop_channel(names.replies(caller.name))
    await caller.close()
    assert names.replies(caller.name) not in await other.channels()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
