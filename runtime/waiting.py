"""Waiting for one of several tasks, for all of them, and for their ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first of `waits` has ended, and cancel the others. Raises what it raised."""
    async with begun(*waits) as tasks:
        await first_ended(tasks)


async def first_ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Return when one of the tasks has ended. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


@asynccontextmanager
async def begun(*waits: Coroutine[Any, Any, object]) -> AsyncGenerator[list[asyncio.Task[Any]]]:
    """The tasks of `waits`, which see what happens from now on; the end of the context ends them. Each is a task at
    once: a coroutine that holds others, and is cancelled before its first step, would leave these without an end."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        yield tasks
    finally:
        await ended(*tasks)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(future: asyncio.Future[T]) -> T:
    """The result of `future`, which goes on where the caller is cancelled: that is raised when it has ended."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


async def side_by_side(items: Iterable[T], call: Callable[[T], Awaitable[object]], at_once: int = 32) -> None:
    """Await `call` for each of the items, begun in their order, up to `at_once` of them at a time: a log makes durable
    together what it is told meanwhile. Where one raises, or the caller is cancelled, the others are ended first."""
    calls = list(items)
    waiting = iter(calls)

    async def work() -> None:
        for item in waiting:
            await call(item)

    async with begun(*(work() for _ in calls[:at_once])) as tasks:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
