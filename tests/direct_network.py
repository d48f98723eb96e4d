"""Connections between nodes in memory, on virtual time: they break where a test says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tidewal.runtime.direct.address import HostPort
from tidewal.runtime.direct.network import MakeConnection
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.testing.simulation.process import SimulatedProcess

DELAY_S = 0.0002


class MemoryNetwork:
    """The network of all processes of a test. `breaks` is asked at each frame, before it is delivered and after: where
    it says so the connection breaks. What `takes_nothing` says of a process is not delivered to it."""

    def __init__(self) -> None:
        self.listeners: dict[str, tuple[SimulatedProcess, MakeConnection]] = {}
        self.transports: list[MemoryTransport] = []
        self.breaks: Callable[[], bool] = lambda: False
        self.frames = self.broken = 0
        self.ports = itertools.count(7001)

    def of(self, process: SimulatedProcess | None = None) -> ProcessNetwork:
        return ProcessNetwork(self, process or SimulatedProcess())

    def killed(self, process: SimulatedProcess) -> None:
        """Break the connections of a process that was killed, as its system does."""
        self.listeners = {at: found for at, found in self.listeners.items() if found[0] is not process}
        for transport in self.transports[:]:
            if transport.process is process:
                transport.abort()

    def break_all(self) -> None:
        for transport in self.transports[:]:
            transport.abort()


class ProcessNetwork:
    """The network as one process sees it: a `Network`."""

    def __init__(self, shared: MemoryNetwork, process: SimulatedProcess) -> None:
        self.shared, self.process = shared, process

    async def connect(self, address: HostPort, make: MakeConnection) -> None:
        await asyncio.sleep(DELAY_S)
        found = self.shared.listeners.get(str(address))
        if found is None:
            raise ConnectionRefusedError(f"nothing listens on {address}")
        ours, theirs = MemoryTransport(self.shared, self.process), MemoryTransport(self.shared, found[0])
        ours.other, theirs.other = theirs, ours
        theirs.protocol, ours.protocol = found[1](), make()
        theirs.protocol.connection_made(theirs)
        ours.protocol.connection_made(ours)

    async def listen(self, address: HostPort, make: MakeConnection) -> MemoryListener:
        listener = MemoryListener(self.shared, HostPort(address.host, address.port or next(self.shared.ports)))
        if str(listener.address) in self.shared.listeners:
            raise Unavailable(f"{address} is in use")
        self.shared.listeners[str(listener.address)] = self.process, make
        return listener


class MemoryListener:
    def __init__(self, shared: MemoryNetwork, address: HostPort) -> None:
        self.address, self.port, self._shared = address, address.port, shared

    async def close(self) -> None:
        self._shared.listeners.pop(str(self.address), None)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. Each `write` is one frame."""

    other: MemoryTransport
    protocol: Any

    def __init__(self, shared: MemoryNetwork, process: SimulatedProcess) -> None:
        super().__init__()
        self.process = process
        self._shared = shared
        self._unread: list[bytes] = []  # for the other end
        self._reading = True
        self._lost = False
        shared.transports.append(self)

    def write(self, data: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.process.when_running(lambda: self._send(bytes(data)))

    def _send(self, data: bytes) -> None:
        if self._lost:
            return
        self._shared.frames += 1
        if self._shared.breaks():
            self._break()
            return
        self._unread.append(data)
        asyncio.get_running_loop().call_later(DELAY_S, self._deliver)
        if self._shared.breaks():
            asyncio.get_running_loop().call_later(DELAY_S, self._break)

    def _break(self) -> None:
        if not self._lost:
            self._shared.broken += 1
            self.abort()

    def _deliver(self) -> None:
        self.other.process.when_running(self._hand_over)

    def _hand_over(self) -> None:
        while self._unread and self.other._reading and not self.other._lost:
            self.other.protocol.data_received(self._unread.pop(0))

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unread))

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        asyncio.get_running_loop().call_soon(self.other._deliver)

    def abort(self) -> None:
        for end in (self, self.other):
            if not end._lost:
                end._lost = True
                self._shared.transports.remove(end)
                asyncio.get_running_loop().call_soon(end.process.when_running, end._tell)

    def _tell(self) -> None:
        self.protocol.connection_lost(None)
