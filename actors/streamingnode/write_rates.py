"""How much is written to the channels of an owner: what the leader weighs when it assigns them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ...runtime.clock import Clock

SMOOTHED_S = 10.0  # after which a rate that has changed is 63 % of the way


class WriteRates:
    """Bytes a second by channel, smoothed, from what `written` says is written by now. It may fall: under a new term a
    channel begins at 0 again."""

    def __init__(self, written: Callable[[], Mapping[str, int]], clock: Clock) -> None:
        self._written, self._clock = written, clock
        self._at_s = clock.monotonic()
        self._before: Mapping[str, int] = {}
        self._rates: dict[str, float] = {}

    def __call__(self) -> Mapping[str, int]:
        """The rates now, of what was written since the last call; those below 1 are left out."""
        now_s, written = self._clock.monotonic(), self._written()
        passed_s = now_s - self._at_s
        if passed_s > 0:
            part = 1 - math.exp(-passed_s / SMOOTHED_S)
            rates: dict[str, float] = {}
            for name, bytes in written.items():
                since = max(0, bytes - self._before.get(name, 0)) / passed_s
                rate = self._rates.get(name, 0.0)
                rates[name] = rate + part * (since - rate)
            self._at_s, self._before, self._rates = now_s, written, rates
        return {name: round(rate) for name, rate in self._rates.items() if rate >= 1}
