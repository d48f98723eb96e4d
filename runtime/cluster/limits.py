"""How far the owner of a channel may stamp: up to a limit in the catalog, which its successor must pass."""

from __future__ import annotations

from typing import NamedTuple

from ..catalog.rising_limit import RisingLimit
from ..clock import HybridClock, add_ms, compose, monotonic_ms, physical_ms

LIMIT_MS = 10_000  # how far ahead an owner's limit lies
FAR_MS = 660_000  # how much further the limit lies that the catalog has of an owner whose own rises with time
NEAR_MS = 60_000  # before its own gets there, the owner stores another one


def timestamp_limit(wall_ms: int, last: int, ahead_ms: int) -> int:
    """The limit for an owner that has the wall clock `wall_ms`, and must stamp above `last`.

    It is `ahead_ms` ahead of the wall clock. Timestamps are further ahead than half of that where another node's clock
    is, which they follow, or where the owner began behind the limit of one that used little of it. Then the limit is
    half of `ahead_ms` ahead of them: more than they advance until it is raised the next time; and owners that fail one
    after another carry them no further ahead, unless each lives for less than that."""
    return max(add_ms(compose(wall_ms), ahead_ms), add_ms(last, ahead_ms // 2))


class StoredLimit(NamedTuple):
    """What the catalog is to have of an owner: the limit, and how far the owner uses it, unless at once."""

    limit: int
    rising: RisingLimit | None

    @property
    def usable(self) -> int:
        """Up to where the owner may stamp as soon as this is stored."""
        return self.limit if self.rising is None else self.rising.limit


class OwnerLimits:
    """How far the channels of a node may be stamped, and what the catalog must have of that.

    Where the successor is on the same machine (`rises`) the catalog has a limit that lies minutes ahead, and how the
    one that the owner keeps to rises with the machine's time. Then nothing need be stored until these minutes have
    passed, unless the wall clock is set. A successor on the same boot passes what that limit had risen to by then, one
    after a reboot all that is stored.

    In any order in which the records of an owner count, each allows what those before it did: `proposed` begins at
    or above all that is `allowed`, and until it is `confirmed` nothing else rises. Where timestamps are ahead of the
    wall clock, a limit that rises would carry them on, and each one is stored as it is."""

    def __init__(self, clock: HybridClock, *, rises: bool) -> None:
        self._clock = clock
        self._boot = clock.clock.boot() if rises else ""
        self._allowed = 0  # the highest limit that any channel has
        self._stored: StoredLimit | None = None  # the present one; None where that is not known

    def allow(self, limit: int) -> None:
        """A channel has this limit by its grant."""
        self._allowed = max(self._allowed, limit)

    def needed(self) -> int:
        """The limit that the owner needs by its clock."""
        return timestamp_limit(self._clock.clock.wall_ms(), self._clock.last, LIMIT_MS)

    def propose(self) -> StoredLimit:
        """What to store next. Nothing rises until it is confirmed: it may come into the catalog at any time."""
        self._stored = None
        limit, ahead = self.needed(), add_ms(compose(self._clock.clock.wall_ms()), LIMIT_MS)
        if not self._boot or max(limit, self._allowed) > ahead:
            return StoredLimit(limit, None)
        return StoredLimit(add_ms(limit, FAR_MS), RisingLimit(self._boot, monotonic_ms(self._clock.clock), limit))

    def confirm(self, stored: StoredLimit) -> None:
        """The catalog has it, and nothing behind it."""
        self._stored = stored
        self.allow(stored.usable)

    def risen(self) -> int | None:
        """How far the owner may stamp by what is stored; None where it must store another limit: the present one is
        used up, or the wall clock has gone away from it."""
        if self._stored is None or self._stored.rising is None:
            return None
        limit = self._stored.rising.at(self._boot, monotonic_ms(self._clock.clock))
        if limit is None or add_ms(limit, NEAR_MS) > self._stored.limit:
            return None
        if abs(physical_ms(limit) - physical_ms(self.needed())) > LIMIT_MS // 2:
            return None
        self.allow(limit)
        return limit
