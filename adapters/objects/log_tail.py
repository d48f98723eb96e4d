"""Read the log in the store, as any process can that has no owner to ask: a checkpoint, then block after block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .block import Block, BlockKind
from .open_log import OpenLog

AT_ONCE: Final = 32  # blocks that are asked for together


class LogTail:
    """Applies the blocks of the store to the state, in order, as far as none is missing.

    Such a block was acknowledged, or will count as if it had been: a fence goes only into the first place without a
    block. A block behind a gap proves nothing, and is left alone until the gap is filled.
    """

    def __init__(self, log: OpenLog, owned: Callable[[], bool], applied: Callable[[], None]) -> None:
        """After `overtaken_s` of the log's pace without looking, a block that is not there may have been deleted: its
        clock counts the time in which the machine is suspended. `applied` is called after blocks were applied, by this
        process; while the log is `owned` by it, its owner applies them."""
        self._objects, self._state, self._checkpoints, self._cache = log.objects, log.state, log.checkpoints, log.cache
        self._clock, self._overtaken_s, self._owned, self._applied = log.clock, log.pace.overtaken_s, owned, applied
        self._looked_at = float("-inf")
        self._lock = asyncio.Lock()
        self._offered: dict[tuple[int, int], Block] = {}  # by the owner, while the store is read

    async def catch_up(self) -> bool:
        """Apply what there is; whether there was anything. When it returns, it has seen all that was acknowledged
        before it was called. Raises `Unavailable`, `CorruptLog` and `FormatTooNew`."""
        async with self._lock:
            if not await self._objects.look():
                return False
            began, moved, passed_s = self._state.place, False, self._overtaken_s
            while passed_s >= self._overtaken_s or self._offered:
                now = self._clock.monotonic()
                if now - self._looked_at >= self._overtaken_s:
                    moved |= await self._checkpoints.load()
                await self._apply_blocks()
                passed_s, self._looked_at = self._clock.monotonic() - now, now
                self._take_offered()
            moved |= self._state.place != began
            if moved:
                self._applied()
            return moved

    def offer(self, block: Block) -> bool:
        """Take a block that the owner says to have acknowledged. False where one before it is missing here, where too
        many wait for a reading that is under way, or where the last look is so long ago that the block may have lain
        here since then, and those behind it may be deleted: then it is to be read from the store."""
        place = block.header.epoch, block.header.number
        reading, now = self._lock.locked(), self._clock.monotonic()
        if place < self._state.place or self._owned():
            return True
        if len(self._offered) >= AT_ONCE or not (reading or place == self._state.place):
            return False
        if not reading and now - self._looked_at >= self._overtaken_s:
            return False
        self._offered[place] = block
        if not reading:
            self._looked_at = now
            self._take_offered()
            self._applied()
        return True

    def _take_offered(self) -> None:
        """Apply what follows of the blocks that were offered, and forget those that are known."""
        while not self._owned() and (block := self._offered.pop(self._state.place, None)) is not None:
            self._state.apply(block)
            self._cache.add(block)
        self._offered = {place: block for place, block in self._offered.items() if place > self._state.place}

    async def _apply_blocks(self) -> None:
        at_once, at_end = 1, False
        while not at_end:
            place = self._state.place
            found = await self._next_blocks(at_once)
            if self._owned():
                return
            if self._state.place != place:  # this process owned the log meanwhile, and applied what it put
                continue
            for block in found:
                self._state.apply(block)
                self._cache.add(block)
            ended = bool(found) and found[-1].header.kind is not BlockKind.DATA
            at_end = len(found) < at_once and not ended  # what an owner puts meanwhile need not be chased
            at_once = 1 if ended else min(2 * at_once, AT_ONCE)

    async def _next_blocks(self, at_once: int) -> list[Block]:
        """The next blocks up to the first that is missing, `at_once` at most, none behind the end of the epoch."""
        epoch, number = self._state.epoch, self._state.number
        places = range(number, number + at_once)
        found = await asyncio.gather(*(self._objects.block(epoch, each) for each in places))
        blocks: list[Block] = []
        for block in found:
            if block is None:
                break
            blocks.append(block)
            if block.header.kind is not BlockKind.DATA:
                break
        return blocks
