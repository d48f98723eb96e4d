"""What happens when an actor crashes: restart after a pause, and giving up when restarts do not help."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from ..arguments import checked_fields


@checked_fields()
@dataclass(frozen=True, slots=True)
class Supervision:
    """How often an actor is restarted, and how long the pauses are.

    The n-th crash inside `window_s` is followed by a pause of `backoff_s * factor ** (n - 1)`, at most `backoff_max_s`,
    shortened by up to `jitter` of itself. More than `restarts` crashes inside the window: the actor gives up, and the
    system reports it as `failed`.
    """

    restarts: int = 5
    window_s: float = 60.0
    backoff_s: float = 0.1
    backoff_factor: float = 2.0
    backoff_max_s: float = 10.0
    jitter: float = 0.25


NEVER_RESTART = Supervision(restarts=0)


class Intensity:
    """The crashes of one actor, counted in a sliding window."""

    def __init__(self, supervision: Supervision, seed: random.Random) -> None:
        self.supervision = supervision
        self._random = seed
        self._crashes: deque[float] = deque()

    def pause_after_crash(self, now_s: float) -> float | None:
        """Count a crash at `now_s`; return the pause before the restart in seconds, or None to give up."""
        rule = self.supervision
        self._crashes.append(now_s)
        while self._crashes[0] <= now_s - rule.window_s:
            self._crashes.popleft()
        if len(self._crashes) > rule.restarts:
            return None
        pause_s = min(rule.backoff_s * rule.backoff_factor ** (len(self._crashes) - 1), rule.backoff_max_s)
        return pause_s * (1 - rule.jitter * self._random.random())
