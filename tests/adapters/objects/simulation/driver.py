"""Run several processes over one simulated log, do things to them that a seed draws, and check what came of it."""

from __future__ import annotations

import asyncio
import random

from tests.adapters.objects.simulated_store import StoreRates
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.simulation.process import run_processes

from .checker import violations
from .history import Appended, LogHistory
from .processes import CHANNELS, GRACE_S, LEASE_S, LogProcess
from .true_log import ArchivedObjects, TrueLog

PROCESSES = 3
LATE_S = 1.5 * GRACE_S  # what arrives late may find its place deleted
WRITABLE_WITHIN_S = 10 * LEASE_S  # behind the last fault
READ_WITHIN_S = 20.0
SHOWN_EVENTS = 60


class LogViolation(AssertionError):
    """What a log promises does not hold."""


class LogSimulation:
    """Processes that come and go over one log."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._objects = ArchivedObjects()
        self.history = LogHistory()
        self._started: list[LogProcess] = []
        self._processes = [self._start() for _ in range(PROCESSES)]
        self._under_way: list[asyncio.Task[None]] = []

    def _start(self) -> LogProcess:
        name = f"p{len(self._started) + 1}"
        process = LogProcess(name, self._objects, self.history, self._rng.randrange(2**32))
        self._started.append(process)
        process.start()
        self._note("starts", process)
        return process

    def _note(self, what: str, process: LogProcess) -> None:
        self.history.note(f"{asyncio.get_running_loop().time():.3f} {process.name} {what}")

    # ---- faults ------------------------------------------------------------------------------------------------------

    async def disturb(self, faults_s: float) -> None:
        """Let faults happen for so long, several at a time, and end them all."""
        loop, rng = asyncio.get_running_loop(), self._rng
        faults = (
            self._kill,
            self._kill,
            self._pause,
            self._pause,
            self._close,
            self._outage,
            self._requests,
            self._requests,
        )
        ends = loop.time() + faults_s
        while loop.time() < ends:
            await asyncio.sleep(rng.uniform(0, 6))
            self._under_way.append(asyncio.create_task(rng.choice(faults)(rng.randrange(PROCESSES))))
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for process in self._processes:
            process.process.resume()
            process.store.down, process.store.rates = False, StoreRates()

    async def _kill(self, at: int) -> None:
        self._note("is killed", self._processes[at])
        self._processes[at].process.kill()
        self._processes[at] = self._start()

    async def _close(self, at: int) -> None:
        """End a process in good order, and start another one."""
        process = self._processes[at]
        if process.wal is not None and process.process.running:
            self._note("is closed", process)
            self._processes[at] = self._start()
            process.active = False
            closing = process.process.spawn(process.wal.close())
            await asyncio.wait([closing])
            process.process.kill()

    async def _pause(self, at: int) -> None:
        """Stop a process, often for longer than a lease, or than garbage stays."""
        process = self._processes[at]
        self._note("is stopped", process)
        process.process.pause()
        try:
            await asyncio.sleep(self._rng.choice((0.3, LEASE_S, 3 * LEASE_S, 3 * GRACE_S)) * self._rng.random())
        finally:
            process.process.resume()
            self._note("goes on", process)

    async def _outage(self, at: int) -> None:
        """The store answers one process with errors, or all."""
        away = self._rng.choice((self._processes[at : at + 1], list(self._processes)))
        for process in away:
            self._note("has no store", process)
            process.store.down = True
        await asyncio.sleep(self._rng.uniform(0, 3 * LEASE_S))
        for process in away:
            process.store.down = False

    async def _requests(self, at: int) -> None:
        """Requests of a process fail, are lost, arrive late and twice."""
        process, rng = self._processes[at], self._rng
        refused, cut, late, conflict, doubled = (rng.choice((0.0, 0.05, 0.3)) for _ in range(5))
        late_s, request_s = rng.choice((1.0, LATE_S)), rng.choice((0.01, 0.05, 1.0))
        rates = StoreRates(refused, cut, late, conflict, doubled, request_s=request_s, late_s=late_s)
        self._note(f"has {rates}", process)
        process.store.rates = rates
        await asyncio.sleep(rng.uniform(0, 5 * LEASE_S))
        process.store.rates = StoreRates()

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until all that is late has arrived, a process writes, and each reader is at the end. Raises
        `LogViolation`."""
        for process in self._processes:
            process.active = False
        await asyncio.sleep(LATE_S)
        try:
            async with asyncio.timeout(WRITABLE_WITHIN_S):
                while not await self._append_everywhere():
                    pass
        except TimeoutError:
            raise LogViolation(f"nothing can be written {WRITABLE_WITHIN_S} s after the last fault") from None
        await asyncio.sleep(READ_WITHIN_S)

    async def _append_everywhere(self) -> bool:
        """Append to each channel that there is, by each process; whether all was taken."""
        appends: list[Appended] = []
        for process in self._processes:
            if process.wal is not None:
                appends += [process.submit(process.wal, f"{process.name}.last", [channel]) for channel in CHANNELS]
        await asyncio.sleep(2 * LEASE_S)
        taken = {channel for append in appends if append.outcome == "acked" for channel, _ in append.entries}
        return {"kept", "cut", "aged"} <= taken

    async def check(self) -> None:
        """Stop all processes, and raise `LogViolation` where anything does not hold."""
        for process in self._processes:
            process.process.pause()
        last = LogProcess("last", self._objects, self.history, 0)
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                contents = await last.contents()
        except (TimeoutError, TidewalError) as error:
            raise LogViolation(f"the log cannot be read: {error!r}") from None
        for found in violations(self.history, TrueLog(self._objects.archive), contents):
            raise LogViolation(found)

    async def stop(self) -> None:
        """End all processes that there were."""
        for process in self._started:
            await process.bury()


async def _simulate(seed: int, faults_s: float) -> LogHistory:
    loop = asyncio.get_running_loop()
    run_processes(loop)
    simulation = LogSimulation(seed)
    loop.set_exception_handler(lambda _, context: simulation.history.failures.append(repr(context)))
    try:
        await simulation.disturb(faults_s)
        await simulation.settle()
        await simulation.check()
    except LogViolation as violation:
        events = "\n".join(simulation.history.events[-SHOWN_EVENTS:])
        raise LogViolation(f"seed {seed}: {violation}\n{events}") from None
    finally:
        await simulation.stop()
    return simulation.history


def simulate_log(seed: int, faults_s: float = 80.0) -> LogHistory:
    """Run processes over a log with faults for so many seconds of virtual time, let them recover, and check what came
    of it. Returns the calls; raises `LogViolation`. The same seed gives the same run."""
    return run_virtual(_simulate(seed, faults_s))
