"""Consumer groups: what is acknowledged, committed and sought, and what a group remembers of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from ...clock import SystemClock, compose
from ...errors import ChannelNotFound, Closed, Fenced, InvalidRequest, PositionLost
from ...log.wal import Append, From, FromId, FromTime, Wal
from .backend_under_test import BackendUnderTest, ConformanceTests
from .group_helpers import GROUPS, collect, idle_member, one, position
from .helpers import WITHIN_S, create, fill, submitted, take


async def cut_off(backend: BackendUnderTest) -> tuple[Wal, list[bytes]]:
    """A WAL where retention has removed what the group "dead" has yet to read of channel a, and what is left."""
    wal = await backend.wal()
    await create(wal, "a", "b")
    dead = await wal.join("dead", ["a"])
    await dead.aclose()
    await fill(wal, "a", 10)
    await backend.end_segment(wal)
    left = await fill(wal, "a", 3, 10)
    await backend.remove_before(wal, "a", left[0])
    return wal, left


class TestGroupPositions(ConformanceTests):
    """What is acknowledged, committed and sought, and what a group remembers of it."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    async def test_an_output_that_is_no_bytes_is_refused_and_the_batch_stays(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        await fill(wal, "a", 2)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        wrong: tuple[Any, ...] = ("text", 5)
        for payload in wrong:
            with pytest.raises(InvalidRequest, match="encode it first"):
                await member.commit([delivered], [Append("out", b"good"), Append("out", payload)])
        assert await wal.latest_id("out") is None
        assert await member.commit([delivered], [Append("out", b"good")]) == [await wal.latest_id("out")]

    async def test_an_acknowledgement_under_a_lease_that_is_over_is_fenced(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        ids = await fill(wal, "a", 4)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        await member.seek("a", FromId(ids[1], inclusive=True))
        with pytest.raises(Fenced):
            await member.acknowledge(delivered)
        with pytest.raises(Fenced):
            await member.commit([delivered], [Append("out", b"never")])
        assert await wal.latest_id("out") is None
        assert await collect(member, 3) == {"a": ids[1:]}

    async def test_single_acknowledgements_become_one_position(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 6)
        member = await wal.join("g", ["a"])
        delivered = await one(member, 6)
        for id in (ids[1], ids[2], ids[4]):
            await member.acknowledge(delivered, [id])
        assert (await position(wal, "g", "a") or b"") < ids[0]
        await member.acknowledge(delivered, [ids[0]])
        assert await position(wal, "g", "a") == ids[2]
        await member.acknowledge(delivered, [ids[0]])  # again: fine
        await asyncio.gather(*(member.acknowledge(delivered, [id]) for id in (ids[5], ids[3])))
        assert await position(wal, "g", "a") == ids[5]

    async def test_ids_that_were_not_delivered_cannot_be_acknowledged(self, wal: Wal) -> None:
        await create(wal, "a", "b")
        await fill(wal, "a", 3)
        (other,) = await fill(wal, "b", 1)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        with pytest.raises(InvalidRequest):
            await member.acknowledge(delivered, [bytes(len(other))])
        assert (await position(wal, "g", "a") or b"") < delivered.entries[0].id

    async def test_acknowledging_after_leaving_is_refused(self, wal: Wal) -> None:
        await create(wal, "a")
        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        await member.aclose()
        with pytest.raises(Closed):
            await member.acknowledge(delivered)

    async def test_positions_outlive_the_log(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await create(wal, "a")
        ids = await fill(wal, "a", 10)
        member = await wal.join("g", ["a"])
        delivered = await one(member, 10)
        await member.acknowledge(delivered, ids[:3])
        await member.acknowledge(delivered, [ids[5], ids[8]])
        await wal.close()
        wal = await backend.wal()
        assert await position(wal, "g", "a") == ids[2]
        member = await wal.join("g", ["a"])
        assert await collect(member, 5) == {"a": [ids[3], ids[4], ids[6], ids[7], ids[9]]}

    async def test_outputs_and_positions_are_committed_together(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await create(wal, "a", "b", "out")
        ids = {"a": await fill(wal, "a", 3), "b": await fill(wal, "b", 3)}
        member = await wal.join("g", ["a", "b"])
        delivered = [await one(member, 3), await one(member, 3)]
        assert {each.channel for each in delivered} == {"a", "b"}
        outputs = [Append("out", each.channel.encode()) for each in delivered]
        written = await member.commit(delivered, outputs)
        with pytest.raises(InvalidRequest):  # the same once more would double the outputs
            await member.commit(delivered, outputs)
        await wal.close()
        wal = await backend.wal()
        assert [await position(wal, "g", channel) for channel in "ab"] == [ids["a"][-1], ids["b"][-1]]
        assert await wal.latest_id("out") == written[-1]
        member = await wal.join("g", ["a", "b"])
        await idle_member(member)

    async def test_a_commit_that_is_refused_moves_nothing(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        member = await wal.join("g", ["a"])
        delivered = await one(member, 3)
        with pytest.raises(ChannelNotFound):
            await member.commit([delivered], [Append("nowhere", b"x")])
        assert (await position(wal, "g", "a") or b"") < ids[0]
        await member.acknowledge(delivered)
        assert await position(wal, "g", "a") == ids[-1]

    @pytest.mark.parametrize(
        ("start", "first"),
        [
            (From.EARLIEST, 0),
            (From.LATEST, 10),
            (FromTime(35), 4),
            (FromTime(1000), 10),
            ("with", 6),
            ("behind", 7),
        ],
    )
    async def test_seeking(self, wal: Wal, start: Any, first: int) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 10)
        if isinstance(start, str):
            start = FromId(ids[6], inclusive=start == "with")
        member = await wal.join("g", ["a"])
        await collect(member, 10)
        await member.seek("a", start)
        ids += await fill(wal, "a", 1, 10)
        assert await collect(member, 11 - first) == {"a": ids[first:]}
        await member.aclose()
        with pytest.raises(Fenced):
            await member.seek("a", start)
        await wal.seek_group("g", "a", start)
        ids += await fill(wal, "a", 1, 11)
        again = await wal.join("g", ["a"])
        first = 11 if first == 10 else first  # the latest is another one now
        assert await collect(again, 12 - first) == {"a": ids[first:]}

    async def test_outputs_without_a_timestamp_get_the_present_time(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        before = compose(SystemClock().wall_ms())
        await member.commit([await one(member, 1)], [Append("out", b"now"), Append("out", b"then", 7)])
        after = compose(SystemClock().wall_ms())
        now, then = [entry.timestamp for entry in await take(wal, "out", From.EARLIEST, 2)]
        assert before <= now <= after
        assert then == 7

    async def test_seeking_a_time_passes_over_no_entry_that_has_none(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await submitted(wal, [Append("a", b"never")] * 3)
        hour = compose(3_600_000)
        now = compose(SystemClock().wall_ms())
        for delivered in (3, 4):  # without an entry that has a time, and with one behind
            await wal.seek_group("g", "a", From.LATEST)
            await wal.seek_group("g", "a", FromTime(now - hour))
            member = await wal.join("g", ["a"])
            assert await collect(member, delivered) == {"a": ids}
            await member.seek("a", FromTime(now - hour))
            assert await collect(member, delivered) == {"a": ids}
            await member.aclose()
            if delivered == 3:
                ids.append(await wal.append("a", b"now"))
        await wal.seek_group("g", "a", FromTime(now + hour))
        assert await position(wal, "g", "a") == ids[-1]

    async def test_seeking_a_group_is_refused_while_somebody_has_the_channel(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        member = await wal.join("g", ["a"])
        with pytest.raises(InvalidRequest):
            await wal.seek_group("g", "a", From.LATEST)
        with pytest.raises(PositionLost):
            await member.seek("a", FromId(b"\xff" * len(ids[0])))
        with pytest.raises(ChannelNotFound):
            await wal.seek_group("g", "nowhere", From.LATEST)
        await member.aclose()
        await wal.seek_group("g", "a", FromId(ids[1]))
        assert await position(wal, "g", "a") == ids[1]
        await wal.seek_group("never-joined", "a", FromId(ids[0]))
        member = await wal.join("never-joined", ["a"], start=From.LATEST)
        assert await collect(member, 2) == {"a": ids[1:]}

    async def test_dropping_a_group(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        member = await wal.join("g", ["a"])
        await collect(member, 3)
        with pytest.raises(InvalidRequest):
            await wal.drop_group("g")
        await member.aclose()
        await wal.drop_group("g")
        await wal.drop_group("g")
        assert await wal.groups() == []
        member = await wal.join("g", ["a"])
        assert await collect(member, 3) == {"a": ids}

    async def test_a_group_that_retention_has_cut_off_is_told(self, backend: BackendUnderTest) -> None:
        wal, left = await cut_off(backend)
        member = await wal.join("dead", ["a", "b"])
        other = await fill(wal, "b", 1)
        for _ in range(2):  # it stays so until somebody decides
            with pytest.raises(PositionLost) as lost:
                await collect(member, 2)
            assert lost.value.first_available == left[0]
            assert lost.value.requested is not None
        while await position(wal, "dead", "b") != other[-1]:  # the other channel goes on
            with suppress(PositionLost):
                await collect(member, 1)
        await member.seek("a", From.EARLIEST)
        delivered = await one(member)
        while delivered.channel != "a":
            delivered = await one(member)
        assert [entry.id for entry in delivered.entries] == left

    @pytest.mark.parametrize("reset_to", list(From))
    async def test_with_reset_to_it_goes_on_by_itself(self, backend: BackendUnderTest, reset_to: From) -> None:
        wal, left = await cut_off(backend)
        member = await wal.join("dead", ["a"], reset_to=reset_to)
        waiting = asyncio.ensure_future(one(member))
        if reset_to is From.LATEST:
            async with asyncio.timeout(WITHIN_S):
                while await position(wal, "dead", "a") != left[-1]:  # noqa: ASYNC110 -- the contract has no event for it
                    await asyncio.sleep(0)
        new = await fill(wal, "a", 1, 13)
        delivered = await waiting
        assert delivered.entries[0].id == (left if reset_to is From.EARLIEST else new)[0]
