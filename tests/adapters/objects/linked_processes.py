"""Processes over one simulated store that are linked to the owner of the log, in virtual time."""

from __future__ import annotations

from unittest.mock import Mock

from tests.adapters.objects.processes import QUICK, SETTINGS, Process, Processes
from tests.adapters.objects.simulated_store import Objects, SimulatedStore, StoreRates
from tests.direct_network import MemoryNetwork
from tidewal.adapters.objects.group_positions import LoopTime
from tidewal.adapters.objects.link.access import LinkAccess
from tidewal.adapters.objects.link.log_link import LogLink
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.direct.address import HostPort
from tidewal.runtime.testing.simulation.process import SimulatedProcess

KEY = b"k" * 32
ANY_PORT = HostPort("127.0.0.1", 0)


class LinkedProcess(Process):
    """A process with its end of the network, and the system's process that stands for it there."""

    def __init__(self, wal: ObjectWal, store: SimulatedStore, simulated: SimulatedProcess) -> None:
        super().__init__(wal, store)
        self.simulated = simulated

    @property
    def linked(self) -> bool:
        return self.wal._links.route.link is not None


class LinkedProcesses(Processes):
    """Opens the same log again and again, each time in a process that others may be linked to."""

    def __init__(self, rates: StoreRates | None = None, settings: ObjectsSettings = SETTINGS) -> None:
        super().__init__(rates, settings)
        self.network = MemoryNetwork()
        self.objects = Objects()

    def quick(self) -> None:
        """Those that are opened from now on maintain a log of some entries."""
        self._pace = QUICK

    async def open(
        self, seed: int = 0, *, key: bytes = KEY, listens: bool = True, may_own: bool = True
    ) -> LinkedProcess:
        store, simulated = SimulatedStore(self.objects, seed, self._rates), SimulatedProcess()
        place = ANY_PORT if listens else None
        access = LinkAccess(self.network.of(simulated), key, place, place)
        wal = ObjectWal(
            "simulated://", store, self._settings, clock=LoopTime(), pace=self._pace, access=access, may_own=may_own
        )
        process = LinkedProcess(wal, store, simulated)
        await wal.open()
        self.opened.append(process)
        return process

    async def owner(self, *channels: str) -> LinkedProcess:
        process = await super().owner(*channels)
        assert isinstance(process, LinkedProcess)
        return process

    async def raw_link(self, owner: LinkedProcess) -> LogLink:
        """A link to this owner, by which a test says what no `ObjectWal` would, always as the same process."""
        claimant = await owner.wal._objects.claimant(owner.wal._state.epoch)
        assert claimant is not None
        link = LogLink("11" * 16, KEY, claimant.writer.hex(), Mock())
        await self.network.of().connect(HostPort.parse(claimant.address), lambda: link)
        await link.until_established()
        return link

    def kill(self, process: Process) -> None:
        super().kill(process)
        assert isinstance(process, LinkedProcess)
        process.simulated.dead = True
        self.network.killed(process.simulated)
