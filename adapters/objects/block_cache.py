"""The blocks that a process has in memory, so that readers of the log's end need no request."""

from __future__ import annotations

from collections import OrderedDict

from .block import Block, SectionRow
from .log_objects import block_key


class BlockCache:
    """The blocks that were written or read last, as many as `limit_bytes` hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._blocks: OrderedDict[str, Block] = OrderedDict()

    def add(self, block: Block) -> None:
        key = block_key(block.header.epoch, block.header.number)
        if key in self._blocks or len(block.data) > self._limit_bytes:
            return
        self._blocks[key] = block
        self._bytes += len(block.data)
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._blocks.popitem(last=False)[1].data)

    def block(self, key: str) -> bytes | None:
        """The bytes of a block, None where it is not in the cache."""
        block = self._blocks.get(key)
        return None if block is None else block.data

    def section(self, key: str, row: SectionRow) -> memoryview | None:
        """One section of a block, None where it is not in the cache."""
        block = self._blocks.get(key)
        return None if block is None else block.section(row)
