"""The time of a channel as one reader knows it."""

from __future__ import annotations

from bisect import bisect_left

ANNOUNCED_MAX = 64


class ChannelTime:
    """The `time` of a channel, behind what was read nothing at or before it follows, and the times that its owner has
    announced for records that were not read yet."""

    def __init__(self) -> None:
        self.time: int = 0
        self.announced: list[tuple[tuple[int, int], int]] = []  # sorted, for announcements come in any order

    def apply_when_read(self, upto: tuple[int, int], time: int, read: tuple[int, int]) -> None:
        """Apply `time` once everything up to the (term, cseq) `upto` has been read; by now `read` has been."""
        if upto <= read:
            self.time = max(self.time, time)
            return
        at = bisect_left(self.announced, (upto, 0))
        if at < len(self.announced) and self.announced[at][0] == upto:
            time = max(time, self.announced.pop(at)[1])
        self.announced.insert(at, (upto, time))
        if len(self.announced) > ANNOUNCED_MAX:
            del self.announced[at - 1]  # the one before says less; without one, it is the furthest away

    def apply_announced(self, read: tuple[int, int]) -> None:
        """Apply what was announced for records up to the (term, cseq) `read`."""
        while self.announced and self.announced[0][0] <= read:
            self.time = max(self.time, self.announced.pop(0)[1])
