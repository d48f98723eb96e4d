"""Retrying after retryable errors, up to a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ...runtime.errors import DeadlineExceeded, TidewalError

T = TypeVar("T")

PAUSE_S: Final = 0.2
LATE_S: Final = 1.0  # for an append of unknown outcome to show up before it is searched


async def retry_until(
    work: Callable[[], Awaitable[T]], what: str, deadline_s: float, progress: Callable[[], object] = lambda: None
) -> T:
    """The result of `work`, which is called again after each retryable error, for at least `deadline_s` seconds without
    progress: the deadline begins anew whenever `progress()` has changed. `what` names the work in errors.

    Raises `DeadlineExceeded` after that, and errors that are not retryable at once."""
    loop = asyncio.get_running_loop()
    reached, deadline = progress(), loop.time() + deadline_s
    while True:
        try:
            return await work()
        except TidewalError as error:
            if not error.retryable:
                raise
            if progress() != reached:
                reached, deadline = progress(), loop.time() + deadline_s
            if loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"{what} could not be written within {deadline_s:g} s ({error.message}). It is written once "
                    "however often it is tried: start the query again, or give it longer with option deadline"
                ) from error
            await asyncio.sleep(LATE_S if error.fields.get("outcome_unknown") else PAUSE_S)
