"""Deadlines of calls, as times of the event loop."""

from __future__ import annotations

import asyncio


def in_s(seconds: float) -> float:
    """The loop's time in so many seconds."""
    return asyncio.get_running_loop().time() + seconds


def left_s(until: float) -> float:
    """The seconds that are left until a time of the loop, 0 when it is over."""
    return max(0.0, until - asyncio.get_running_loop().time())
