"""Consumer groups: what members store with the group's position in a channel."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from ...errors import ChannelNotFound, Closed, Fenced, InvalidRequest
from ...groups.progress import MAX_METADATA_BYTES
from ...groups.record_member import RecordMember
from ...groups.retry_policy import GROUP_DEAD_LETTERS
from ...log.record import Record, RecordType, decode, encode
from ...log.wal import Append, Delivered, From, Wal
from .backend_under_test import BackendUnderTest, ConformanceTests
from .group_helpers import GROUPS, batches, having, one, outputs_of, position
from .helpers import WITHIN_S, create, fill, take

EVERY_BYTE = bytes(range(256)) * (MAX_METADATA_BYTES // 256)


class TestGroupMetadata(ConformanceTests):
    """What members store with the group's position in a channel."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    async def test_it_is_there_after_a_move_and_after_the_log_was_opened_again(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await create(wal, "a", "b")
        ids = await fill(wal, "a", 4)
        first = await wal.join("g", ["a", "b"])
        assert (first.metadata("a"), first.metadata("b")) == (b"", b"")
        delivered = await one(first, 4)
        await first.acknowledge(delivered, ids[:2], metadata=EVERY_BYTE)
        await first.acknowledge(delivered, [ids[3]])  # says nothing of it
        await first.annotate("b", b"nothing read yet")
        second = await wal.join("g", ["a", "b"])
        await first.aclose()
        await having(second, "a", "b")
        assert (second.metadata("a"), second.metadata("b")) == (EVERY_BYTE, b"nothing read yet")
        assert [entry.id for entry in (await one(second)).entries] == [ids[2]]
        await wal.close()
        wal = await backend.wal()
        third = await wal.join("g", ["a", "b"])
        assert (third.metadata("a"), third.metadata("b")) == (EVERY_BYTE, b"nothing read yet")
        other = await wal.join("h", ["a"])
        assert other.metadata("a") == b""
        listed = {group.name: group.metadata for group in await wal.groups()}
        assert listed == {"g": {"a": EVERY_BYTE, "b": b"nothing read yet"}, "h": {}}

    async def test_it_moves_with_the_position_and_without_it(self, wal: Wal) -> None:
        await create(wal, "a")
        ids = await fill(wal, "a", 3)
        member = await wal.join("g", ["a"])
        delivered = await one(member, 3)
        await member.annotate(delivered, b"attempt 1")
        assert member.metadata("a") == b"attempt 1"
        assert (await position(wal, "g", "a") or b"") < ids[0]
        await member.acknowledge(delivered, ids[:1], metadata=b"one")
        await member.acknowledge(delivered, metadata=b"all")
        await member.acknowledge(delivered, metadata=b"is acknowledged already")
        assert member.metadata("a") == b"all"
        await member.annotate("a", b"")
        again = await wal.join("g", ["a"])
        await member.aclose()
        await having(again, "a")
        assert again.metadata("a") == b""
        assert [group.metadata for group in await wal.groups()] == [{}]
        assert await position(wal, "g", "a") == ids[-1]

    async def test_of_acknowledgements_in_flight_that_furthest_on_is_left(self, wal: Wal) -> None:
        await create(wal, "a")
        member = await wal.join("g", ["a"])
        taken: list[Delivered] = []
        for number in range(4):
            await fill(wal, "a", 1, number)
            taken += await batches(member, 1)
        steps = [member.acknowledge(each, metadata=str(at).encode()) for at, each in enumerate(taken)]
        await asyncio.gather(*reversed(steps))
        assert member.metadata("a") == b"3"
        await member.aclose()
        member = await wal.join("g", ["a"])
        assert member.metadata("a") == b"3"

    async def test_it_is_committed_with_the_outputs_or_not_at_all(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await create(wal, "a", "b", "out")
        await fill(wal, "a", 1)
        await fill(wal, "b", 1)
        member = await wal.join("g", ["a", "b"])
        delivered = [await one(member), await one(member)]
        with pytest.raises(ChannelNotFound):
            await member.commit(delivered, [Append("nowhere", b"x")], metadata={"a": b"never"})
        with pytest.raises(InvalidRequest, match="acknowledges nothing"):
            await member.commit(delivered, [Append("out", b"x")], metadata={"out": b"never"})
        assert (member.metadata("a"), member.metadata("b")) == (b"", b"")
        await member.commit(delivered, [Append("out", b"x")], metadata={"a": b"with x", "b": b"too"})
        with pytest.raises(InvalidRequest):
            await member.commit(delivered, [Append("out", b"y")], metadata={"a": b"with y"})
        await wal.close()
        wal = await backend.wal()
        member = await wal.join("g", ["a", "b"])
        assert (member.metadata("a"), member.metadata("b")) == (b"with x", b"too")
        assert await outputs_of(wal) == [b"x"]

    async def test_who_has_lost_the_channel_stores_none(self, wal: Wal) -> None:
        await create(wal, "a")
        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        member.redeliver(delivered)
        with pytest.raises(Fenced):
            await member.annotate(delivered, b"late")
        with pytest.raises(Fenced):
            await member.acknowledge(delivered, metadata=b"late")
        again = await one(member)
        await member.annotate(again, b"in time")
        with pytest.raises(Fenced):
            await member.annotate(delivered, b"late")
        with pytest.raises(Fenced):
            await member.annotate("nowhere", b"")
        with pytest.raises(Fenced):
            member.metadata("nowhere")
        other = await wal.join("g", ["a"])
        await member.aclose()
        for late in (again, "a"):
            with pytest.raises((Fenced, Closed)):
                await member.annotate(late, b"late")
        await having(other, "a")
        assert other.metadata("a") == b"in time"

    async def test_records_come_once_over_owners_and_members(self, wal: Wal) -> None:
        await create(wal, "a")

        def record(term: int, cseq: int, kind: RecordType = RecordType.ROWS) -> Append:
            ts = 10 * term + cseq
            return Append("a", encode(Record(kind, ts=ts, term=term, cseq=cseq, key=b"%d %d" % (term, cseq))), ts)

        async def next_keys(count: int) -> list[bytes]:
            """The keys of the next records, read by a member of its own."""
            member = RecordMember(wal, await wal.join("g", ["a"]))
            keys: list[bytes] = []
            time = 0
            async with asyncio.timeout(WITHIN_S):
                while len(keys) < count:
                    pack = await anext(member)
                    assert time <= pack.begin_ts < pack.records[0].ts <= pack.records[-1].ts <= pack.end_ts
                    keys += [each.key for each in pack.records]
                    time = pack.end_ts
                    await member.acknowledge(pack)
            await member.aclose()
            return keys

        await wal.append_many([record(1, 1), record(1, 2), Append("a", b"no record")])
        assert await next_keys(2) == [b"1 1", b"1 2"]
        await wal.append_many([record(1, 2), record(2, 1, RecordType.FENCE), record(2, 2)])
        assert await next_keys(1) == [b"2 2"]
        await wal.append_many([record(1, 3), record(2, 2), record(2, 3)])
        assert await next_keys(1) == [b"2 3"]
        (letter,) = await take(wal, GROUP_DEAD_LETTERS, From.EARLIEST, 1)
        assert bytes(decode(letter.payload).body) == b"no record"

    async def test_a_seek_clears_it(self, wal: Wal) -> None:
        await create(wal, "a", "b")
        await fill(wal, "a", 3)
        member = await wal.join("g", ["a", "b"])
        for channel in ("a", "b"):
            await member.annotate(channel, b"of the old position")
        await member.seek("a", From.EARLIEST)
        async with asyncio.timeout(WITHIN_S):
            while "a" not in member.channels:  # noqa: ASYNC110 -- the contract has no event for it
                await asyncio.sleep(0)
        assert (member.metadata("a"), member.metadata("b")) == (b"", b"of the old position")
        await member.annotate("a", b"of the new position")
        await member.aclose()
        await wal.seek_group("g", "a", From.LATEST)
        member = await wal.join("g", ["a", "b"])
        assert (member.metadata("a"), member.metadata("b")) == (b"", b"of the old position")
        await member.aclose()
        await wal.drop_group("g")
        member = await wal.join("g", ["a", "b"])
        assert member.metadata("b") == b""

    @pytest.mark.parametrize("wrong", ["text", 5, bytearray(3), bytes(MAX_METADATA_BYTES + 1), None])
    async def test_what_is_no_metadata_is_refused(self, wal: Wal, wrong: Any) -> None:
        await create(wal, "a", "out")
        ids = await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        with pytest.raises(InvalidRequest, match="metadata"):
            await member.annotate("a", wrong)
        if wrong is not None:
            with pytest.raises(InvalidRequest, match="metadata"):
                await member.acknowledge(delivered, metadata=wrong)
            with pytest.raises(InvalidRequest, match="metadata"):
                await member.commit([delivered], [Append("out", b"x")], metadata={"a": wrong})
        assert await wal.latest_id("out") is None
        assert (await position(wal, "g", "a") or b"") < ids[0]
        assert member.metadata("a") == b""
