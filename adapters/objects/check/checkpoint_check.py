"""The checkpoints of a log, against the blocks before their places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ....runtime.errors import CorruptLog
from ..checkpoint import HEADER_BYTES, decode_checkpoint, place_of
from ..checkpoints import FOLDER
from ..log_objects import LogObjects
from ..log_state import LogState
from .findings import PartReport
from .state_check import order_faults, state_differences


class CheckpointCheck:
    """Checks the checkpoints one after another, while the blocks are applied to a state. All coroutines raise
    `FormatTooNew` and `Unavailable`."""

    def __init__(self, objects: LogObjects, state: LogState, read: Callable[[LogState], None]) -> None:
        """`state` is that of the blocks so far. Where some of them are not there any more it becomes that of a
        checkpoint; `read` is called with each that can be read."""
        self._objects, self._state, self._read = objects, state, read
        self.report: PartReport = PartReport("checkpoints")
        self.newest: LogState = LogState()  # of the newest that can be read
        self._coming: list[tuple[tuple[int, int], str]] = []  # places and keys, the next one last
        self._kept: dict[str, bytes] = {}  # read by `look`: those from the newest that can be read on

    async def look(self) -> None:
        """Find those that there are."""
        keys = sorted([key async for key in self._objects.store.list(FOLDER)])
        found: list[tuple[tuple[int, int], str]] = []
        for key in keys:
            header = await self._objects.store.get(key, 0, HEADER_BYTES)
            if header is None:
                self.report.gone += 1
                continue
            try:
                place = place_of(header, key, self._objects.log)
            except CorruptLog as error:
                self.report.found(key, error.message)
                continue
            if found and place < found[-1][0]:
                self.report.found(key, f"it is of an earlier place than {found[-1][1]}")
            found.append((place, key))
        self._coming = sorted(found, reverse=True)
        for _, key in reversed(found):
            data = await self._objects.store.get(key)
            if data is not None:
                self._kept[key] = data  # an owner may delete it before its turn comes
                with suppress(CorruptLog):
                    self.newest = decode_checkpoint(data, key, self._objects.log)
                    break

    async def upto(self, place: tuple[int, int]) -> None:
        """Check those up to a place, before which no block is left to apply."""
        while self._coming and self._coming[-1][0] <= place:
            _, key = self._coming.pop()
            found = await self._load(key)
            if found is None:
                continue
            self._read(found)
            for fault in (each for channel in found.channels() for each in order_faults(channel)):
                self.report.found(key, fault)
            if found.place == self._state.place:
                for difference in state_differences(found, self._state):
                    self.report.found(key, difference)
            elif found.place > self._state.place:
                self._state.become(found)

    async def _load(self, key: str) -> LogState | None:
        """The state of a checkpoint, None where it is damaged or gone."""
        data = self._kept.pop(key, None) or await self._objects.store.get(key)
        if data is None:
            self.report.gone += 1
            return None
        self.report.objects += 1
        self.report.bytes += len(data)
        try:
            return decode_checkpoint(data, key, self._objects.log)
        except CorruptLog as error:
            self.report.found(key, error.message)
            return None
