"""A bounded number of packs, or of deliveries, for scripts, notebooks and tests that do not read for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import TypeVar

from ..arguments import checked
from ..errors import InvalidRequest

T = TypeVar("T")


@checked
async def take(source: AsyncIterable[T], count: int | None = None, *, timeout_s: float | None = None) -> list[T]:
    """The next `count` items of `source`, or those that came within `timeout_s` seconds: what comes first, and fewer
    where the source ends.

    `source` is a stream (its items are packs), a member of a group (deliveries, which are yours to acknowledge) or any
    other async iterable. No item is lost: a stream or a member goes on behind the last one that was returned. An async
    generator, such as that of `wal.read`, has ended after a timeout.

    Raises what the source raises; the items before that are lost to the caller. `InvalidRequest` without a bound, for
    one below 0, and for a source that cannot be iterated.
    """
    if count is None and timeout_s is None:
        raise InvalidRequest("take needs a bound: count, timeout_s or both")
    if (count or 0) < 0 or (timeout_s or 0.0) < 0:
        raise InvalidRequest(f"take needs bounds of 0 or more, not count={count}, timeout_s={timeout_s}")
    if not isinstance(source, AsyncIterable):  # pyright: ignore[reportUnnecessaryIsInstance] -- users are not type-checked
        raise InvalidRequest(f"take reads a stream, a member of a group or another async iterable, not {source!r}")
    taken: list[T] = []
    items, limit = aiter(source), asyncio.timeout(timeout_s)
    try:
        async with limit:
            while count is None or len(taken) < count:
                taken.append(await anext(items))
    except StopAsyncIteration:
        pass
    except TimeoutError:
        if not limit.expired():  # the source's own
            raise
    return taken
