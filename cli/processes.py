"""`tidewal run --processes N`: the roles of a node in several processes of one machine, below one supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import typer

from ..runtime.config.settings import Settings
from ..runtime.node_name import node_name
from ..runtime.signals import Interrupted, until_stopped
from ..runtime.waiting import ended
from .addresses import Addresses, print_addresses
from .child_process import ChildProcess, Command, Pause, python_command
from .logging_setup import LogFormat, LogLevel, configure, failures_as_lines
from .process_metrics import HOST, MergedMetrics, ProcessesServer, free_port
from .role_groups import RoleGroup, divide_roles, stopping_order

_log = logging.getLogger("tidewal.processes")

STOP_MARGIN_S = 5.0  # for what a process does beside stopping its roles: closing the log, ending its interpreter


def run_processes(
    processes: int,
    settings: Settings,
    *,
    name: str = "",
    data: Path | None = None,
    config: Path | None = None,
    wal: str = "",
    tables: str | None = None,
    log_level: LogLevel | None = None,
    log_format: LogFormat | None = None,
    listen: str | None = None,
    address: str | None = None,
    as_json: bool = False,
) -> None:
    """Run a node in that many processes until SIGTERM or SIGINT, drain them, and return.

    The options are those of `tidewal run`, which each process is given as they are; `settings` is what they, the
    environment and the file come to. `name` begins the names of all nodes; by default it is the one of a node of this
    process. Raises `InvalidRequest` for less than one process, `Unavailable` where `metrics.port` is in use, and the
    error of a process that cannot begin.
    """
    log = settings.log
    name = name or node_name()
    configure(log.level, log.format, node=name)
    options = forwarded_options(
        data=data,
        config=config,
        wal=wal,
        tables=tables,
        log_level=log_level,
        log_format=log_format,
        listen=listen,
        address=address,
    )

    def command(group: RoleGroup, metrics_port: int) -> list[str]:
        roles = ["--roles", ",".join(group.roles), "--name", group.node_name(name)]
        own = ["--metrics-port", str(metrics_port), "--json", "--end-with-stdin"]
        had = supervisor.children[group].addresses.get("wal")
        again = ["--follow", str(had)] if had else []  # it may have been migrated since
        return [*python_command(), "run", *roles, *own, *again, *options]

    supervisor = ProcessSupervisor(divide_roles(processes), command, settings=settings, name=name)
    try:
        with failures_as_lines(log.format):
            asyncio.run(until_stopped(supervisor.run(lambda where: print_addresses(where, as_json))))
    except Interrupted:
        if not as_json:
            typer.echo("drained")


def forwarded_options(**given: object) -> list[str]:
    """The options as arguments of a process, without those that were not given: it finds these in its environment and
    the file, as this process did."""
    return [f"--{option.replace('_', '-')}={value}" for option, value in given.items() if value]


class ProcessSupervisor:
    """Starts a process for each group of roles, the owner's first, keeps them running, and stops the owner's last.

    `command` says what to run for a group, with the port of its metrics, 0 for none; the process says in a line of
    JSON that it is ready. `pause` waits before a restart.
    """

    def __init__(
        self,
        groups: Sequence[RoleGroup],
        command: Command,
        *,
        settings: Settings,
        name: str,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self.metrics: MergedMetrics = MergedMetrics(name)
        self._endpoint = settings.metrics
        self._name = name
        # The processes' endpoints are for this one alone, whatever the file says of the one for all.
        environment = {**os.environ, "TIDEWAL__METRICS__HOST": HOST}
        role_s = settings.actor.stop_deadline + settings.actor.stop_grace
        self.children: Mapping[RoleGroup, ChildProcess] = {
            group: ChildProcess(
                group,
                command,
                environment=environment,
                free_port=self._free_port if self._endpoint.port else lambda: 0,
                stop_deadline_s=len(group.roles) * role_s + STOP_MARGIN_S,
                pause=pause,
                restarted=self.metrics.counter("process_restarts_total", process=group.name).inc,
            )
            for group in groups
        }
        self.metrics.scraper.children = list(self.children.values())
        self._running: dict[RoleGroup, asyncio.Task[None]] = {}

    async def run(self, announce: Callable[[Addresses], None]) -> None:
        """Run until cancelled, then drain. `announce` is called with the addresses once all processes are ready.

        Raises `Unavailable` where `metrics.port` is in use, before any process is started, and the error of a process
        that cannot begin, when all others have drained.
        """
        async with AsyncExitStack() as stack:
            if self._endpoint.port:
                server = ProcessesServer(self.metrics, host=self._endpoint.host, port=self._endpoint.port)
                await stack.enter_async_context(server)
            stack.push_async_callback(self._stop)
            owner, *others = self.children
            await self._start([owner])  # alone: the others open the log that it owns
            await self._start(others)
            _log.info("all %d processes are ready", len(self.children))
            announce(self._addresses())
            await self._first_failure()

    async def _start(self, groups: Sequence[RoleGroup]) -> None:
        """Start these, and return when they are ready. Raises what one of all raises before."""
        self._running |= {group: asyncio.create_task(self.children[group].run()) for group in groups}
        ready = asyncio.create_task(_all_ready([self.children[group] for group in groups]))
        failed = asyncio.create_task(self._first_failure())
        try:
            await asyncio.wait([ready, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await failed
        finally:
            await ended(ready, failed)

    async def _first_failure(self) -> None:
        """Wait until a process is given up, and raise its error."""
        done, _ = await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _stop(self) -> None:
        for groups in stopping_order(list(self._running)):
            _log.info("draining %s", ", ".join(group.name for group in groups))
            await asyncio.gather(*(self.children[group].stop() for group in groups))
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _addresses(self) -> Addresses:
        """What the processes say of where they are, the owner first; `metrics` is the endpoint for all."""
        where: dict[str, object] = {}
        for child in self.children.values():
            where = {**where, **child.addresses, **where}
        where.pop("metrics", None)
        if self._endpoint.port:
            where["metrics"] = f"http://{self._endpoint.host}:{self._endpoint.port}/metrics"
        return {**where, "processes": {group.name: child.pid for group, child in self.children.items()}}

    def _free_port(self) -> int:
        """A port of loopback that is free now, for one of the processes. Another program may take it before that does:
        the process fails then, and is started again with another one."""
        taken = {child.metrics_port for child in self.children.values()}
        while True:
            port = free_port()
            if port not in taken:
                return port


async def _all_ready(children: Iterable[ChildProcess]) -> None:
    for child in children:
        await child.ready.wait()
