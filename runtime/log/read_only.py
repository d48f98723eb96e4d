"""A log that was opened for reading only: `open_wal(url, read_only=True)`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ..errors import ReadOnly, TidewalError
from .wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    GroupInfo,
    GroupMember,
    Headers,
    OnAppended,
    Payload,
    Start,
    Wal,
)

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter
    from ..groups.coordinator_client import GroupAcks


class ReadOnlyWal:
    """`Wal` over another one, to which it passes the calls that read. Every call that writes raises `ReadOnly`, with
    its name as the field `call`, before anything is sent. `capabilities.read_only` is set."""

    def __init__(self, wal: Wal) -> None:
        """Read from `wal`; `close` closes it too."""
        self._wal = wal
        self.name: str = wal.name
        self.capabilities: Capabilities = replace(wal.capabilities, read_only=True)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def channels(self) -> list[str]:
        return await self._wal.channels()

    async def describe(self, channel: str) -> ChannelInfo:
        return await self._wal.describe(channel)

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        return self._wal.read(channel, start)

    def read_where(self, channel: str, start: Start, where: RecordFilter) -> AsyncIterator[Sequence[Entry]]:
        return self._wal.read_where(channel, start, where)

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._wal.latest_id(channel)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._wal.id_at(channel, timestamp)

    async def groups(self) -> list[GroupInfo]:
        return await self._wal.groups()

    async def close(self) -> None:
        await self._wal.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        raise refused("create_channel")

    async def drop_channel(self, channel: str) -> None:
        raise refused("drop_channel")

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        raise refused("submit")

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        raise refused("submit_with_acks")

    def refusal(self) -> TidewalError | None:
        return refused("submit")

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        raise refused("append")

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        raise refused("append_many")

    async def truncate(self, channel: str, id: bytes) -> None:
        raise refused("truncate")

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        raise refused("hold")

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
        ack_timeout_s: float | None = None,
    ) -> GroupMember:
        raise refused("join")

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        raise refused("seek_group")

    async def drop_group(self, group: str) -> None:
        raise refused("drop_group")


def refused(call: str) -> ReadOnly:
    """The error of `call`, which writes."""
    return ReadOnly(f"{call} writes, and this log was opened with read_only=True: open it without", call=call)
