"""Channels of processes that are gone without a farewell do not stay."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import pytest

from tests.adapters.rocksmq.usage import usage
from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.adapters.rocksmq.owner.connection import ConnectionLimits
from tidewal.runtime.errors import ChannelExists, Overloaded
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.rpc.client import RpcClient
from tidewal.runtime.rpc.protocol import REPLY_CHANNEL
from tidewal.runtime.rpc.server import RpcServer

# One process after the other, which opens so many clients and kills itself; imported once for all of them.
CLIENTS = """
import asyncio, os, sys
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.names import Names
from tidewal.runtime.rpc.client import RpcClient

async def main():
    wal = await open_wal("rocksmq://" + sys.argv[1], own=False)
    for _ in range(int(sys.argv[3])):
        await RpcClient(wal, Names()).open()
    os.kill(os.getpid(), 9)

for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        asyncio.run(main())
    assert os.waitpid(child, 0)[1] == 9
"""


@pytest.fixture
async def store(open_rocksmq) -> RocksMQ:
    return await open_rocksmq(serve=True, segment_bytes=8 * 1024 * 1024)  # room for those that wait to be dropped


@pytest.mark.parametrize(
    ("processes", "clients"), [(2, 50), pytest.param(25, 200, marks=[pytest.mark.slow, pytest.mark.long])]
)
async def test_clients_that_are_killed_leave_nothing(store, directory, helpers, processes, clients):
    files = len(os.listdir("/dev/fd"))
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENTS, directory, str(processes), str(clients)
    )
    assert await killed.wait() == 0
    temporary = store._server._requests._temporary
    await helpers.until(lambda: not (temporary._clients or temporary._leaving or temporary._dropping))
    assert await store.channels() == []
    assert not store._journal.table.by_number
    used = usage(store._server)
    assert (used.connections, used.waiting_requests, used.in_flight_bytes, used.outbox_bytes) == (0, 0, 0, 0)
    assert len(os.listdir("/dev/fd")) <= files + 10  # of the journal and its index, however many there were


async def test_a_caller_whose_channel_was_dropped_creates_it_again(store, directory, helpers):
    names, shared = Names(), await open_wal(f"rocksmq://{directory}", own=False)
    caller, inbox = RpcClient(shared, names, first_retry_s=0.01), RpcServer(store, "role", names)
    await inbox.open()

    async def serve() -> None:
        async for pack in inbox:
            for request in pack.requests:
                request.reply({"name": request.method})

    serving = asyncio.create_task(serve())
    await caller.open()
    for method in ("one", "two", "three"):
        assert (await caller.call("role", method)).values == {"name": method}
        await store.drop_channel(names.replies(caller.name))
    await caller.close()
    assert names.replies(caller.name) not in await store.channels()
    serving.cancel()
    await shared.close()


@pytest.mark.slow
async def test_a_client_that_is_gone_takes_no_channel_with_it_that_it_was_refused(store, directory, helpers):
    await store.create_channel("data", ChannelPolicy())
    await store.append("data", b"acknowledged")
    client = await open_wal(f"rocksmq://{directory}", own=False)
    with pytest.raises(ChannelExists):
        await client.create_channel("data", REPLY_CHANNEL)
    await client.create_channel("replies", REPLY_CHANNEL)
    await client.close()
    temporary = store._server._requests._temporary
    await helpers.until(lambda: not (temporary._clients or temporary._leaving or temporary._dropping))
    assert await store.channels() == ["data"]
    assert (await anext(store.read("data", From.EARLIEST)))[0].payload == b"acknowledged"


async def gone(store: RocksMQ, helpers) -> None:
    """Return when what clients had that are gone is dropped."""
    temporary = store._server._requests._temporary
    await helpers.until(lambda: not (temporary._leaving or temporary._dropping))


@pytest.mark.parametrize("ended", ["refused", "dropped", "shared"])
async def test_the_end_of_a_client_leaves_the_channel_of_another(store, directory, helpers, ended):
    store._server._requests._temporary._return_s = 0.01
    one, other = [await open_wal(f"rocksmq://{directory}", own=False) for _ in range(2)]
    if ended != "refused":
        await one.create_channel("x", REPLY_CHANNEL)
    if ended == "dropped":
        await other.drop_channel("x")
    await other.create_channel("x", REPLY_CHANNEL)
    if ended == "refused":
        with pytest.raises(ChannelExists):
            await one.create_channel("x", replace(REPLY_CHANNEL, max_message_bytes=1234))
    await one.close()
    await helpers.until(lambda: len(store._server._connections) == 1)
    await gone(store, helpers)
    assert await store.channels() == ["x"]
    await other.close()
    await helpers.until(lambda: not store._server._connections)
    await gone(store, helpers)
    assert await store.channels() == []


async def test_a_channel_whose_drop_was_refused_goes_with_its_client(store, directory, helpers):
    store._server._requests._temporary._return_s = 0.01
    client = await open_wal(f"rocksmq://{directory}", own=False)
    await client.create_channel("x", REPLY_CHANNEL)
    (connection,) = store._server._connections
    connection._limits = ConnectionLimits(waiting_requests=0)
    with pytest.raises(Overloaded):
        await client.drop_channel("x")
    await client.close()
    await helpers.until(lambda: not store._server._connections)
    await gone(store, helpers)
    assert await store.channels() == []


async def test_an_opening_drops_the_temporary_channels_of_the_incarnation_before(open_rocksmq):
    for _ in range(3):
        store = await open_rocksmq()
        assert await store.channels() in ([], ["kept"])
        await store.create_channel("kept", ChannelPolicy(ephemeral=True))
        for number in range(20):
            await store.create_channel(f"t{number}", REPLY_CHANNEL)
        await store.append("t1", b"x")
        assert (await anext(store.read("t1", From.EARLIEST)))[0].payload == b"x"
        await store.close()
    assert store._journal.table.boot == 3
