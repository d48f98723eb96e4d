"""Retry while the node refuses for a moment, as it does on a machine too busy to renew a lease in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from tidewal import errors

RETRY_S = 60.0
PAUSE_S = 0.2

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def retry_until(
    ask: Callable[Parameters, Awaitable[Result]], *arguments: Parameters.args, **options: Parameters.kwargs
) -> Result:
    """The result of `ask(*arguments, **options)`, which must be harmless to repeat: it is called again after
    `Overloaded` and `Unavailable`, whose last one is raised after `RETRY_S` seconds. Raises any other error at once."""
    end = asyncio.get_running_loop().time() + RETRY_S
    while True:
        try:
            return await ask(*arguments, **options)
        except (errors.Overloaded, errors.Unavailable):
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(PAUSE_S)
