"""The checkpoints of the log in the store: find the newest one, take it over, and make another.

A checkpoint decides nothing: it says what the blocks before its place have come to, which stays true whoever owns the
log. They are numbered from 1 on, and the oldest are deleted first, so those that are there follow each other without a
gap: from any one of them the newest is found in a few steps. `hint` names one; it may be old, or missing.
"""

from __future__ import annotations

from contextlib import suppress

from .checkpoint import HEADER_BYTES, decode_checkpoint, encode_checkpoint, place_of
from .log_objects import LogObjects
from .log_state import LogState

HINT = "hint"
FOLDER = "checkpoint/"


def checkpoint_key(number: int) -> str:
    """Where a checkpoint lies."""
    return f"{FOLDER}{number:016x}"


class Checkpoints:
    """The checkpoints of one log, for one process. All coroutines raise `Unavailable`."""

    def __init__(self, objects: LogObjects, state: LogState) -> None:
        self._objects, self._state = objects, state
        self.newest: int = 0  # the number of the newest one that is known
        self.size: int = 0  # of that one, in bytes

    async def load(self) -> bool:
        """Have the state of the newest checkpoint, where that is later. Raises `CorruptLog` and `FormatTooNew`."""
        while (number := await self._find_newest()) > self.newest:
            key = checkpoint_key(number)
            data = await self._objects.store.get(key)
            if data is None:
                continue  # another one has taken its place meanwhile
            later = place_of(data, key, self._objects.log) > self._state.place
            if later:
                self._state.become(decode_checkpoint(data, key, self._objects.log))
            self.newest, self.size = number, len(data)
            return later
        return False

    async def _find_newest(self) -> int:
        known = max(self.newest, await self._hinted())
        if not known or not await self._is_there(known):
            known = await self._newest_listed()
        step = 1
        while known and await self._is_there(known + step):
            known, step = known + step, 2 * step
        while step > 1:  # `known` is there, and what lies `step` further is not
            step //= 2
            if await self._is_there(known + step):
                known += step
        return known

    async def _hinted(self) -> int:
        """The number that the hint names, 0 for none."""
        found = await self._objects.store.get(HINT) or b""
        with suppress(ValueError):
            return int(found, 16)
        return 0

    async def _newest_listed(self) -> int:
        """The newest one, where there is no hint, or one of a checkpoint that is gone."""
        keys = [key async for key in self._objects.store.list(FOLDER)]
        return max((int(key.removeprefix(FOLDER), 16) for key in keys), default=0)

    async def _is_there(self, number: int) -> bool:
        return await self._objects.store.get(checkpoint_key(number), 0, HEADER_BYTES) is not None

    async def put_hint(self) -> None:
        """Let others find the newest one that this process knows by one request."""
        await self._objects.store.put(HINT, b"%016x" % self.newest)

    async def make(self) -> None:
        """Make a checkpoint of the state. It goes behind those of other processes, unless one of them is later."""
        state, place = self._state, self._state.place
        data = encode_checkpoint(self._objects.log, self._objects.writer, state)
        blocks, bytes_ = state.blocks, state.bytes
        while True:
            key = checkpoint_key(self.newest + 1)
            other = await self._objects.create(key, data, HEADER_BYTES)
            if other is not None and place_of(other, key, self._objects.log) > place:
                return  # this process owns the log no more
            self.newest += 1
            if other is None:
                break
        self.size = len(data)
        state.blocks, state.bytes = state.blocks - blocks, state.bytes - bytes_
        await self.put_hint()
