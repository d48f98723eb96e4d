"""A process of a simulated log: the log open in it, and its clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from tests.adapters.objects.simulated_store import SimulatedStore, StoreRates
from tidewal.adapters.objects.group_positions import LoopTime
from tidewal.adapters.objects.pace import MaintenancePace
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.errors import ChannelNotFound, Closed, Fenced, PositionLost, TidewalError, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId
from tidewal.runtime.testing.simulation.process import SimulatedProcess

from .history import Appended, Held, LogHistory, Reading, StrongRead
from .true_log import ArchivedObjects

LEASE_S = 4.0
GRACE_S = 16.0
SETTINGS = ObjectsSettings(lease_s=LEASE_S, linger_ms=20, delivery_timeout_s=8, poll_s=0.5, block_bytes=400)
PACE = MaintenancePace(
    turn_s=1, checkpoint_blocks=30, run_blocks=10, run_bytes=1500, section_bytes=300, grace_s=GRACE_S
)
POLICIES = {
    "kept": ChannelPolicy(),
    "cut": ChannelPolicy(),  # it is truncated and held
    "aged": ChannelPolicy(retention_s=20),
    "brief": ChannelPolicy(),  # it is dropped and created again
}
CHANNELS = tuple(POLICIES)


class LogProcess:
    """One process: it opens the log, and its clients write to it, read it and manage it, with pauses that are drawn
    from `seed`, until it is killed or closed. Once it is not `active` they write nothing, and read on to the end."""

    def __init__(self, name: str, objects: ArchivedObjects, history: LogHistory, seed: int) -> None:
        self.name = name
        self.process = SimulatedProcess()
        self.store = SimulatedStore(objects, seed, StoreRates())
        self.wal: ObjectWal | None = None  # once it is open
        self._opening: ObjectWal | None = None
        self.active = True
        self._history = history
        self._rng = random.Random(seed)
        self._numbers = 0
        self._refused = False

    def start(self) -> None:
        """Open the log, and let the clients begin."""
        self.process.spawn(self._run())

    async def bury(self) -> None:
        """End it, if it is not dead already, and release what the system has given it."""
        self.process.kill()
        await self.process.buried()
        if self._opening is not None:
            self._opening._notifiers.close()

    async def _run(self) -> None:
        self._opening = wal = ObjectWal(self.name, self.store, SETTINGS, clock=LoopTime(), pace=PACE)
        while self.wal is None:
            try:
                await wal.open()
                self.wal = wal
            except Unavailable:
                await self._pause(1)
        clients = [self._write(wal, f"{self.name}.{number}") for number in range(2)]
        clients += [self._read(wal), self._read(wal), self._ask(wal), self._hold(wal), self._manage(wal)]
        for client in clients:
            self.process.spawn(self._until_closed(client))

    async def _until_closed(self, client: Coroutine[Any, Any, None]) -> None:
        try:
            await client
        except Closed:
            pass
        except TidewalError as error:  # one that no client expects
            self._history.failures.append(f"{self.name}: {error!r}")

    async def _pause(self, most_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, most_s))

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def _write(self, wal: ObjectWal, writer: str) -> None:
        """Submit without waiting for answers. Where another process writes, try again after a while."""
        while self.active:
            for _ in range(self._rng.choice((1, 1, 1, 8))):
                self.submit(wal, writer, self._rng.choices(CHANNELS, k=self._rng.choice((1, 1, 3))))
            await self._pause(6 * LEASE_S if self._refused else 0.6)

    def submit(self, wal: ObjectWal, writer: str, channels: Sequence[str]) -> Appended:
        """Append an entry to each of these channels, in one submit."""
        entries = [(channel, f"{writer}.{self._numbers}.{at}".encode()) for at, channel in enumerate(channels)]
        self._numbers += 1
        append = Appended(writer, entries, self._history.step())
        self._history.appends.append(append)
        answer = partial(self._answer, append)
        try:
            wal.submit(
                [Append(*entry) for entry in entries], lambda result: self.process.when_running(partial(answer, result))
            )
        except TidewalError as error:
            self._answer(append, error)
        return append

    def _answer(self, append: Appended, result: list[bytes] | TidewalError) -> None:
        self._refused = isinstance(result, (Unavailable, Fenced))
        self._history.answer(append, result)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _read(self, wal: ObjectWal) -> None:
        """Read one channel after another, each from its beginning, or from where it was read to before, for a while."""
        last: dict[str, bytes] = {}
        while True:
            channel = self._rng.choice(CHANNELS)
            behind = last.get(channel) if self._rng.random() < 0.6 else None
            reading = Reading(self.name, channel, behind)
            self._history.readings.append(reading)
            try:
                async with asyncio.timeout(self._rng.choice((2, 10, 30)) if self.active else None):
                    await self._follow(wal, reading)
            except (TimeoutError, Unavailable):
                pass
            except Closed:
                return
            except TidewalError as error:
                reading.error = error
            finally:
                reading.alive = False
            await self._pause(1)
            self._history.note(f"{self.name} read {len(reading.found)} of {channel} to {(reading.at or b'').hex()}")
            last.pop(channel, None)
            if reading.at is not None and reading.error is None:
                last[channel] = reading.at

    async def _follow(self, wal: ObjectWal, reading: Reading) -> None:
        start = From.EARLIEST if reading.behind is None else FromId(reading.behind)
        async for entries in wal.read(reading.channel, start):
            reading.found += _plain(entries)
            if self.active and self._rng.random() < 0.1:
                await self._pause(GRACE_S)

    async def _ask(self, wal: ObjectWal) -> None:
        """Ask for the latest id now and then: strong reads."""
        while True:
            await self._pause(3)
            channel = self._rng.choice(CHANNELS)
            acked, found, missing = self._history.latest(channel), None, False
            try:
                found = await wal.latest_id(channel)
            except ChannelNotFound:
                missing = True
            except Unavailable:
                continue
            self._history.strong_reads.append(StrongRead(self.name, channel, acked, found, missing))

    # ---- managing ----------------------------------------------------------------------------------------------------

    async def _hold(self, wal: ObjectWal) -> None:
        """Hold entries and see that they stay."""
        while True:
            await self._pause(10)
            id = self._history.latest("cut")
            if id is not None:
                self._numbers += 1
                try:
                    await self._hold_for_a_while(wal, Held("cut", f"{self.name}.{self._numbers}", id))
                except (Unavailable, Fenced, ChannelNotFound, PositionLost):
                    continue

    async def _hold_for_a_while(self, wal: ObjectWal, held: Held) -> None:
        await wal.hold(held.channel, held.holder, held.id)
        await self._first(wal, held)
        self._history.held.append(held)
        await self._pause(2 * GRACE_S)
        try:
            await self._first(wal, held)
        except (PositionLost, ChannelNotFound) as error:
            held.error = error
        await wal.hold(held.channel, held.holder, None)

    async def _first(self, wal: ObjectWal, held: Held) -> None:
        async for entries in wal.read(held.channel, FromId(held.id, inclusive=True)):
            assert entries[0].id == held.id
            return
        raise Closed("the log was closed meanwhile")

    async def _manage(self, wal: ObjectWal) -> None:
        """Create what channels there are not, and truncate and drop some."""
        while self.active:
            try:
                for channel, policy in POLICIES.items():
                    if channel not in await wal.channels():
                        await wal.create_channel(channel, policy)
                await self._pause(8)
                id = self._history.latest("cut") if self.active else None
                if id is not None and self._rng.random() < 0.8:
                    await wal.truncate("cut", id)
                if self._rng.random() < 0.15 and self.active:
                    await wal.drop_channel("brief")
            except (Unavailable, Fenced, ChannelNotFound):
                await self._pause(2 * LEASE_S)

    async def contents(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """All that a process reads that opens the log now."""
        wal = ObjectWal(self.name, self.store, SETTINGS, clock=LoopTime(), pace=PACE)
        await wal.open()
        found: dict[str, list[tuple[bytes, bytes]]] = {}
        for channel in await wal.channels():
            found[channel] = []
            last, first = await wal.latest_id(channel), (await wal.describe(channel)).first_id
            if first is not None and last is not None:
                async for entries in wal.read(channel, From.EARLIEST):
                    found[channel] += _plain(entries)
                    if entries[-1].id >= last:
                        break
        await wal.close()
        return found


def _plain(entries: Sequence[Entry]) -> list[tuple[bytes, bytes]]:
    return [(entry.id, bytes(entry.payload)) for entry in entries]
