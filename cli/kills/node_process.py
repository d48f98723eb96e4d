"""One `tidewal run` as a process of this one, started again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...runtime.waiting import ended
from ..child_process import python_command, shown_status

RESTART_S = 0.3
ENDED_WITHIN_S = 120.0  # of SIGTERM
FENCED = 2  # exit status of a node that has lost its lease, and says so in its log


class NodeProcess:
    """A process that runs from `start` to `stop` or `kill`, whatever it takes; what it says goes to `log`.

    It is in a process group of its own, so that Ctrl-C does not reach it, but in the session of this process: a group
    that is left behind with a stopped process in it is ended by the kernel (SIGHUP, then SIGCONT). A process that goes
    on ends when its standard input does. `endings` is how each one of them ended that was not asked to.
    """

    def __init__(self, name: str, options: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.ready: asyncio.Event = asyncio.Event()  # while it is
        self.pid: int = 0  # of the process that runs now, else 0
        self.endings: list[str] = []
        self._command = [*python_command(), "run", "--name", name, "--json", "--end-with-stdin", *options]
        self._environment = dict(environment)
        self._expected: set[int] = set()  # statuses with which the process may end
        self._ending = False
        self._said_bytes = 0  # in the log, by those before the present one
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it, and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name=self.name)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that this ends is no surprise."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._expected.add(-number if number is signal.SIGKILL else 0)
            self.ready.clear()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self) -> None:
        """End it in good order, for good; it is killed where it takes longer than `ENDED_WITHIN_S`."""
        self._ending = True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=ENDED_WITHIN_S)
            if not done:
                self.endings.append(f"did not end within {ENDED_WITHIN_S:g} s of SIGTERM")
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL, and none follows."""
        self._ending = True
        self.send(signal.SIGKILL)
        if self._task is not None:
            await ended(self._task)
            self._task = None

    async def _keep_running(self) -> None:
        while not self._ending:
            began_s = time.monotonic()
            status = await self._run_once()
            fenced = status in (FENCED, -signal.SIGTERM) and self._was_fenced()  # the latter: asked to end as it ended
            if not (fenced or status in self._expected):
                self.endings.append(f"ended {shown_status(status)} after {time.monotonic() - began_s:.1f} s")
            if not self._ending:
                await asyncio.sleep(RESTART_S)

    async def _run_once(self) -> int:
        self._expected.clear()
        with self.log.open("ab") as log:
            self._said_bytes = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                process_group=0,
            )
        try:
            self.pid = process.pid
            assert process.stdout is not None
            async for line in process.stdout:
                with contextlib.suppress(ValueError):
                    json.loads(line)  # the addresses, once it is ready
                    self.ready.set()
            return await process.wait()
        finally:
            self.pid = 0
            self.ready.clear()
            if process.returncode is None:  # this is cancelled
                process.kill()
                await process.wait()

    def _was_fenced(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._said_bytes)
            return b"Fenced: " in log.read()
