"""Subscriptions with a filter: only records that pass are delivered, and time and positions go on over the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import pytest

from ...clock import HybridClock
from ...errors import GroupFilterMismatch, InvalidFilter, InvalidRequest
from ...groups.group_filter import change_group_filter
from ...groups.record_member import RecordMember
from ...log.record import BatchPart, Record, RecordType, encode
from ...log.wal import Append, From, Wal
from ...streams.messages import Position
from ...streams.stream import MsgStream
from ...streams.tt_stream import TtMsgStream
from .backend_under_test import ConformanceTests
from .group_helpers import GROUPS, having, position
from .helpers import WITHIN_S, create

WHERE = 'tag in ("a", "b") and priority > 3'


def owned(channel: str, cseq: int, tag: str, priority: int | str = 5, *, part: BatchPart | None = None) -> Append:
    """A record of an owner, whose time is ten times its number."""
    tags = {"tag": tag, "priority": priority}
    record = Record(RecordType.ROWS, ts=10 * cseq, term=1, cseq=cseq, part=part, key=f"{tag}{cseq}".encode(), tags=tags)
    return Append(channel, encode(record), record.ts)


def tick(channel: str, cseq: int) -> Append:
    """A stored tick: a control record."""
    return Append(channel, encode(Record(RecordType.TIME_TICK, ts=10 * cseq, term=1, cseq=cseq)), 10 * cseq)


def batch(channel: str, first: int, tags: Sequence[str]) -> list[Append]:
    """The parts of a batch, numbered from `first` on."""
    count = len(tags)
    return [owned(channel, first + n, tag, part=BatchPart(first, n, count)) for n, tag in enumerate(tags)]


class TestFilters(ConformanceTests):
    """Filters of streams."""

    async def test_a_plain_stream_has_the_messages_that_pass(self, wal: Wal) -> None:
        await create(wal, "c")
        await wal.append_many([owned("c", n, "abc"[n % 3], n % 7) for n in range(1, 60)])
        await wal.append_many([*batch("c", 60, "ccc"), *batch("c", 63, "cac"), owned("c", 66, "a", "5")])
        await wal.append_many([owned("c", 67, "b")])
        wanted = [n for n in range(1, 60) if n % 3 < 2 and n % 7 > 3] + [63, 64, 65, 67]
        stream = MsgStream(wal, HybridClock(), where=WHERE)
        stream.as_consumer(["c"])
        cseqs: list[int] = []
        places: list[Position] = []
        async with asyncio.timeout(WITHIN_S):
            while len(cseqs) < len(wanted):
                pack = await anext(stream)
                cseqs += [message.cseq for message in pack.messages]
                places.append(pack.end_positions["c"])
        assert cseqs == wanted
        position = places[-1]
        assert (position.term, position.cseq) == (1, 67)
        assert stream.counts["c"].filtered == 67 - len(wanted)
        await stream.close()

    async def test_time_goes_on_where_nothing_passes(self, wal: Wal) -> None:
        await create(wal, "c", "d")
        await wal.append_many([owned("c", n, "c") for n in range(1, 20)])
        await wal.append_many([owned("d", n, "a") for n in range(1, 20)])
        await wal.append_many([tick("c", 20), tick("d", 20)])
        stream = TtMsgStream(wal, where='tag == "a" and _cseq > 5')
        stream.as_consumer(["c", "d"])
        found: list[int] = []
        places: dict[str, Position] = {}
        async with asyncio.timeout(WITHIN_S):
            while stream.end_ts < 200:
                pack = await anext(stream)
                found += [message.cseq for message in pack.messages]
                places.update(pack.end_positions)
        assert found == list(range(6, 20))
        assert {name: place.cseq for name, place in places.items()} == {"c": 20, "d": 20}
        await stream.close()
        again = TtMsgStream(wal, where='tag == "c"')
        again.seek(places.values())
        await wal.append_many([owned("c", 21, "a"), owned("d", 21, "a"), owned("c", 22, "c")])
        again.announce("d", 1, 21, 230)  # of the last number, which does not pass
        again.announce("c", 1, 22, 230)
        keys: list[bytes] = []
        async with asyncio.timeout(WITHIN_S):
            while again.end_ts < 230:
                keys += [message.key for message in (await anext(again)).messages]
        assert keys == [b"c22"]
        await again.close()

    async def test_a_wrong_expression_is_refused_at_the_call(self, wal: Wal) -> None:
        for where, at in (('tag = "a"', 4), ("priority > ", 11), ('"a" > 3', 6), ("_prio > 3", 0), ("3", 0)):
            with pytest.raises(InvalidFilter) as raised:
                MsgStream(wal, HybridClock(), where=where)
            assert raised.value.position == at, where


class TestGroupFilters(ConformanceTests):
    """Filters of consumer groups."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    async def test_the_position_goes_on_over_what_does_not_pass(self, wal: Wal) -> None:
        await create(wal, "c")
        ids = await wal.append_many([owned("c", n, "abc"[n % 3]) for n in range(1, 30)])
        member = RecordMember(wal, await wal.join("g", ["c"]), where=WHERE)
        assert await _keys(wal, member, ids[-1]) == [f"{'abc'[n % 3]}{n}" for n in range(1, 30) if n % 3 < 2]
        more = await wal.append_many([owned("c", n, "c") for n in range(30, 40)])
        assert await _keys(wal, member, more[-1]) == []
        await member.aclose()
        last = await wal.append_many([owned("c", 40, "c"), *batch("c", 41, "cb"), owned("c", 43, "c")])
        member = RecordMember(wal, await wal.join("g", ["c"]), where=WHERE)
        assert await _keys(wal, member, last[-1]) == ["c41", "b42"]
        await member.aclose()

    async def test_a_member_with_another_filter_moves_nothing(self, wal: Wal) -> None:
        await create(wal, "c")
        ids = await wal.append_many([owned("c", n, "abc"[n % 3]) for n in range(1, 10)])
        member = RecordMember(wal, await wal.join("g", ["c"]), where=WHERE)
        await _keys(wal, member, ids[-1])
        await member.aclose()
        stood = await position(wal, "g", "c")
        await wal.append_many([owned("c", n, "abc"[n % 3]) for n in range(10, 20)])
        for where in (None, 'tag == "c"'):
            other = RecordMember(wal, await wal.join("g", ["c"]), where=where)
            for _ in range(2):
                with pytest.raises(GroupFilterMismatch, match=r"change_group_filter.*\(start\)") as raised:
                    async with asyncio.timeout(WITHIN_S):
                        await anext(other)
                assert (raised.value.group, raised.value.channel, raised.value.where) == ("g", "c", WHERE)
            assert await position(wal, "g", "c") == stood
            await other.aclose()

    async def test_a_change_says_from_where_the_new_one_begins(self, wal: Wal) -> None:
        await create(wal, "c")
        ids = await wal.append_many([owned("c", n, "abc"[n % 3]) for n in range(1, 10)])
        member = RecordMember(wal, await wal.join("g", ["c"]))
        assert len(await _keys(wal, member, ids[-1])) == 9
        with pytest.raises(InvalidRequest, match="let them leave"):
            await change_group_filter(wal, "g", 'tag == "c"', start=From.EARLIEST)
        await member.aclose()
        await change_group_filter(wal, "g", 'tag == "c"', start=From.EARLIEST)
        member = RecordMember(wal, await wal.join("g", ["c"]), where='tag == "c"')
        assert await _keys(wal, member, ids[-1]) == ["c2", "c5", "c8"]
        await member.aclose()
        await change_group_filter(wal, "g", None, start=From.LATEST)
        late = await wal.append_many([owned("c", 10, "b")])
        old = RecordMember(wal, await wal.join("g", ["c"]), where='tag == "c"')
        with pytest.raises(GroupFilterMismatch, match="version 2"):
            async with asyncio.timeout(WITHIN_S):
                await anext(old)
        await old.aclose()
        member = RecordMember(wal, await wal.join("g", ["c"]))
        assert await _keys(wal, member, late[-1]) == ["b10"]
        await member.aclose()

    async def test_another_member_of_the_group_goes_on_with_its_filter(self, wal: Wal) -> None:
        await create(wal, "c", "d")
        for channel in ("c", "d"):
            await wal.append_many([owned(channel, n, "abc"[n % 3]) for n in range(1, 10)])
        first = RecordMember(wal, await wal.join("g", ["c", "d"]), where='tag == "a"')
        for _ in range(2):
            async with asyncio.timeout(WITHIN_S):
                await first.acknowledge(await anext(first))
        inner = await wal.join("g", ["c", "d"])
        await first.aclose()
        await having(inner, "c", "d")
        second = RecordMember(wal, inner, where='tag == "a"')
        await wal.append_many([owned(channel, 12, "a") for channel in ("c", "d")])
        async with asyncio.timeout(WITHIN_S):
            packs = [await anext(second), await anext(second)]
        assert sorted((pack.channel, record.cseq) for pack in packs for record in pack.records) == [
            ("c", 12),
            ("d", 12),
        ]
        await second.aclose()


async def _keys(wal: Wal, member: RecordMember, upto: bytes) -> list[str]:
    """The keys of what the member gets until the group's position is `upto`."""
    keys: list[str] = []
    acknowledging = asyncio.Lock()  # what is given up in the midst is not done: what has no record waits for it

    async def read() -> None:
        async for pack in member:
            keys.extend(record.key.decode() for record in pack.records)
            async with acknowledging:
                await member.acknowledge(pack)

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        while await position(wal, member.group, "c") != upto:  # noqa: ASYNC110 -- the contract has no event for it
            await asyncio.sleep(0.005)
        async with acknowledging:
            reading.cancel()
    return keys
