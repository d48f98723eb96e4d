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

    async def find_newest(self) -> list[int]:
        """Know the newest one, also where others made it since this process loaded one, and those between were deleted:
        in one of their places a checkpoint would not be found. Returns the numbers of the older ones."""
        listed = await self.listed()
        self.newest = max([self.newest, *listed])
        return [number for number in listed if number < self.newest]

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
