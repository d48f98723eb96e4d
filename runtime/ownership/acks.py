"""The ack manager: which timestamps are still open, and so how far the watermark may go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Opened(Generic[Item]):
    """One timestamp that was given out, and what was appended under it: `size` bytes."""

    ts: int
    item: Item
    size: int = 0
    done: bool = False


class AckManager(Generic[Item]):
    """Timestamps in the order they were given out, released in that order once each is durable or has certainly
    failed. An append of unknown outcome is never released (guarantee 4). Not thread-safe: the channel owner's lock
    guards it. `bytes` is what is open.
    """

    def __init__(self) -> None:
        self.bytes: int = 0
        self._open: deque[Opened[Item]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, ts: int, item: Item, size: int = 0) -> Opened[Item]:
        """Open `ts`. It is above all before it, but for those of transactions that were prepared since, which are no
        one's time yet: it comes before these. Pass the result to `finish` later, or to `withdraw` at once."""
        opened = Opened(ts, item, size)
        place = len(self._open)
        while place and self._open[place - 1].ts > ts:
            place -= 1
        self._open.insert(place, opened)
        self.bytes += size
        return opened

    def withdraw(self, opened: Opened[Item]) -> None:
        """Remove what was opened: its append was never submitted."""
        self._open.remove(opened)
        self.bytes -= opened.size

    def finish(self, opened: Opened[Item]) -> list[Item]:
        """Note that the append at `opened` is decided. Returns the items released by that, in order of their
        timestamps: an acknowledgement never overtakes an earlier append, so all that was acknowledged is at or below
        the watermark.
        """
        opened.done = True
        released: list[Item] = []
        while self._open and self._open[0].done:
            first = self._open.popleft()
            self.bytes -= first.size
            released.append(first.item)
        return released

    def watermark(self, now: int) -> int:
        """The highest time at or below which nothing is open: `now` when nothing is open."""
        return self._open[0].ts - 1 if self._open else now

    def items(self) -> list[Item]:
        """The items that are open, in order."""
        return [opened.item for opened in self._open]
