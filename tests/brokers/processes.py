"""A broker as a process: signals, an end that is certain, its log, and free ports."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.02
PAUSED_WITHIN_S = 60.0
TAIL_LINES = 30
LOWEST_PORT = 10_000
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM = 32_768
LISTENING = "0A"
LOOPBACK = "0100007F"


class BrokerFailed(Exception):
    """A broker did not start, or not in time; the message ends with the end of its log."""


class Process:
    """One Java process, started again and again with one command; its output is appended to `log`.

    It dies with the process that started it, whatever ends that one (see guard.py). All methods may be called from any
    thread, and those that wait block: call them with `asyncio.to_thread` where an event loop must go on.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self._command = list(command)
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._paused = False

    @property
    def pid(self) -> int:
        """Of the Java process, not of its guard."""
        return self._pid

    @property
    def paused(self) -> bool:
        """Between `pause` and `resume`."""
        return self._paused and self.running

    @property
    def running(self) -> bool:
        """Also true while it is paused."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start it; returns before it is ready."""
        assert not self.running, "already started"
        self.wait(None)
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.log.parent,
                start_new_session=True,  # Ctrl-C is for the tests; they end their brokers themselves
            )
        assert self._guard.stdout is not None
        self._paused = False
        self._pid = int(self._guard.stdout.readline() or 0)
        if not self._pid:
            self.wait(None)
            raise BrokerFailed(f"{self._command[0]} cannot be started{self.tail()}")

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing, once each of its threads has met the signal."""
        self._send(signal.SIGSTOP)
        self._paused = True
        self.until(self._stands_still, PAUSED_WITHIN_S, "paused")

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        """End it with SIGKILL, also where it is paused, and wait until it is gone."""
        if self.running:
            self._send(signal.SIGKILL)
        self.wait(None)

    def stop(self, within_s: float) -> None:
        """Ask it to end, and kill it when it does not in time."""
        self.ask_to_end()
        if not self.wait(within_s):
            self.kill()

    def ask_to_end(self) -> None:
        """Send SIGTERM, so that it is heard also where it is paused."""
        if self.running:
            self._send(signal.SIGTERM)
            if self._paused:
                self.resume()

    def wait(self, within_s: float | None) -> bool:
        """Whether it has ended in this time."""
        if self._guard is None:
            return True
        try:
            self._guard.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (self._guard.stdin, self._guard.stdout):
            assert pipe is not None
            pipe.close()
        return True

    def until(self, ready: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until `ready`; raises BrokerFailed when the process ends before, or time is over."""
        deadline = time.monotonic() + within_s
        while not ready():
            if not self.running:
                self.wait(None)
                raise BrokerFailed(f"ended before {what}{self.tail()}")
            if time.monotonic() > deadline:
                raise BrokerFailed(f"not {what} within {within_s} s{self.tail()}")
            time.sleep(POLL_S)

    def tail(self) -> str:
        """The end of its log, and where it is."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log.exists() else []
        return "\n".join(("", f"its log, {self.log}, ends with:", *lines))

    def _stands_still(self) -> bool:
        states: list[str] = []
        for thread in Path(f"/proc/{self._pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                states.append(thread.read_text().rpartition(")")[2].split()[0])
        return set(states) == {"T"}

    def _send(self, number: signal.Signals) -> None:
        assert self.running, "not running"
        assert self._pid  # 0 would be all of our own process group
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and its guard is about to
            os.kill(self._pid, number)


def free_ports(count: int) -> list[int]:
    """Choose ports of 127.0.0.1 on which nothing listens.

    They lie below those that the system gives to outgoing connections: one of these could take the port of a broker
    that was killed, before it comes back.
    """
    ephemeral_from = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else EPHEMERAL_FROM
    candidates = random.SystemRandom().sample(range(LOWEST_PORT, ephemeral_from), 50 * count)
    found = [port for port in candidates if _is_free(port)][:count]
    assert len(found) == count, "no free ports"
    return found


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens, as `/proc` has them: `0100007F` is 127.0.0.1."""
    sockets, found = _open_files(pid), set[str]()
    for family in ("tcp", "tcp6"):
        listeners = _listeners(Path(f"/proc/{pid}/net/{family}"))
        found |= {local.partition(":")[0] for local, listener in listeners if listener in sockets}
    return found


def listening_child(port: int) -> int | None:
    """The child of this process that listens at a port of 127.0.0.1, None where none does."""
    place = f"{LOOPBACK}:{port:04X}"
    sockets = {listener for local, listener in _listeners(Path("/proc/net/tcp")) if local == place}
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                if not sockets.isdisjoint(_open_files(int(child))):
                    return int(child)
    return None


def _listeners(table: Path) -> Iterator[tuple[str, str]]:
    """The sockets of a table of `/proc` that listen: their addresses, and their names as descriptors have them."""
    for line in table.read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTENING:
            yield local, f"socket:[{inode}]"


def _open_files(pid: int) -> set[str]:
    """What the descriptors of a process are, as `/proc` has them."""
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(descriptor))
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
