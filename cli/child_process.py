"""One process below a supervisor: it is started, watched, started again when it ends, and stopped.

What the supervisor and the child have between them are the child's three standard streams. On stdout the child says in
one line of JSON that it is ready. What comes on stderr, its log lines, is written to the supervisor's as it is; the
last lines are remembered, since they say why a child has failed. Nothing is ever written to its stdin: the kernel ends
that when the supervisor is gone, however it ended, and `end_with_parent` in the child waits for it. A signal at the
parent's death (`PR_SET_PDEATHSIG`) would be Linux's alone, and comes when the parent's thread ends, not its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runtime.errors import TidewalError, from_wire
from ..runtime.waiting import ended
from .main import FAILED
from .role_groups import RoleGroup

FAILURES_MAX = 3  # with the status of a typed error, one after the other, of a process that was never ready
FAILED_SOON_S = 30.0  # opening a log waits 10 s for its owner before it fails
RESET_S = 30.0  # alive for so long, a process is started again after the shortest pause
PAUSE_S = 0.1
PAUSE_MAX_S = 10.0
ORPHAN_DEADLINE_S = 90.0  # to drain without a supervisor: more than all five roles may take by default
REST_S = 1.0  # for reading what an ended process has written
LINE_MAX_BYTES = 1 << 20
LINES_MAX = 20

_log = logging.getLogger("tidewal.processes")

Command = Callable[[RoleGroup, int], Sequence[str]]
"""The program of a group's process with its arguments, by the port of its metrics, 0 for none; called at each start."""

Pause = Callable[[float], Awaitable[None]]


class RestartBackoff:
    """The pauses before a process is started again: doubled each time, up to `PAUSE_MAX_S` seconds."""

    def __init__(self) -> None:
        self._restarts = 0

    def pause_after(self, alive_s: float) -> float:
        """The pause in seconds after a process that has lived for `alive_s`."""
        self._restarts = 1 if alive_s >= RESET_S else self._restarts + 1
        return min(PAUSE_S * 2 ** min(self._restarts - 1, 32), PAUSE_MAX_S)


class ChildProcess:
    """The process of one group, whichever it is at the moment.

    `run` is to be a task of its own until `stop` has returned. `stop_deadline_s` is the time that the process has to
    drain before it is killed; `free_port` is asked for the port of its metrics at each start.
    """

    def __init__(
        self,
        group: RoleGroup,
        command: Command,
        *,
        environment: Mapping[str, str],
        free_port: Callable[[], int] = lambda: 0,
        stop_deadline_s: float,
        pause: Pause = asyncio.sleep,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self.group = group
        self.ready: asyncio.Event = asyncio.Event()  # set for good when one of them was ready
        self.addresses: Mapping[str, object] = {}
        self.pid: int | None = None  # of the process that runs now; None while it waits to be started again
        self.restarts: int = 0
        self.metrics_port: int = 0
        self._free_port = free_port
        self._command = command
        self._environment = environment
        self._stop_deadline_s = stop_deadline_s
        self._pause = pause
        self._restarted = restarted
        self._asked_to_stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._last_lines: deque[bytes] = deque(maxlen=LINES_MAX)

    async def run(self) -> None:
        """Keep a process running until `stop`. Raises the error of one that fails again and again before it was ever
        ready; what it printed was the error of a command then, which no restart mends."""
        backoff, failures = RestartBackoff(), 0
        try:
            while not self._asked_to_stop.is_set():
                began_s = time.monotonic()
                status = await self._run_once()
                if self._asked_to_stop.is_set():
                    return
                alive_s = time.monotonic() - began_s
                failed = status == FAILED and alive_s < FAILED_SOON_S and not self.ready.is_set()
                failures = failures + 1 if failed else 0
                if failures == FAILURES_MAX:
                    raise error_of(self.group.name, self._last_lines)
                pause_s = backoff.pause_after(alive_s)
                _log.warning(
                    "process %s has ended %s after %.1f s: it is started again in %.1f s",
                    self.group.name,
                    shown_status(status),
                    alive_s,
                    pause_s,
                )
                await self._unless_asked_to_stop(self._pause(pause_s))
                if not self._asked_to_stop.is_set():
                    self.restarts += 1
                    self._restarted()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Have the process drain, kill it after the deadline, and return when it is gone."""
        self._asked_to_stop.set()
        await self._ended.wait()

    async def _run_once(self) -> int | None:
        """Start a process and wait for its end: its status, negative for a signal; None where none can be started."""
        self._last_lines.clear()
        self.metrics_port = self._free_port()  # a new one each time: the last one may be what it failed of
        streams = _ChildStreams(self._take_output, self._take_errors)
        try:
            # In a session of its own: Ctrl-C at the terminal reaches the supervisor alone, which knows the order.
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: streams,
                *self._command(self.group, self.metrics_port),
                env=dict(self._environment),
                start_new_session=True,
            )
        except OSError as error:
            _log.error("process %s cannot be started: %s", self.group.name, error.strerror)
            return None
        self.pid = transport.get_pid()
        try:
            await self._unless_asked_to_stop(streams.exited.wait())
            if not streams.exited.is_set():
                await self._end(self.pid, streams)
            self.pid = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await streams.read.wait()
            return transport.get_returncode()
        finally:
            self.pid = None
            transport.close()  # which kills what still runs, where this task is cancelled

    async def _end(self, pid: int, streams: _ChildStreams) -> None:
        _send(pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_deadline_s):
                await streams.exited.wait()
        except TimeoutError:
            _log.error("process %s has not drained within %g s: it is killed", self.group.name, self._stop_deadline_s)
            _send(pid, signal.SIGKILL)
            await streams.exited.wait()

    async def _unless_asked_to_stop(self, wait: Awaitable[object]) -> None:
        """Return when `wait` is over, or when this is asked to stop."""
        waits: tuple[Awaitable[Any], ...] = (wait, self._asked_to_stop.wait())
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(*tasks)

    def _take_output(self, lines: bytes) -> None:
        for line in lines.splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                said = None
            if isinstance(said, dict) and said:
                self.addresses = said
                self.ready.set()
            else:
                _write_errors(line + b"\n")  # nothing that a child prints is lost

    def _take_errors(self, lines: bytes) -> None:
        self._last_lines.extend(lines.splitlines())
        _write_errors(lines)


class _ChildStreams(asyncio.SubprocessProtocol):
    """What a process writes, in whole lines, many at once: those of several processes must not be torn. `exited` is set
    when it has ended, `read` when all that it wrote is read, which is later; never, where a process that it has started
    keeps these streams open."""

    def __init__(self, take_output: Callable[[bytes], None], take_errors: Callable[[bytes], None]) -> None:
        self.exited = asyncio.Event()
        self.read = asyncio.Event()
        self._take = {1: take_output, 2: take_errors}
        self._rest = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        lines, newline, rest = (self._rest[fd] + data).rpartition(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            lines, newline, rest = lines + newline, rest, b""
        self._rest[fd] = rest
        if lines or newline:
            self._take[fd](lines + newline)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if rest := self._rest.pop(fd, b""):
            self._take[fd](rest + b"\n")
        if not self._rest:
            self.read.set()

    def process_exited(self) -> None:
        self.exited.set()


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal, without a look whether the process still runs: `Popen` would take its status from the loop's
    watcher."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _write_errors(lines: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads them any more, which is no reason to stop
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()


def shown_status(status: int | None) -> str:
    """How a process ended, for people."""
    if status is None:
        return "before it began"
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def error_of(process: str, lines: Sequence[bytes]) -> TidewalError:
    """The error that a command has ended with, from its last lines on stderr, as text or as JSON."""
    last = next((line.decode(errors="replace") for line in reversed(lines) if line.strip()), "it said nothing")
    try:
        said = json.loads(last)["message"]
    except (ValueError, TypeError, KeyError):
        said = last
    found = re.fullmatch(r"(?:tidewal|the command ends): (\w+): (.*)", str(said))
    code, message = (found[1], found[2]) if found else ("", said)
    return from_wire({"code": code, "message": f"process {process}: {message}"})


def end_with_parent(deadline_s: float = ORPHAN_DEADLINE_S) -> None:
    """In a child: end when the supervisor is gone, as at SIGTERM, and after `deadline_s` seconds in any case.

    To be called first: a child that still imports when its supervisor dies is to end, too. It watches stdin in a
    thread, so that a child whose event loop hangs ends as well.
    """
    threading.Thread(target=_end_after_stdin, args=(deadline_s,), name="end-with-parent", daemon=True).start()


def _end_after_stdin(deadline_s: float) -> None:
    try:
        while os.read(0, 1):
            pass
    except OSError:
        pass  # as good as its end
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(deadline_s)
    os.kill(os.getpid(), signal.SIGKILL)


def python_command() -> list[str]:
    """The `tidewal` of this installation, for a process of its own. Python puts the working directory in front of all
    packages for `-m`; a file there that is called as one of them must not take its place, unless it does so here."""
    here = "" in sys.path or str(Path.cwd()) in sys.path
    return [sys.executable, *([] if here else ["-P"]), "-m", "tidewal"]
