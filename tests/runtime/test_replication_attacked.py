"""What attacks on replication, and on the promotion of what programs use, have found."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.test_replication import (
    SOURCE,
    TARGET,
    TIMES,
    Stepping,
    fill,
    remaining,
    started,
    stopped,
    stopped_when_same,
    until_same,
)
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.log.wal import ChannelInfo, FromId, Start
from tidewal.runtime.replication.promotion import promote, promote_alone
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries
from tidewal.runtime.testing import MemoryLog, MemoryWal


async def test_a_channel_that_was_created_again_with_another_policy_is_salvaged_as_a_whole() -> None:
    """Wherever the replicator is killed: once the old entries are gone nothing says that they are there."""
    left = 0
    for left in range(40):
        source, log = MemoryWal(MemoryLog()), MemoryLog()
        await fill(source, "orders", range(3))
        await stopped_when_same(source, MemoryWal(log))
        await source.drop_channel("orders")
        await fill(source, "orders", range(10, 15), retention_s=None)
        replica = Stepping(log)
        replica.left = left
        try:
            await stopped_when_same(source, replica)
        except Unavailable:
            pass
        else:
            break
        await promote_alone(MemoryWal(log))
        here = {e.payload for channel in log.channels.values() for e in channel.entries}
        state = await promote(source, MemoryWal(log), SOURCE, TARGET)
        there = {bytes(e.payload) async for name, e in unreplicated_entries(source, state) if name == "orders"}
        assert here | there >= {b"%d" % n for n in range(10, 15)}, left
    assert 5 < left < 39


class Vanishing(MemoryWal):
    """A log whose channel is dropped by somebody else just before it is described, or held, for the `left`-th time."""

    left: int = 0

    async def describe(self, channel: str) -> ChannelInfo:
        await self._step(channel)
        return await super().describe(channel)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._step(channel)
        await super().hold(channel, holder, id)

    async def _step(self, channel: str) -> None:
        if channel == "orders":
            self.left -= 1
            if self.left == 0:
                await self.drop_channel(channel)


@pytest.mark.parametrize("policy", [{}, {"retention_s": None}], ids=["alike", "with another policy"])
async def test_a_channel_that_goes_while_it_is_brought_over_anew_ends_no_replicator(policy: dict[str, Any]) -> None:
    left = 0
    for left in range(1, 40):
        source, target = Vanishing(MemoryLog()), MemoryWal(MemoryLog())
        await fill(source, "orders", range(3))
        await fill(source, "other", range(3))
        await stopped_when_same(source, target)
        await source.drop_channel("orders")
        await fill(source, "orders", range(10, 15), **policy)
        source.left = left
        running = started(source, target)
        await until_same(source, target, running)
        was_dropped = "orders" not in source.log.channels
        await stopped(running)
        if not was_dropped:
            break
    assert 5 < left < 39


async def test_what_is_brought_over_is_held_from_its_first_entry_on_wherever_a_replicator_was_killed() -> None:
    """A line may need it long before the next hold is due, and retention counts from the time in the source."""
    held, times = 0, replace(TIMES, save_s=1000)
    for left in range(40):
        source, log = MemoryWal(MemoryLog()), MemoryLog()
        await fill(source, "orders", range(10))
        replica = Stepping(log)
        replica.left = left
        running = started(source, replica, times=times)
        with suppress(Unavailable):
            await until_same(source, replica, running)
            await stopped(running)
        target = MemoryWal(log)
        if "orders" in (await replication_state(target)).channels:
            break
        running = started(source, target, times=times)
        await until_same(source, target, running)
        await target.truncate("orders", (await target.latest_id("orders")) or b"")
        assert len(log.channels["orders"].entries) == 10, left
        await stopped(running)
        held += 1
    assert held > 4


class DyingBehindSeek(Stepping):
    """A log whose process dies when it has moved a group."""

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        await super().seek_group(group, channel, start)
        self.left = 0


async def test_a_group_that_is_moved_back_is_so_in_the_replica_though_a_replicator_was_killed_meanwhile(
    source: MemoryWal, target: MemoryWal
) -> None:
    """What the killed one had stored, and not saved, would hide entries from the group."""
    ids = await fill(source, "orders", range(10))
    await source.seek_group("workers", "orders", FromId(ids[3]))
    await stopped_when_same(source, target)
    await source.seek_group("workers", "orders", FromId(ids[7]))
    with pytest.raises(Unavailable):
        await started(source, DyingBehindSeek(target.log))
    await source.seek_group("workers", "orders", FromId(ids[3]))
    async with Replicator(source, target, SOURCE).claimed():
        pass
    await promote_alone(target)
    assert await remaining(target) == await remaining(source)
