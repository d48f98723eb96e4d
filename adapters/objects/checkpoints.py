"""The checkpoints of the log in the store: find the newest one, take it over, and make another.

A checkpoint decides nothing: it is what the blocks before its place have come to, which stays true under another owner.
So it needs no fence, and one that arrives late or is seen late is only an older one.
"""

from __future__ import annotations

from .checkpoint import HEADER_BYTES, decode_checkpoint, encode_checkpoint, place_of
from .log_objects import LogObjects
from .log_state import LogState

FOLDER = "checkpoint/"


def checkpoint_key(number: int) -> str:
    """Where a checkpoint lies."""
    return f"{FOLDER}{number:016x}"


class Checkpoints:
    """The checkpoints of one log, for one process. All coroutines raise `Unavailable`."""

    def __init__(self, objects: LogObjects, state: LogState) -> None:
        self._objects, self._state = objects, state
        self.newest: int = 0  # the number of the newest one that is known; they count from 1
        self.place: tuple[int, int] = (1, 0)  # of that one: where a process that opens the log begins to read blocks
        self.size: int = 0  # of that one, in bytes

    async def listed(self) -> list[int]:
        """The numbers of those that are there, ascending."""
        keys = [key async for key in self._objects.store.list(FOLDER)]
        return sorted(int(key.removeprefix(FOLDER), 16) for key in keys)

    async def load(self) -> bool:
        """Have the state of the newest checkpoint, where that is later. Raises `CorruptLog` and `FormatTooNew`."""
        while (number := max(await self.listed(), default=0)) > self.newest:
            key = checkpoint_key(number)
            data = await self._objects.store.get(key)
            if data is None:
                continue  # it was deleted meanwhile, so there is a newer one
            place = place_of(data, key, self._objects.log)
            later = place > self._state.place
            if later:
                self._state.become(decode_checkpoint(data, key, self._objects.log))
            self.newest, self.place, self.size = number, place, len(data)
            return later
        return False

    async def make(self) -> None:
        """Make a checkpoint of the state. It goes behind those of other processes, unless one of them is later."""
        if await self._overtaken():
            return
        state, place = self._state, self._state.place
        data = encode_checkpoint(self._objects.log, self._objects.writer, state)
        blocks, bytes_ = state.blocks, state.bytes
        other = b""
        while other is not None:
            key = checkpoint_key(self.newest + 1)
            other = await self._objects.create(key, data, HEADER_BYTES)
            if other is not None and place_of(other, key, self._objects.log) > place:
                return  # this process owns the log no more
            self.newest += 1
        self.place, self.size = place, len(data)
        state.blocks, state.bytes = state.blocks - blocks, state.bytes - bytes_

    async def _overtaken(self) -> bool:
        """Whether another process has made a later one, so that this process owns the log no more. Others may also have
        made some and deleted those behind the newest that is known here: in one of their places none would be found."""
        number = max(await self.listed(), default=0)
        if number <= self.newest:
            return False
        key = checkpoint_key(number)
        header = await self._objects.store.get(key, 0, HEADER_BYTES)
        if header is None or place_of(header, key, self._objects.log) > self._state.place:
            return True
        self.newest = number
        return False
