"""Ask again while the node refuses for a moment, as it does on a machine too busy to renew a lease in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from ...runtime.errors import Overloaded, Unavailable

PATIENCE_S = 60.0
PAUSE_S = 0.2

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def patiently(
    ask: Callable[Parameters, Awaitable[Result]], *arguments: Parameters.args, **options: Parameters.kwargs
) -> Result:
    """The answer of `ask(*arguments, **options)`, which may be asked twice without harm. Raises what it raised last,
    when it has been refused for `PATIENCE_S`, and any other error at once."""
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await ask(*arguments, **options)
        except (Overloaded, Unavailable):
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(PAUSE_S)
