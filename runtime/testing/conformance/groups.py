"""Consumer groups: who gets what, how channels move between members, and how it ends."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import pytest

from ...errors import ChannelNotFound, Closed, InvalidRequest, TidewalError
from ...log.wal import ChannelPolicy, From, Wal
from .backend_under_test import ConformanceTests
from .group_helpers import GROUPS, collect, having, idle_member, one, position
from .helpers import WITHIN_S, create, fill


class TestGroups(ConformanceTests):
    """Who gets what of a group, how channels move between members, and how it ends."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    @pytest.mark.slow
    async def test_each_group_gets_everything_in_order(self, wal: Wal) -> None:
        await create(wal, "a")
        members = [await wal.join(f"group-{n}", ["a"]) for n in range(11)]
        ids = await fill(wal, "a", 10)
        for member in members:
            assert await collect(member, 10) == {"a": ids}
        assert [await position(wal, f"group-{n}", "a") for n in range(11)] == [ids[-1]] * 11

    async def test_channels_are_divided_and_each_is_with_one_member(self, wal: Wal) -> None:
        channels = [f"c{n}" for n in range(7)]
        await create(wal, *channels)
        first = await wal.join("g", channels)
        assert first.channels == set(channels)
        second = await wal.join("g", channels)
        third = await wal.join("g", ["c*"])
        async with asyncio.timeout(WITHIN_S):
            while sorted(len(m.channels) for m in (first, second, third)) != [2, 2, 3]:  # noqa: ASYNC110 -- no event
                await asyncio.sleep(0)
        assert sorted([*first.channels, *second.channels, *third.channels]) == channels
        infos = await wal.groups()
        assert [info.name for info in infos] == ["g"]
        assert infos[0].members == {m.id: m.channels for m in (first, second, third)}

    async def test_where_a_group_begins(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        late = await wal.join("late", ["a"], start=From.LATEST)
        early = await wal.join("early", ["a"])
        new = await fill(wal, "a", 2, 3)
        assert await collect(early, 5) == {"a": ids + new}
        assert await collect(late, 2) == {"a": new}

    async def test_a_first_position_outlives_a_member_that_acknowledged_nothing(self, wal: Wal) -> None:
        await create(wal, "a")
        await fill(wal, "a", 3)
        member = await wal.join("late", ["a"], start=From.LATEST)
        await member.aclose()
        new = await fill(wal, "a", 2, 3)
        member = await wal.join("late", ["a"], start=From.LATEST)
        assert await collect(member, 2) == {"a": new}

    async def test_a_new_channel_goes_to_a_pattern_from_its_first_entry(self, wal: Wal) -> None:
        await create(wal, "orders-1")
        member = await wal.join("g", ["orders-*"], start=From.LATEST)
        await create(wal, "orders-2", "returns-1")
        ids = await fill(wal, "orders-2", 3)
        await fill(wal, "returns-1", 3)
        assert await collect(member, 3) == {"orders-2": ids}
        assert member.channels == {"orders-1", "orders-2"}

    async def test_a_dropped_channel_is_reported_by_name_and_passed_over_by_pattern(self, wal: Wal) -> None:
        await create(wal, "a", "b")
        named = await wal.join("named", ["a", "b"])
        matched = await wal.join("matched", ["*"])
        waiting = asyncio.ensure_future(anext(named))
        await idle_member(matched)
        await wal.drop_channel("a")
        with pytest.raises(ChannelNotFound):
            async with asyncio.timeout(WITHIN_S):
                await waiting
        ids = await fill(wal, "b", 2)
        assert await collect(named, 2) == {"b": ids}
        assert await collect(matched, 2) == {"b": ids}

    async def test_a_channel_made_again_is_read_from_its_start(self, wal: Wal) -> None:
        await create(wal, "a")
        member = await wal.join("g", ["*"])
        await fill(wal, "a", 5)
        await collect(member, 5)
        await wal.drop_channel("a")
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        assert await collect(member, 3) == {"a": ids}

    async def test_joining_moves_channels_and_nothing_is_lost_or_doubled(self, wal: Wal) -> None:
        channels = [f"c{n}" for n in range(4)]
        await create(wal, *channels)
        for channel in channels:
            await fill(wal, channel, 5)
        first = await wal.join("g", channels)
        seen = await collect(first, 20)
        second = await wal.join("g", channels)
        async with asyncio.timeout(WITHIN_S):
            while len(second.channels) < 2:
                await idle_member(first)
        expected = {channel: await fill(wal, channel, 5, 5) for channel in channels}
        mine, others = await collect(first, 10), await collect(second, 10)
        assert set(mine) == set(first.channels)
        assert set(others) == set(second.channels)
        assert {**mine, **others} == expected
        assert all(len(ids) == 5 for ids in seen.values())

    async def test_a_channel_is_kept_until_what_was_delivered_is_acknowledged(self, wal: Wal) -> None:
        await create(wal, "a")
        first = await wal.join("g", ["a"])
        ids = await fill(wal, "a", 3)
        delivered = await one(first, 3)
        await create(wal, "b")
        second = await wal.join("g", ["b", "a"])
        third = await wal.join("g", ["a"])
        await idle_member(second)
        await first.acknowledge(delivered)
        await first.aclose()
        taker = await wal.join("g", ["a"])
        new = await fill(wal, "a", 2, 3)
        async with asyncio.timeout(WITHIN_S):
            readers = [asyncio.ensure_future(anext(member)) for member in (second, third, taker)]
            done, waiting = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        assert [[entry.id for entry in task.result().entries] for task in done] == [new]
        assert ids[-1] < new[0]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def test_what_is_not_acknowledged_is_delivered_again_after_a_leave(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 10)
        first = await wal.join("g", ["a"])
        second = await wal.join("g", ["a"])
        holder, other = (first, second) if first.channels else (second, first)
        delivered = await one(holder, 10)
        await holder.acknowledge(delivered, ids[:4])
        await holder.acknowledge(delivered, [ids[6]])
        await holder.aclose()
        assert await collect(other, 5) == {"a": [ids[4], ids[5], *ids[7:]]}
        assert await position(wal, "g", "a") == ids[-1]

    @pytest.mark.slow
    async def test_a_member_that_blocks_the_loop_stays(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 2)
        member = await wal.join("g", ["a"], session_timeout_s=1.0)
        delivered = await one(member, 2)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
        await member.acknowledge(delivered)
        assert await position(wal, "g", "a") == ids[-1]

    async def test_turns_go_round_the_channels(self, wal: Wal) -> None:
        await create(wal, "busy", "quiet")
        member = await wal.join("g", ["busy", "quiet"])
        for _ in range(3):
            await fill(wal, "busy", 600)
        await fill(wal, "quiet", 1)
        await having(member, "busy", "quiet")
        order: list[str] = []
        async with asyncio.timeout(WITHIN_S):
            while "quiet" not in order:
                order.append((await anext(member)).channel)
                await fill(wal, "busy", 10)
                assert len(order) < 50, "the quiet channel starves"

    async def test_a_member_whose_leaving_was_cancelled_leaves_all_the_same(self, wal: Wal) -> None:
        """As in a worker that ends its tasks: they stop iterating, leaving among them, and it joins again."""
        await create(wal, "a", "b")
        for steps in range(6):
            leaving = await wal.join("g", ["a", "b"])
            await having(leaving, "a", "b")
            begun = asyncio.ensure_future(leaving.aclose())
            for _ in range(steps):
                await asyncio.sleep(0)
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
            await leaving.aclose()
            (info,) = await wal.groups()
            assert leaving.id not in info.members, steps

    async def test_leaving_and_closing_end_the_iteration(self, wal: Wal) -> None:
        await create(wal, "a")
        leaving, staying = await wal.join("one", ["a"]), await wal.join("two", ["a"])
        waiting = [asyncio.ensure_future(anext(member, None)) for member in (leaving, staying)]
        await asyncio.sleep(0)
        await leaving.aclose()
        await leaving.aclose()
        async with asyncio.timeout(WITHIN_S):
            assert await waiting[0] is None
        assert not waiting[1].done()
        await wal.close()
        async with asyncio.timeout(WITHIN_S):
            assert await waiting[1] is None
        for call in (wal.join("g", ["a"]), wal.groups(), wal.drop_group("g"), wal.seek_group("g", "a", From.LATEST)):
            with pytest.raises(Closed):
                await call

    @pytest.mark.parametrize(
        ("group", "channels", "error"),
        [
            ("", ["a"], InvalidRequest),
            ("g/h", ["a"], InvalidRequest),
            ("g*", ["a"], InvalidRequest),
            ("x" * 251, ["a"], InvalidRequest),
            ("g", [], InvalidRequest),
            ("g", ["a", "b/c"], InvalidRequest),
            ("g", [""], InvalidRequest),
            ("g", ["nowhere"], ChannelNotFound),
            ("g", ["fleeting"], InvalidRequest),
        ],
    )
    async def test_bad_names(self, wal: Wal, group: str, channels: list[str], error: type[TidewalError]) -> None:
        await create(wal, "a")
        await create(wal, "fleeting", policy=ChannelPolicy(ephemeral=True))
        with pytest.raises(error):
            await wal.join(group, channels)
        assert await wal.groups() == []
