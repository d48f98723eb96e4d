"""How the models of groups and of keyed state end: without faults, at the end of all channels, all members gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from tidewal.runtime.log.wal import Wal

Pause = Callable[[float], Awaitable[None]]


class WindingDown(Protocol):
    """A worker that has one member after the other, until it is `over`. It makes no more trouble once it is `calm`."""

    calm: bool
    over: bool
    running: asyncio.Task[None]

    async def leave(self) -> None: ...


async def wind_down(wal: Wal, workers: Sequence[WindingDown], last: Mapping[str, bytes], pause: Pause) -> None:
    """Let the workers of group `g` come to the `last` ids of its channels, undisturbed, and then leave. `wal` has its
    faults until then, where it has any. Raises what a worker ends with before."""
    for worker in workers:
        worker.calm = True
    if hasattr(wal, "faults"):
        wal.faults = None  # pyright: ignore[reportAttributeAccessIssue] -- of MemoryWal
    while not await _at(wal, last):
        for worker in workers:
            if worker.running.done():
                await worker.running
        await pause(0.2)
    for worker in workers:  # not before: all members may have left just now, and none would read what is left
        worker.over = True
    while not all(worker.running.done() for worker in workers):  # one may just be joining
        for worker in workers:
            await worker.leave()
        await pause(0.1)
    await asyncio.gather(*(worker.running for worker in workers))


async def _at(wal: Wal, last: Mapping[str, bytes]) -> bool:
    positions = {info.name: info.positions for info in await wal.groups()}.get("g", {})
    return all((positions.get(channel) or b"") >= id for channel, id in last.items())
