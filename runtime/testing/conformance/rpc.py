"""Requests and replies through the log."""

from __future__ import annotations

import asyncio

from ...log.names import Names
from ...rpc.client import RpcClient
from ...rpc.server import RpcServer
from .backend_under_test import BackendUnderTest, ConformanceTests


class TestRpc(ConformanceTests):
    """How requests and replies travel through the log."""

    async def test_a_caller_whose_channel_another_process_drops_creates_it_again(
        self, backend: BackendUnderTest
    ) -> None:
        wal = await backend.wal()
        names, other = Names(), await backend.elsewhere(wal)
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
