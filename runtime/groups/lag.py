"""How far a consumer group is behind in a channel."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, cast

from ..clock import physical_ms
from ..errors import ChannelNotFound, PositionLost
from ..log.wal import ChannelInfo, Entry, FromId, Wal

COUNTED_MAX = 10_000  # entries of a lag; more are as many: ids have gaps, so entries are counted by reading them


class Lag(NamedTuple):
    """`entries` that are not acknowledged, as far as they were counted, and the `timestamp` of the oldest of them that
    has one; 0 where none has."""

    entries: int
    timestamp: int

    def seconds(self, now_s: float) -> float | None:
        """The age of the oldest entry at the Unix time `now_s`: 0 where the group is not behind, None where no entry
        has a time."""
        if self.timestamp:
            return max(0.0, now_s - physical_ms(self.timestamp) / 1000)
        return None if self.entries else 0.0


async def lag_of(wal: Wal, channel: str, position: bytes | None, at_most: int = COUNTED_MAX) -> Lag:
    """How far `position` is behind in a channel; not at all in one that is dropped, or emptied, meanwhile. Reads the
    entries that it counts, `at_most` so many and what comes in one piece with them."""
    count, oldest = 0, 0
    try:
        info = await wal.describe(channel)
        latest = info.latest_id
        if info.first_id is None or latest is None or (position or b"") >= latest:
            return Lag(0, 0)
        async with aclosing(_batches(wal, info, position)) as batches:
            async for batch in batches:
                for entry in batch:
                    if entry.id <= latest:
                        count, oldest = count + 1, oldest or entry.timestamp
                    if entry.id >= latest or count == at_most:
                        return Lag(count, oldest)
    except (ChannelNotFound, PositionLost):
        pass
    return Lag(count, oldest)


def _batches(wal: Wal, info: ChannelInfo, position: bytes | None) -> AsyncGenerator[Sequence[Entry]]:
    """What the channel has behind `position`, or from its first entry on."""
    assert info.first_id is not None
    behind_first = position is not None and position >= info.first_id
    start = FromId(cast(bytes, position)) if behind_first else FromId(info.first_id, inclusive=True)
    return cast("AsyncGenerator[Sequence[Entry]]", wal.read(info.name, start))
