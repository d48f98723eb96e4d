"""Processes over one simulated store, in virtual time: each an open log with a store of its own over shared objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.adapters.objects.simulated_store import Objects, SimulatedStore, StoreRates
from tidewal.adapters.objects.group_positions import LoopTime
from tidewal.adapters.objects.pace import PACE, MaintenancePace
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal
from tidewal.runtime.testing.clock import elapse, run_virtual

LEASE_S = 15.0
QUICK = MaintenancePace(  # for logs of some entries
    turn_s=1, checkpoint_blocks=20, run_blocks=15, run_bytes=2000, section_bytes=300, grace_s=60
)
SETTINGS = ObjectsSettings(linger_ms=5, lease_s=LEASE_S)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as a function that runs it in virtual time, and closes its processes."""

    def run(processes: Processes, **arguments: Any) -> None:
        async def main() -> None:
            await test(processes, **arguments)
            await processes.close()

        run_virtual(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class Process:
    """One process: its store, through which it may be stopped, and its log."""

    def __init__(self, wal: ObjectWal, store: SimulatedStore) -> None:
        self.wal, self.store = wal, store


class Processes:
    """Opens the same log again and again."""

    def __init__(
        self, rates: StoreRates | None = None, settings: ObjectsSettings = SETTINGS, pace: MaintenancePace = PACE
    ) -> None:
        self.objects = Objects()
        self.opened: list[Process] = []
        self._rates, self._settings, self._pace = rates, settings, pace

    async def open(self, seed: int = 0, *, in_use_only: bool = True) -> Process:
        """Another process that has the log open."""
        process = self._new(seed, in_use_only)
        await process.wal.open()
        return process

    async def open_to_own(self) -> Process:
        """Another process that owns the log, or writes nothing."""
        process = self._new(0)
        await process.wal.open(own=True)
        return process

    def _new(self, seed: int, in_use_only: bool = True) -> Process:
        store = SimulatedStore(self.objects, seed, self._rates)
        wal = ObjectWal(
            "simulated://", store, self._settings, clock=LoopTime(), pace=self._pace, in_use_only=in_use_only
        )
        process = Process(wal, store)
        self.opened.append(process)
        return process

    async def owner(self, *channels: str) -> Process:
        """Another process that owns the log, which has these channels."""
        process = await self.open()
        for channel in channels:
            await process.wal.create_channel(channel, ChannelPolicy())
        return process

    async def close(self) -> None:
        """Close all; what was stopped goes on."""
        for process in self.opened:
            process.store.go_on()
            process.store.down = False
            await process.wal.close()

    def kill(self, process: Process) -> None:
        """End it without a word: what it has sent may still arrive."""
        process.store.stop()
        self.opened.remove(process)

    def blocks(self, epoch: int) -> list[int]:
        """The numbers of the blocks of an epoch that are there."""
        prefix = f"l0/{epoch:016x}/"
        return sorted(int(key.removeprefix(prefix), 16) for key in self.objects.bodies if key.startswith(prefix))


async def until_owned(process: Process, channel: str) -> bytes:
    """Append to the channel as soon as the process may."""
    while True:
        try:
            return await process.wal.append(channel, b"successor")
        except Unavailable:
            await elapse(1)


async def entries_of(wal: Wal, channel: str, count: int) -> list[bytes]:
    """The payloads of the first entries."""
    found: list[bytes] = []
    reader = wal.read(channel, From.EARLIEST)
    while len(found) < count:
        found += [bytes(entry.payload) for entry in await anext(reader)]
    return found


async def appended(wal: Wal, channel: str, payloads: Iterable[bytes]) -> list[bytes | BaseException]:
    """The ids of payloads that are appended at once, each by itself, or the errors."""
    results = await asyncio.gather(*(wal.append(channel, each) for each in payloads), return_exceptions=True)
    return list(results)
