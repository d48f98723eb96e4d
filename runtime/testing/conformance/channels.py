"""Channels are made, described and dropped."""

from __future__ import annotations

import asyncio

import pytest

from ...errors import ChannelExists, ChannelNotFound, InvalidRequest
from ...log.wal import Append, ChannelPolicy, From, FromId, Wal
from .backend_under_test import ConformanceTests
from .helpers import PLAIN, payloads, reading, submitted, take


class TestChannels(ConformanceTests):
    """How channels are made, described and dropped."""

    async def test_creating_again_under_the_same_policy_is_fine_under_another_not(self, wal: Wal) -> None:
        await asyncio.gather(*(wal.create_channel("a", PLAIN) for _ in range(5)))
        with pytest.raises(ChannelExists):
            await wal.create_channel("a", ChannelPolicy(ephemeral=True))
        assert await wal.channels() == ["a"]

    @pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 251, "a\n"])
    async def test_bad_names_are_refused(self, wal: Wal, name: str) -> None:
        with pytest.raises(InvalidRequest):
            await wal.create_channel(name, PLAIN)
        assert await wal.channels() == []

    async def test_missing_channels_are_named_by_every_call(self, wal: Wal) -> None:
        for call in (
            wal.append("no", b""),
            wal.describe("no"),
            wal.latest_id("no"),
            wal.id_at("no", 1),
            wal.truncate("no", bytes(8)),
            wal.hold("no", "me", bytes(8)),
            anext(reading(wal, "no", From.EARLIEST)),
        ):
            with pytest.raises(ChannelNotFound):
                await call
        with pytest.raises(ChannelNotFound):
            await submitted(wal, [Append("no", b"")])

    async def test_one_missing_channel_keeps_the_whole_submit_out(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        with pytest.raises(ChannelNotFound):
            await wal.append_many([Append("a", b"1"), Append("no", b"2")])
        assert await wal.latest_id("a") is None

    @pytest.mark.slow
    async def test_describe_tells_policy_and_ids(self, wal: Wal) -> None:
        policy = ChannelPolicy(retention_s=None, max_message_bytes=10)
        await wal.create_channel("a", policy)
        info = await wal.describe("a")
        assert (info.name, info.policy, info.first_id, info.latest_id) == ("a", policy, None, None)
        ids = [await wal.append("a", b"x") for _ in range(3)]
        info = await wal.describe("a")
        assert (info.first_id, info.latest_id) == (ids[0], ids[2])

    async def test_dropping_ends_readers_and_a_new_channel_of_the_name_starts_empty(self, wal: Wal) -> None:
        await wal.drop_channel("never was")
        await wal.create_channel("a", PLAIN)
        old = await wal.append("a", b"old")
        reader = wal.read("a", FromId(old))
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        await wal.drop_channel("a")
        with pytest.raises(ChannelNotFound):
            await waiting
        with pytest.raises(ChannelNotFound):
            await wal.append("a", b"x")
        await wal.create_channel("a", PLAIN)
        await wal.append("a", b"new")
        assert payloads(await take(wal, "a", From.EARLIEST, 1)) == [b"new"]
