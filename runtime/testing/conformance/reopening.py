"""What a log that was closed and opened again remembers."""

from __future__ import annotations

from ...log.wal import Append, ChannelPolicy, From, FromId
from .backend_under_test import BackendUnderTest, ConformanceTests
from .helpers import PLAIN, payloads, take


class TestReopening(ConformanceTests):
    """What a log that was closed and opened again remembers."""

    async def test_channels_and_entries_are_there_again_and_ids_go_on(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        policy = ChannelPolicy(retention_s=60.0, retention_bytes=10**9)
        await wal.create_channel("a", policy)
        ids = await wal.append_many([Append("a", bytes([i]), i + 1) for i in range(20)])
        await wal.close()
        wal = await backend.wal()
        assert (await wal.describe("a")).policy == policy
        assert await wal.latest_id("a") == ids[-1]
        assert await wal.id_at("a", 7) == ids[6]
        more = await wal.append("a", b"more")
        assert more > ids[-1]
        entries = await take(wal, "a", From.EARLIEST, 21)
        assert [e.id for e in entries] == [*ids, more]
        assert payloads(entries) == [*(bytes([i]) for i in range(20)), b"more"]
        assert [e.id for e in await take(wal, "a", FromId(ids[18]), 2)] == [ids[19], more]

    async def test_truncation_and_restart_reuse_no_id(self, backend: BackendUnderTest) -> None:
        backend.needs("truncate")
        wal = await backend.wal()
        await wal.create_channel("a", PLAIN)
        ids = [await wal.append("a", b"x") for _ in range(10)]
        await backend.remove_before(wal, "a", ids[-1])
        await wal.close()
        wal = await backend.wal()
        assert await wal.append("a", b"y") > ids[-1]

    async def test_what_was_dropped_stays_dropped(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await wal.create_channel("a", PLAIN)
        await wal.create_channel("b", PLAIN)
        await wal.append("a", b"x")
        await wal.drop_channel("a")
        await wal.close()
        wal = await backend.wal()
        assert await wal.channels() == ["b"]
