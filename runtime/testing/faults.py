"""Faults and their times, drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """What happens to one append."""

    NONE = "none"
    DROP = "drop"  # acknowledged by an ephemeral channel and never delivered; a durable one has no such fault
    FAIL = "fail"  # certainly not written, reported as an error
    UNKNOWN = "unknown"  # written, but reported as an error of unknown outcome
    LOST = "lost"  # never written, and reported as an error of unknown outcome
    DELAY = "delay"  # written and acknowledged later
    DUPLICATE = "duplicate"  # an ephemeral message delivered twice


_DURABLE = (Fault.FAIL, Fault.UNKNOWN, Fault.LOST, Fault.DELAY)
_EPHEMERAL = (Fault.DROP, Fault.DELAY, Fault.DUPLICATE)


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities per append, each 0-1. Those of faults that a channel cannot have are ignored for it."""

    drop: float = 0.0
    fail: float = 0.0
    unknown: float = 0.0
    lost: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    delay_s_max: float = 0.05
    crash: float = 0.0


class FaultPlan:
    """Seeded faults for a memory WAL and for actors. `trace` lists what was decided, for comparing runs."""

    def __init__(self, seed: int = 0, rates: Rates | None = None, *, channels: str = "") -> None:
        """Faults have the probabilities `rates`, and hit only channels whose name contains `channels`."""
        self.seed = seed
        self.rates: Rates = rates or Rates()
        self.trace: list[str] = []
        self._channels = channels
        self._random = random.Random(seed)

    def decide(self, channel: str, *, ephemeral: bool) -> Fault:
        """The fault of the next append to `channel`."""
        if self._channels not in channel:
            return Fault.NONE
        draw = self._random.random()
        for fault in _EPHEMERAL if ephemeral else _DURABLE:
            draw -= getattr(self.rates, fault.value)
            if draw < 0:
                self.trace.append(f"{channel}:{fault.value}")
                return fault
        return Fault.NONE

    def delay_s(self) -> float:
        """How long a delayed append takes."""
        return self._random.uniform(0, self.rates.delay_s_max)

    def crashes(self, actor: str) -> bool:
        """Whether `actor` is to crash now; ask it once per handled message."""
        crash = self._random.random() < self.rates.crash
        if crash:
            self.trace.append(f"{actor}:crash")
        return crash
