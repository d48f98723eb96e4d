"""A log whose process dies at one of its writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


class Killed(Exception):
    """The process of the migration is gone."""


class DyingWal(MemoryWal):
    """A log whose process dies at the write that `left` counts down to, before or behind it."""

    def __init__(self, log: MemoryLog, left: list[int], *, behind: bool) -> None:
        super().__init__(log)
        self._left, self._behind = left, behind

    def _dies(self) -> bool:
        self._left[0] -= 1
        return self._left[0] == 0

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        dies = self._dies()
        if dies and not self._behind:
            raise Killed
        super().submit(entries, done)
        if dies:
            raise Killed

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await super().create_channel(channel, policy)
        if self._dies():
            raise Killed

    async def drop_channel(self, channel: str) -> None:
        await super().drop_channel(channel)
        if self._dies():
            raise Killed

    async def seek_group(self, group: str, channel: str, start: Any) -> None:
        await super().seek_group(group, channel, start)
        if self._dies():
            raise Killed

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await super().hold(channel, holder, id)
        if self._dies():
            raise Killed
