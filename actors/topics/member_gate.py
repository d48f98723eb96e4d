"""Which partitions a member may read: those whose predecessors its group has read to their ends."""

from __future__ import annotations

import asyncio

from ...runtime.catalog.topics import Topic
from ...runtime.log.wal import Wal

CHECK_S = 0.2  # between two looks at the positions of the group; doubled each time
CHECK_MAX_S = 2.0


class MemberGate:
    """Lets partitions pass that follow others, once the positions of `group` are behind the ends of these. That holds
    for all that is in them: else a group would be behind the end of one that is empty, and read its successor, while it
    has yet to read what came before both."""

    def __init__(self, wal: Wal, group: str) -> None:
        self._wal, self._group = wal, group
        self._passed: set[str] = set()  # pchannels
        self._positions: dict[str, bytes | None] = {}
        self._looked_s: float | None = None
        self._looking = asyncio.Lock()

    def has_passed(self, topic: Topic, channel: str) -> bool:
        """Whether that is known without a look."""
        return channel in self._passed or (channel in topic.places and not topic.predecessors(channel))

    def forget(self, channel: str) -> None:
        """The partition is removed."""
        self._passed.discard(channel)

    async def passes(self, topic: Topic, channel: str) -> bool:
        """Whether what is in `channel` may be delivered, as far as `topic` is known."""
        if channel not in self._passed:
            ends = [(each, topic.ends.get(each)) for each in topic.predecessors(channel)]
            if ends:
                await self._look()
            if not all(end is not None and (self._positions.get(each) or b"") >= end.id for each, end in ends):
                return False
            self._passed.add(channel)
        return True

    async def _look(self) -> None:
        """Read the positions of the group, unless that was done just now: they only go on."""
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._looked_s is None or self._looked_s + CHECK_S <= now_s:
                self._looked_s = now_s
                for each in await self._wal.groups():
                    if each.name == self._group:
                        self._positions = each.positions
