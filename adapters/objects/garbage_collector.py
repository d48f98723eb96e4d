"""Delete what the log needs no more, once it was so for the grace time.

Only an owner does. What is garbage by the part of the log that it knows is garbage for ever, so an owner that was
deposed, and does not know it yet, does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from .checkpoints import checkpoint_key
from .log_objects import block_key, place_of_block, run_key
from .open_log import OpenLog

BLOCKS: Final = "l0/"
RUNS: Final = "run/"
AT_ONCE: Final = 32  # objects that are deleted together


class GarbageCollector:
    """The garbage of one log, for its owner. All coroutines raise `Unavailable`."""

    def __init__(self, log: OpenLog) -> None:
        self._objects, self._state, self._checkpoints, self._time = log.objects, log.state, log.checkpoints, log.time
        self._grace_ms = int(log.pace.grace_s * 1000)
        self._noted_before = 1  # the number before which checkpoints are noted
        self._runs: set[str] = set()  # those that had entries when it was last looked

    async def survey(self) -> None:
        """Note what earlier owners have left behind without noting it. A run of this epoch may be about to be named."""
        *older, newest = await self._checkpoints.listed() or [1]
        self._note(map(checkpoint_key, older))
        self._noted_before = max(self._noted_before, newest)
        live, mine = self._live(), run_key(self._state.epoch, 0)
        self._note([key async for key in self._objects.store.list(RUNS) if key < mine and key not in live])

    def _live(self) -> set[str]:
        """The keys of the objects that have entries."""
        return {section.key for channel in self._state.channels() for section in channel.sections}

    def note(self) -> None:
        """Note what is garbage from now on: the checkpoints before the newest, of the blocks before that one those up
        to the first with entries, and the runs that have none any more."""
        live = self._live()
        first = min((key for key in live if key.startswith(BLOCKS)), default=None)
        needed = self._checkpoints.place
        if first is not None:
            needed = min(needed, place_of_block(first))
        garbage, newest = self._state.garbage, self._checkpoints.newest
        if needed > (garbage.blocks[-1][1] if garbage.blocks else garbage.deleted_to):
            garbage.blocks.append((self._time.now_ms(), needed))
        self._note(map(checkpoint_key, range(self._noted_before, newest)))
        self._noted_before = max(self._noted_before, newest)
        self._note(sorted(self._runs - live))
        self._runs = {key for key in live if key.startswith(RUNS)}

    def _note(self, keys: Iterable[str]) -> None:
        now_ms = self._time.now_ms()
        for key in keys:
            self._state.garbage.objects.setdefault(key, now_ms)

    async def delete(self) -> None:
        """Delete what was garbage for the grace time."""
        garbage, due_ms = self._state.garbage, self._time.now_ms() - self._grace_ms
        while garbage.blocks and garbage.blocks[0][0] <= due_ms:
            await self._delete_blocks(garbage.blocks[0][1])
            del garbage.blocks[0]
        due = [key for key, since_ms in garbage.objects.items() if since_ms <= due_ms]
        await self._delete_all(due)
        for key in due:
            del garbage.objects[key]

    async def _delete_blocks(self, place: tuple[int, int]) -> None:
        """Delete the blocks before a place. The end of an epoch stays: it keeps a late owner out."""
        garbage = self._state.garbage
        while garbage.deleted_to < place:
            epoch, number = garbage.deleted_to
            if epoch == place[0]:
                await self._delete_all([block_key(epoch, each) for each in range(number, place[1])])
                garbage.deleted_to = place
            else:
                end = block_key(epoch, self._state.ends[epoch])
                listed = [key async for key in self._objects.store.list(f"{BLOCKS}{epoch:016x}/")]
                await self._delete_all([key for key in listed if key != end])  # also what lies behind the end
                garbage.deleted_to = (epoch + 1, 0)

    async def _delete_all(self, keys: Sequence[str]) -> None:
        for at in range(0, len(keys), AT_ONCE):
            await asyncio.gather(*map(self._objects.store.delete, keys[at : at + AT_ONCE]))
