"""The lease of an owner: for how long no other node can own its channels."""

from __future__ import annotations

from ..clock import Clock

LEASE_S = 10.0
LEASE_MS = int(LEASE_S * 1000)


class Lease:
    """Holds for `lease_s` seconds after the moment at which its last renewal was *asked for*, by a clock that never
    goes back and counts the time that a machine is suspended. The wall clock does not matter.

    A renewal counts once it was read back from the log, with nothing before it there that ends the lease. Whoever may
    take what rests on the lease counts from a later moment: from when it read that renewal itself."""

    def __init__(self, clock: Clock, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._ends_s = float("-inf")

    def renew(self, asked_s: float) -> None:
        """Extend the lease: the renewal that was asked for at `asked_s`, by the clock's `monotonic`, was granted."""
        self._ends_s = max(self._ends_s, asked_s + self._lease_s)

    def holds(self) -> bool:
        """Whether the owner may acknowledge and promise. Callable from any thread."""
        return self._clock.monotonic() <= self._ends_s
