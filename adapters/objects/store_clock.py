"""The time of the store, by which the ages of entries and of garbage count: owners on several machines share it."""

from __future__ import annotations

from ...runtime.clock import Clock
from .checkpoints import HINT, Checkpoints
from .log_objects import LogObjects


class StoreClock:
    """The store's clock, as far as this process knows it."""

    def __init__(self, objects: LogObjects, checkpoints: Checkpoints, clock: Clock) -> None:
        self._objects, self._checkpoints, self._clock = objects, checkpoints, clock
        self._ahead_ms = 0  # of `clock`'s monotonic time

    async def read(self) -> None:
        """Learn the time, from an object that is put for it. Raises `Unavailable`."""
        await self._checkpoints.put_hint()
        modified = await self._objects.store.modified(HINT)
        if modified is not None:
            self._ahead_ms = modified - self._monotonic_ms()

    def now_ms(self) -> int:
        """The present time, once it was read, in ms since 1970."""
        return self._ahead_ms + self._monotonic_ms()

    def _monotonic_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
