"""Put the blocks of one epoch into the store: several at a time, acknowledged in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ...runtime.errors import TidewalError
from .block import Block
from .log_objects import LogObjects

IN_FLIGHT: Final = 32  # blocks that are put at once: where a successor looks for gaps


class BlockWriter:
    """The blocks of the epoch that this process has claimed. A block is durable once it and all before it are in the
    store: only then `durable` is called with it. `ended` is called once, when another process has ended the epoch or
    the store has failed for good: the block that met this and those behind it are not in the log, and never will be.

    Callers do not wait for a put, so their cancellation does not cancel one.
    """

    def __init__(
        self, objects: LogObjects, durable: Callable[[Block], None], ended: Callable[[TidewalError], None]
    ) -> None:
        self._objects, self._durable, self._ended = objects, durable, ended
        self._inflight: deque[tuple[Block, asyncio.Task[None]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def free(self) -> int:
        """How many more blocks may be put now."""
        return IN_FLIGHT - len(self._inflight)

    @property
    def idle(self) -> bool:
        """Whether no block is in flight."""
        return not self._inflight

    def put(self, block: Block) -> None:
        """Begin to put the next block."""
        task = asyncio.get_running_loop().create_task(self._objects.put(block), name="put a block")
        self._inflight.append((block, task))
        self._idle.clear()
        task.add_done_callback(self._on_done)

    async def drained(self) -> None:
        """Return when no block is in flight."""
        await self._idle.wait()

    def abandon(self) -> None:
        """Give up what is in flight: those blocks may be in the store, or get there."""
        while self._inflight:
            self._inflight.popleft()[1].cancel()
        self._idle.set()

    def _on_done(self, _: asyncio.Task[None]) -> None:
        while self._inflight and self._inflight[0][1].done():
            block, task = self._inflight.popleft()
            if task.cancelled():  # the loop ends, and those behind it count for nothing
                self.abandon()
            elif (error := task.exception()) is None:
                self._durable(block)
            else:
                self.abandon()
                if not isinstance(error, TidewalError):
                    raise error
                self._ended(error)
        if not self._inflight:
            self._idle.set()
