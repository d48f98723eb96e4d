"""How many attempts of a write have come to nothing: `FailedAttempts`."""

from __future__ import annotations

REMEMBERED = 4_096  # writes; of more, the oldest were given up or are long written


class FailedAttempts:
    """The counts of the writes (producer, pseq) that had any lately."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, write: tuple[str, int]) -> None:
        """One more has come to nothing."""
        self._counts[write] = self._counts.pop(write, 0) + 1
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]

    def forget(self, write: tuple[str, int]) -> None:
        """It is written."""
        self._counts.pop(write, None)

    def doubled_s(self, write: tuple[str, int], first_s: float, longest_s: float) -> float:
        """`first_s` seconds, doubled for each attempt that has come to nothing, and at most `longest_s`."""
        return min(longest_s, first_s * 2.0 ** min(self._counts.get(write, 0), 16))
