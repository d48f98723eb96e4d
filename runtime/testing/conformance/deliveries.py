"""Channels that do not keep what is acknowledged: queues, and those that keep it until every group has."""

from __future__ import annotations

from typing import ClassVar

import pytest

from ...errors import InvalidRequest, PositionLost
from ...log.wal import ChannelPolicy, Delivery, From, FromId, Wal
from .backend_under_test import ConformanceTests
from .group_helpers import GROUPS, collect, one
from .helpers import create, fill, take

QUEUE = ChannelPolicy(delivery=Delivery.QUEUE)
UNTIL_ACKED = ChannelPolicy(delivery=Delivery.UNTIL_ACKED)


class TestDeliveries(ConformanceTests):
    """Queues, and channels that keep entries until every group has acknowledged them."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    async def test_a_queue_forgets_what_is_acknowledged_and_has_one_group(self, wal: Wal) -> None:
        await create(wal, "jobs", policy=QUEUE)
        ids = await fill(wal, "jobs", 5)
        member = await wal.join("workers", ["jobs"])
        with pytest.raises(InvalidRequest):
            await wal.join("others", ["jobs"])
        delivered = await one(member, 5)
        await member.acknowledge(delivered, ids[:3])
        assert (await wal.describe("jobs")).first_id == ids[3]
        assert [entry.id for entry in await take(wal, "jobs", From.EARLIEST, 2)] == ids[3:]
        with pytest.raises(PositionLost):
            await member.seek("jobs", FromId(ids[0]))
        await member.acknowledge(delivered)
        new = await fill(wal, "jobs", 1, 5)
        assert [entry.id for entry in await take(wal, "jobs", From.EARLIEST, 1)] == new
        everything = await wal.join("others", ["*"])  # a pattern passes over it
        assert everything.channels == set()
        await everything.aclose()
        await member.aclose()
        with pytest.raises(InvalidRequest):  # it belongs to the group, not to its members
            await wal.join("others", ["jobs"])
        await wal.drop_group("workers")
        taking_over = await wal.join("others", ["jobs"])
        assert await collect(taking_over, 1) == {"jobs": new}

    async def test_what_a_seek_passes_over_in_a_queue_is_done_and_goes(self, wal: Wal) -> None:
        await create(wal, "jobs", policy=QUEUE)
        ids = await fill(wal, "jobs", 5)
        member = await wal.join("workers", ["jobs"])
        await member.seek("jobs", FromId(ids[1]))
        assert (await wal.describe("jobs")).first_id == ids[2]
        assert await collect(member, 3, acknowledge=False) == {"jobs": ids[2:]}
        await member.aclose()
        await wal.seek_group("workers", "jobs", FromId(ids[3]))
        assert [entry.id for entry in await take(wal, "jobs", From.EARLIEST, 1)] == ids[4:]
        await wal.seek_group("workers", "jobs", From.LATEST)
        new = await fill(wal, "jobs", 1, 5)
        assert [entry.id for entry in await take(wal, "jobs", From.EARLIEST, 1)] == new

    async def test_a_queue_tells_its_first_entry_and_goes_on_when_all_of_it_was_done(self, wal: Wal) -> None:
        await create(wal, "jobs", policy=QUEUE)
        ids = [*await fill(wal, "jobs", 5), *await fill(wal, "jobs", 5, 5)]  # two batches, on brokers
        member = await wal.join("workers", ["jobs"])
        await member.seek("jobs", FromId(ids[6]))
        assert (await wal.describe("jobs")).first_id == ids[7]
        for removed in (FromId(ids[0]), FromId(ids[6], inclusive=True)):
            with pytest.raises(PositionLost) as caught:
                await member.seek("jobs", removed)
            assert caught.value.first_available == ids[7]
        await member.seek("jobs", FromId(ids[6]))
        assert [entry.id for entry in await take(wal, "jobs", FromId(ids[6]), 3)] == ids[7:]
        assert await collect(member, 3) == {"jobs": ids[7:]}
        last = ids[9]
        for earliest in (True, False, True):
            info = await wal.describe("jobs")
            assert (info.first_id, info.latest_id) == (None, last)
            await member.seek("jobs", From.EARLIEST if earliest else FromId(last))
            new = await fill(wal, "jobs", 2)
            assert await collect(member, 2) == {"jobs": new}
            last = new[1]
        await member.aclose()

    async def test_what_one_group_has_not_acknowledged_stays(self, wal: Wal) -> None:
        await create(wal, "a", policy=UNTIL_ACKED)
        ids = await fill(wal, "a", 4)
        first, other = await wal.join("one", ["a"]), await wal.join("two", ["a"])
        delivered = await one(first)
        await first.acknowledge(delivered)
        assert (await wal.describe("a")).first_id == ids[0]  # the other group has had nothing of it
        assert await collect(other, 4) == {"a": ids}
