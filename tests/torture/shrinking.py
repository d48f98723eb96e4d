"""Make a list of faults shorter while it still leads to a violation."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from .faults import Fault

Fails = Callable[[Sequence[Fault]], Awaitable[bool]]

REPETITIONS = 5


async def repeat(faults: Sequence[Fault], fails: Fails, deadline: float) -> tuple[int, int]:
    """How often the whole list fails again, of how many tries: five, or fewer where the time ends before."""
    failed = tries = 0
    while tries < REPETITIONS and time.monotonic() < deadline:
        tries += 1
        failed += await fails(faults)
    return failed, tries


async def shrink(faults: Sequence[Fault], fails: Fails, deadline: float) -> list[Fault]:
    """Leave out halves, quarters and so on, then single faults, for as long as what remains fails, until `deadline` (of
    the monotonic clock). What `fails` says may be chance, so a list that passes once may be one that fails: the result
    is a list that has failed, not the shortest."""
    shortest = list(faults)
    size = len(shortest) // 2
    while size and time.monotonic() < deadline:
        at = 0
        while at < len(shortest) and time.monotonic() < deadline:
            without = shortest[:at] + shortest[at + size :]
            if without and await fails(without):
                shortest = without
            else:
                at += size
        size //= 2
    return shortest
