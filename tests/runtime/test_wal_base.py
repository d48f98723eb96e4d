"""What the logs of all backends have in common, over a backend without anything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tidewal.runtime.errors import Closed, Unsupported
from tidewal.runtime.log.wal import Append, Capabilities, ChannelInfo, ChannelPolicy, Entry, From, OnAppended, Start
from tidewal.runtime.log.wal_base import WalBase


class Plain(WalBase):
    """A log without groups: its entries are in a list, and it closes once it is let."""

    name = "plain"
    capabilities = Capabilities(
        atomic_batches=True, seek_by_time=False, truncate=False, multi_process_write=False, one_node=True
    )

    def __init__(self) -> None:
        super().__init__("plain://here")
        self.entries: list[bytes] = []
        self.closings = 0
        self.may_close = asyncio.Event()

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._check_open()
        first = len(self.entries)
        self.entries += [bytes(entry.payload) for entry in entries]
        done([b"%d" % number for number in range(first, len(self.entries))])

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None: ...
    async def channels(self) -> list[str]: ...
    async def describe(self, channel: str) -> ChannelInfo: ...
    async def drop_channel(self, channel: str) -> None: ...
    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]: ...
    async def latest_id(self, channel: str) -> bytes | None: ...
    async def id_at(self, channel: str, timestamp: int) -> bytes | None: ...
    async def truncate(self, channel: str, id: bytes) -> None: ...
    async def hold(self, channel: str, holder: str, id: bytes | None) -> None: ...

    async def _close(self) -> None:
        self._closed = True
        self.closings += 1
        await self.may_close.wait()


async def test_one_and_many_are_appended_by_submit():
    wal = Plain()
    assert await wal.append("a", b"one") == b"0"
    assert await wal.append_many([Append("a", b"two"), Append("a", b"three")]) == [b"1", b"2"]
    assert wal.entries == [b"one", b"two", b"three"]
    wal.may_close.set()
    await wal.close()


async def test_closing_goes_on_when_cancelled_and_happens_once():
    wal = Plain()
    first = asyncio.ensure_future(wal.close())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.ensure_future(wal.close())
    await asyncio.sleep(0)
    assert not again.done()
    with pytest.raises(Closed, match="plain://here"):
        await wal.append("a", b"late")
    wal.may_close.set()
    await again
    await wal.close()
    assert wal.closings == 1


async def test_a_block_closes_the_log():
    wal = Plain()
    wal.may_close.set()
    async with wal as opened:
        assert opened is wal
        await opened.append("a", b"in it")
    with pytest.raises(Closed):
        wal.submit([Append("a", b"late")], lambda result: None)


async def test_without_groups_every_call_for_them_is_refused():
    wal = Plain()
    calls: list[Any] = [
        wal.join("g", ["a"], start=From.LATEST, session_timeout_s=5),
        wal.groups(),
        wal.seek_group("g", "a", From.EARLIEST),
        wal.drop_group("g"),
    ]
    for call in calls:
        with pytest.raises(Unsupported) as caught:
            await call
        assert caught.value.capability == "groups"


def test_what_a_log_must_bring_is_known():
    class Nothing(WalBase):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing("nothing://")  # pyright: ignore[reportAbstractUsage]
