"""Read the log from block to block, in the store, as any process can that has no owner to ask."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from .block import Block, BlockKind, SectionRow
from .log_objects import LogObjects
from .log_state import LogState

AT_ONCE: Final = 32  # blocks that are asked for together


class BlockCache:
    """The blocks that were written or read last, as many as `limit_bytes` hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()

    def add(self, block: Block) -> None:
        place = (block.header.epoch, block.header.number)
        if place in self._blocks or len(block.data) > self._limit_bytes:
            return
        self._blocks[place] = block
        self._bytes += len(block.data)
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._blocks.popitem(last=False)[1].data)

    def section(self, epoch: int, number: int, row: SectionRow) -> memoryview | None:
        """One section of a block, None where it is not in the cache."""
        block = self._blocks.get((epoch, number))
        return None if block is None else block.section(row)


class LogTail:
    """Applies the blocks of the store to the state, in order, as far as none is missing.

    Such a block was acknowledged, or will count as if it had been: a fence goes only into the first place without a
    block. A block behind a gap proves nothing, and is left alone until the gap is filled.
    """

    def __init__(self, objects: LogObjects, state: LogState, cache: BlockCache, applied: Callable[[], None]) -> None:
        """`applied` is called after blocks were applied."""
        self._objects, self._state, self._cache, self._applied = objects, state, cache, applied
        self._lock = asyncio.Lock()

    async def catch_up(self) -> int:
        """Apply what there is; the number of blocks. When it returns, it has seen all that was acknowledged before it
        was called. Raises `Unavailable`, `CorruptLog` and `FormatTooNew`."""
        async with self._lock:
            if not await self._objects.look():
                return 0
            count, at_once, at_end = 0, 1, False
            while not at_end:
                found = await self._next_blocks(at_once)
                for block in found:
                    self._state.apply(block)
                    self._cache.add(block)
                count += len(found)
                ended = bool(found) and found[-1].header.kind is not BlockKind.DATA
                at_end = len(found) < at_once and not ended  # what an owner puts meanwhile need not be chased
                at_once = 1 if ended else min(2 * at_once, AT_ONCE)
            if count:
                self._applied()
            return count

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
