"""Commands that an operator lets work on the logs of the simulated queue, and that die, or stand still, at a write."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.actors.conftest import in_place
from tests.actors.shared_logs import FarSharedWal, SharedNodes
from tests.dying_wal import Killed
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.runtime.log.wal import Append, Capabilities, ChannelPolicy, OnAppended, Wal
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.simulation.process import SimulatedProcess
from tidewal.runtime.testing.simulation.wal import LogFaults

Result = TypeVar("Result")


class Life:
    """A process that dies at its write number `left`, before or behind it, or with `stands_s` stands still there for so
    long; 0: at none."""

    def __init__(self, left: int = 0, *, behind: bool = False, stands_s: float = 0.0) -> None:
        self.process = SimulatedProcess()
        self._left, self._behind, self._stands_s = left, behind, stands_s

    def before(self) -> None:
        """To be called before each write."""
        if self.process.dead:
            raise Killed
        self._left -= 1
        if self._left == 0 and not self._behind:
            self._end()

    def behind(self) -> None:
        """To be called behind each write."""
        if self._left == 0 and self._behind:
            self._left = -1
            self._end()

    def _end(self) -> None:
        if self._stands_s:
            self.process.pause()
            asyncio.get_running_loop().call_later(self._stands_s, self.process.resume)
        else:
            self.process.kill()
            raise Killed

    async def run(self, command: Coroutine[Any, Any, Result]) -> Result:
        """Run a command in the process, which is killed where this is cancelled. Raises `Killed` where it died, and
        what the command raises."""
        task = self.process.spawn(command)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            self.process.kill()
            await asyncio.gather(self.process.buried(), task, return_exceptions=True)
            raise
        if self.process.dead:
            await asyncio.gather(self.process.buried(), task, return_exceptions=True)
            raise Killed
        return task.result()


class MortalWal(FarSharedWal):
    """A log, as such a process has it open."""

    capabilities: Capabilities = replace(FarSharedWal.capabilities, multi_process_write=True)  # they may land late

    def __init__(self, nodes: SharedNodes, url: str, life: Life, faults: LogFaults | None = None) -> None:
        super().__init__(nodes.log_at(url), FaultPlan(1), life.process, faults or nodes.log_faults, set(), set())
        self.first: int = 1_000 ** [*nodes.logs].index(url)  # ids of each log are its own
        self._life = life

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._life.before()
        super().submit(entries, done)
        self._life.behind()

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._life.before()
        await super().create_channel(channel, policy)
        self._life.behind()

    async def drop_channel(self, channel: str) -> None:
        self._life.before()
        await super().drop_channel(channel)
        self._life.behind()

    async def truncate(self, channel: str, id: bytes) -> None:
        self._life.before()
        await super().truncate(channel, id)
        self._life.behind()

    async def seek_group(self, group: str, channel: str, start: Any) -> None:
        self._life.before()
        await super().seek_group(group, channel, start)
        self._life.behind()

    async def drop_group(self, group: str) -> None:
        self._life.before()
        await super().drop_group(group)
        self._life.behind()

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._life.before()
        await super().hold(channel, holder, id)
        self._life.behind()


class MortalTables(MovedTables):
    """The tables of the nodes, as such a process moves them."""

    def __init__(self, nodes: SharedNodes, life: Life) -> None:
        super().__init__(open_tables(nodes.table_directory), in_place)
        self._life = life

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        self._life.before()
        await super().move(collection, before, after)
        self._life.behind()


class MortalOpener:
    """Opens logs for such a process."""

    def __init__(self, nodes: SharedNodes, life: Life) -> None:
        self._nodes, self.life = nodes, life

    async def open_alone(self, url: str) -> Wal:
        return MortalWal(self._nodes, url, self.life)
