"""The processes of a run: kept running, restarted when they end, and made to suffer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESTART_S = 0.3
STOPPED_WITHIN_S = 150.0


class Worker:
    """One process after another, each a module of this package with arguments of its own; stderr goes to `log`.

    `arguments(life)` are those of the process number `life`, from 0 on. A process that ends by itself or by a fault is
    started again until `stop` or `kill_for_good`.
    """

    def __init__(self, name: str, module: str, log: Path, arguments: Callable[[int], Sequence[object]]) -> None:
        self.name = name
        self.lives = 0
        self._module, self._log, self._arguments = module, log, arguments
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self._task = asyncio.create_task(self._keep_running(), name=name)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _keep_running(self) -> None:
        while not self._ending:
            arguments = [str(argument) for argument in self._arguments(self.lives)]
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", f"tests.torture.{self._module}", *arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    start_new_session=True,
                )
            self.lives += 1
            if self._ending:  # it was on its way then, and has heard of nothing
                self._signal(signal.SIGKILL)
            await self._process.wait()
            self._signal(signal.SIGKILL)  # what it had started itself
            await asyncio.sleep(RESTART_S)

    def tell(self, order: str) -> None:
        """Send an order (see `inside`); one that has ended hears nothing."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{order}\n".encode())

    def kill(self) -> None:
        """SIGKILL for the process and all that it has started."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> bool:
        """End it in good order, for good; False when it had to be killed because it did not end in time."""
        self._ending = True
        self.resume()
        self.tell("stop")
        try:
            async with asyncio.timeout(STOPPED_WITHIN_S):
                await asyncio.shield(self._task)
        except TimeoutError:
            await self.kill_for_good()
            return False
        return True

    async def kill_for_good(self) -> None:
        """SIGKILL, and none follows."""
        self._ending = True
        self.kill()
        await asyncio.gather(self._task, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
