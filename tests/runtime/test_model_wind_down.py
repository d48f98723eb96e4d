"""How the models of groups and of keyed state end."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests import group_model, keyed_model
from tests.wind_down import wind_down
from tidewal.runtime.groups.processing import Semantics
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryWal


def group_worker(wal):
    return group_model.Worker(wal, random.Random(0), Semantics.AT_LEAST_ONCE, elapse)


def keyed_worker(wal):
    return keyed_model.CountingWorker(wal, random.Random(0), elapse)


@pytest.mark.parametrize(("worker", "channel"), [(group_worker, "in-1"), (keyed_worker, "words-1")])
def test_what_no_member_had_when_the_faults_end_is_worked_on_yet(worker, channel):
    async def main():
        wal = MemoryWal()
        for name in (channel, "out"):
            await wal.create_channel(name, ChannelPolicy())
        ids = await wal.append_many([Append(channel, b"1"), Append(channel, b"2")])
        workers = [worker(wal) for _ in range(2)]  # none has joined when they become calm
        async with asyncio.timeout(10):
            await wind_down(wal, workers, {channel: ids[-1]}, elapse)
        (group,) = await wal.groups()
        assert (group.positions, group.members) == ({channel: ids[-1]}, {})
        assert len(wal.log.channels["out"].entries) == len(ids)
        await wal.close()

    run_virtual(main())


@pytest.mark.parametrize(("worker", "channel"), [(group_worker, "in-1"), (keyed_worker, "words-1")])
def test_a_worker_that_ends_before_its_channels_do_is_reported_by_its_error(worker, channel, monkeypatch):
    class Broken(Exception):
        pass

    async def broken(self, *_):
        raise Broken

    async def main():
        wal = MemoryWal()
        await wal.create_channel(channel, ChannelPolicy())
        id = await wal.append(channel, b"1")
        working = worker(wal)
        monkeypatch.setattr(working, "_handle", broken.__get__(working))
        async with asyncio.timeout(10):
            with pytest.raises(Broken):
                await wind_down(wal, [working], {channel: id}, elapse)
        await wal.close()

    run_virtual(main())
