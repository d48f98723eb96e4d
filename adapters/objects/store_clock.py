"""The time of the store, by which the ages of entries and of garbage count: owners on several machines share it."""

from __future__ import annotations

from ...runtime.clock import Clock, monotonic_ms


class StoreClock:
    """The store's clock, as far as this process knows it: an owner learns it from its claim, and goes on by its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms = 0  # of the clock's monotonic time

    def set(self, now_ms: int) -> None:
        """It is so late, in ms since 1970."""
        self._ahead_ms = now_ms - monotonic_ms(self._clock)

    def now_ms(self) -> int:
        """The present time, in ms since 1970, once it was set."""
        return self._ahead_ms + monotonic_ms(self._clock)
