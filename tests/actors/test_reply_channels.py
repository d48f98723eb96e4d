"""Reply channels of callers that were killed are dropped by the leader, those of living callers never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidewal.actors.mixcoord import reply_channels
from tidewal.actors.mixcoord.reply_channels import SILENT_SWEEPS, SWEEP_INTERVAL_S, ReplyChannels
from tidewal.runtime.errors import CorruptLog, Unavailable
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.rpc import client as rpc_client
from tidewal.runtime.rpc.client import SIGN_OF_LIFE_S, RpcClient
from tidewal.runtime.rpc.server import RpcServer
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

NAMES = Names()
SILENT_S = SILENT_SWEEPS * SWEEP_INTERVAL_S


async def killed_callers(log: MemoryLog, count: int) -> set[str]:
    """Reply channels of callers whose process has ended without a farewell."""
    process = MemoryWal(log)
    callers = [RpcClient(process, NAMES) for _ in range(count)]
    for caller in callers:
        await caller.open()
    await process.close()
    return {NAMES.replies(caller.name) for caller in callers}


@asynccontextmanager
async def leading(wal: MemoryWal) -> AsyncIterator[Metrics]:
    metrics = Metrics("leader")
    task = asyncio.create_task(ReplyChannels(wal, NAMES, metrics).run())
    try:
        yield metrics
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def answering(wal: MemoryWal) -> AsyncIterator[None]:
    inbox = RpcServer(wal, "role", NAMES)
    await inbox.open()

    async def serve() -> None:
        async for pack in inbox:
            for request in pack.requests:
                request.reply({"method": request.method})

    task = asyncio.create_task(serve())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
def test_thousands_of_killed_callers_leave_nothing_and_an_idle_one_keeps_its_channel() -> None:
    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        idle, shared = RpcClient(wal, NAMES), RpcClient(wal, NAMES, name="many", shared=True)
        await idle.open()
        await shared.open()
        await shared.close()
        own = NAMES.replies("of-a-user")
        await wal.create_channel(own, ChannelPolicy())
        kept = sorted([NAMES.replies(idle.name), NAMES.replies("many"), NAMES.requests("role"), own])
        async with answering(wal), leading(wal) as metrics:
            dead = await killed_callers(log, 3000)
            await elapse(SILENT_S - 1)
            assert dead <= set(await wal.channels()), "too early"
            await elapse(SWEEP_INTERVAL_S + 2)
            assert await wal.channels() == kept
            assert metrics.value("mixcoord_reply_channel_dropped_total") == len(dead)
            await elapse(50 * SILENT_S)
            assert await wal.channels() == kept
            entries = log.channels[NAMES.replies(idle.name)].entries
            assert len(entries) <= 52 * SILENT_S / SIGN_OF_LIFE_S, "an idle caller costs next to nothing"
            assert (await idle.call("role", "hello")).values["method"] == "hello"
            await idle.close()
            await elapse(2 * SIGN_OF_LIFE_S)
            assert NAMES.replies(idle.name) not in await wal.channels()

    run_virtual(main())


def test_a_caller_that_was_held_up_for_so_long_goes_on_with_a_channel_made_anew() -> None:
    async def main() -> None:
        wal = MemoryWal()
        caller = RpcClient(wal, NAMES)
        await caller.open()
        assert caller._sign_of_life is not None
        caller._sign_of_life.cancel()  # its machine sleeps
        async with answering(wal), leading(wal) as metrics:
            await elapse(SILENT_S + SWEEP_INTERVAL_S)
            assert metrics.value("mixcoord_reply_channel_dropped_total") == 1
            assert (await caller.call("role", "hello")).values["method"] == "hello"
        await caller.close()

    run_virtual(main())


def test_time_in_which_the_leader_was_suspended_makes_nobody_silent() -> None:
    clock = VirtualClock()

    async def main() -> None:
        wal = MemoryWal()
        caller = RpcClient(wal, NAMES)
        await caller.open()
        async with leading(wal) as metrics:
            for _ in range(5):
                clock.suspend(2 * SILENT_S)
                clock.jump_wall(int(2000 * SILENT_S))
                await elapse(SWEEP_INTERVAL_S)
            assert metrics.value("mixcoord_reply_channel_dropped_total") == 0
        await caller.close()

    run_virtual(main(), clock)


class FailingWal(MemoryWal):
    """Now and then no broker answers, and one channel can never be looked at."""

    broken = ""
    asked = 0

    async def latest_id(self, channel: str) -> bytes | None:
        self.asked += 1
        if self.asked % 7 == 0:
            raise Unavailable("no broker answers")
        if channel == self.broken:
            raise CorruptLog("damaged", path=channel, offset=0)
        return await super().latest_id(channel)


def test_a_sweep_that_fails_goes_on_at_the_next() -> None:
    async def main() -> None:
        wal = FailingWal()
        dead = sorted(await killed_callers(wal.log, 5))
        wal.broken = dead[0]
        async with leading(wal):
            await elapse(10 * SILENT_S)
            assert await wal.channels() == [wal.broken]

    run_virtual(main())


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_node_that_leads_sweeps(home, monkeypatch) -> None:
    monkeypatch.setattr(reply_channels, "SWEEP_INTERVAL_S", 2.0)
    monkeypatch.setattr(rpc_client, "SIGN_OF_LIFE_S", 2.0)
    dead = await killed_callers(home.log, 20)
    async with home.people_client() as client:
        await home.elapse(20)
        channels = set(home.log.channels)
        assert not dead & channels
        replies = sorted(name for name in channels if name.startswith(NAMES.replies("")))
        assert len(replies) == 6, f"those of five roles and the client, not {replies}"
        assert await client.count("people", consistency="strong") == 0
