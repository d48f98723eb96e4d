"""A log that was opened to be read reads all that there is, refuses what writes, and makes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ...clock import HybridClock
from ...errors import ReadOnly, Unavailable
from ...log.opening import open_wal
from ...log.read_only import ReadOnlyWal
from ...log.record import Record, RecordType
from ...log.wal import Append, From, FromId, FromTime
from ...streams.stream import MsgStream
from .backend_under_test import BackendUnderTest, ConformanceTests
from .helpers import PLAIN, WITHIN_S, reading, take


def writing(wal: ReadOnlyWal, at: bytes) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every call that writes, by name."""
    return {
        "create_channel": lambda: wal.create_channel("b", PLAIN),
        "drop_channel": lambda: wal.drop_channel("a"),
        "append": lambda: wal.append("a", b"no"),
        "append_many": lambda: wal.append_many([Append("a", b"no")]),
        "truncate": lambda: wal.truncate("a", at),
        "hold": lambda: wal.hold("a", "me", at),
        "join": lambda: wal.join("others", ["a"]),
        "seek_group": lambda: wal.seek_group("workers", "a", From.EARLIEST),
        "drop_group": lambda: wal.drop_group("workers"),
    }


class TestReadOnly(ConformanceTests):
    """What a log that was opened to be read does, refuses and leaves alone."""

    async def test_what_was_opened_to_be_read_reads_and_changes_nothing(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await wal.create_channel("a", PLAIN)
        ids = await wal.append_many([Append("a", b"%d" % number, number) for number in range(1, 11)])
        if backend.capabilities.groups:
            member = await wal.join("workers", ["a"])
            await member.acknowledge(await anext(member))
            await member.aclose()
        log = await backend.reader(wal)
        before = await backend.stored()

        assert bool(before) is (backend.outside is not None)
        assert (log.capabilities.read_only, wal.capabilities.read_only) == (True, False)
        assert log.name == wal.name
        assert await log.channels() == ["a"]
        assert await log.describe("a") == await wal.describe("a")
        assert (await log.latest_id("a"), await log.id_at("a", 5)) == (ids[-1], ids[4])
        assert [entry.id for entry in await take(log, "a", From.EARLIEST, 10)] == ids
        assert [entry.id for entry in await take(log, "a", FromId(ids[6]), 3)] == ids[7:]
        assert (await take(log, "a", FromTime(10), 1))[0].id <= ids[-1]
        groups = await log.groups() if backend.capabilities.groups else []
        assert [(group.name, group.members) for group in groups] == [("workers", {})] * backend.capabilities.groups

        for call, attempt in writing(log, ids[5]).items():
            with pytest.raises(ReadOnly) as caught:
                await attempt()
            assert caught.value.call == call
        with pytest.raises(ReadOnly):
            log.submit([Append("a", b"no")], lambda result: pytest.fail(str(result)))

        assert await backend.stored() == before
        assert await wal.channels() == ["a"]
        if backend.capabilities.groups:
            assert await wal.groups() == groups
        info = await wal.describe("a")
        assert (info.first_id, info.latest_id) == (ids[0], ids[-1])

    async def test_a_reader_sees_what_comes_later_and_streams_run_over_it(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await wal.create_channel("a", PLAIN)
        log = await backend.reader(wal)
        latest = reading(log, "a", From.LATEST)
        waiting = asyncio.ensure_future(anext(latest))
        stream = MsgStream(log, HybridClock())
        stream.as_consumer(["a"])
        producer = MsgStream(wal, HybridClock())
        producer.as_producer(["a"])
        async with asyncio.timeout(WITHIN_S):
            while not waiting.done():  # the reader begins where the channel ends once it is asked
                await producer.produce([Record(RecordType.ROWS, key=b"door")])
                await asyncio.wait([waiting], timeout=0.05)
            assert await log.latest_id("a") is not None
            assert (await anext(stream)).messages[0].key == b"door"
        refused = MsgStream(log, HybridClock())
        refused.as_producer(["a"])
        with pytest.raises(ReadOnly):
            await refused.produce([Record(RecordType.ROWS, key=b"door")])
        await latest.aclose()
        await stream.close()

    async def test_where_there_is_no_log_none_is_made(self, backend: BackendUnderTest) -> None:
        if not backend.missing_url:
            pytest.skip("no other process can open it")
        with pytest.raises(Unavailable):
            await open_wal(backend.missing_url, read_only=True, **backend.options)
        assert backend.outside is None or not await backend.outside(backend.missing_url)

    async def test_groups_are_listed_where_there_are_none_without_making_anything(
        self, backend: BackendUnderTest
    ) -> None:
        backend.needs("groups")
        wal = await backend.wal()
        await wal.create_channel("a", PLAIN)
        log = await backend.reader(wal)
        before = await backend.stored()
        assert await log.groups() == []
        assert await backend.stored() == before
