"""The processes of one cluster under test: nodes with all roles, or those of one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...runtime.errors import Unavailable
from ..process_metrics import fetch, free_port
from .node_process import NodeProcess

READY_WITHIN_S = 120.0
LOOK_S = 0.1  # between two looks at who is ready
SHOWN = 3  # of many of one kind
TRACEBACK = re.compile(r"^Traceback .*\n(?:\s.*\n)*(\S.*)", re.MULTILINE)


class ClusterProcesses:
    """Nodes that offer all roles, on a log of brokers. `options` are those of each `tidewal run`."""

    def __init__(
        self, names: Sequence[str], options: Sequence[str], environment: Mapping[str, str], home: Path
    ) -> None:
        self._processes = [NodeProcess(name, options, environment, home / f"{name}.log") for name in names]
        self._by_name = {process.name: process for process in self._processes}

    async def start(self) -> None:
        """Start all, and return when they are ready. Raises `Unavailable` where they are not in time."""
        for process in self._processes:
            process.start()
        await self.all_ready()

    async def all_ready(self) -> None:
        """Wait until all are ready. Raises `Unavailable` where they are not in time."""
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while len(await self.ready()) < self.size:  # noqa: ASYNC110 -- other processes say so
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            logs = ", ".join(str(process.log) for process in self._processes)
            raise Unavailable(f"not all processes are ready within {READY_WITHIN_S:g} s: see {logs}") from None

    @property
    def size(self) -> int:
        """How many processes there are to kill."""
        return len(self._processes)

    @property
    def spares(self) -> int:
        """How many must stay when one is killed."""
        return min(1, self.size - 1)

    async def ready(self) -> list[str]:
        """The processes that are ready now."""
        return [process.name for process in self._processes if process.ready.is_set()]

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one of those that `ready` has returned."""
        self._by_name[name].send(number)

    async def stop(self) -> None:
        """End all in good order."""
        await asyncio.gather(*(process.stop() for process in self._processes))

    def complaints(self) -> list[str]:
        """What the processes did that no fault explains: how they ended, and exceptions in what they said."""
        found: list[str] = []
        for process in self._processes:
            found += [f"{process.name} {ending} (see {process.log})" for ending in process.endings[:SHOWN]]
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            raised = [match[1] for match in TRACEBACK.finditer(text)]
            found += [f"{process.name} said: {line[:200]} (see {process.log})" for line in raised[:SHOWN]]
        return found


class SupervisedProcesses(ClusterProcesses):
    """A node divided among `processes` processes by `tidewal run --processes`. They are killed, not the supervisor."""

    def __init__(
        self, processes: int, options: Sequence[str], environment: Mapping[str, str], home: Path, *, name: str = "node"
    ) -> None:
        self._port = free_port()
        self._size = processes
        self._pids: dict[str, int] = {}
        of_all = ["--processes", str(processes), "--metrics-port", str(self._port)]
        super().__init__([name], [*options, *of_all], environment, home)

    @property
    def size(self) -> int:
        return self._size

    @property
    def spares(self) -> int:
        return 0  # none can do another one's work

    async def ready(self) -> list[str]:
        """The processes that the supervisor finds healthy now."""
        health: Mapping[str, Mapping[str, object]] = {}
        if await super().ready():
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                _, body = await fetch(self._port, "/healthz")
                health = json.loads(body)["processes"]
        self._pids = {name: pid for name, said in health.items() if said["ok"] and isinstance(pid := said["pid"], int)}
        return list(self._pids)

    def send(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[name], number)
