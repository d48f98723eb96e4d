"""The log of a simulated cluster, as one of its processes reaches it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ...errors import ChannelNotFound, TidewalError, Unavailable
from ...log.wal import Append, Capabilities, Entry, OnAppended, Start
from ..faults import FaultPlan
from ..memory import MemoryLog, MemoryWal
from .process import SimulatedProcess

DEAF_S = 0.05  # after this long a channel is tried again that could not be read


@dataclass
class LogFaults:
    """What the log itself does to all processes: appends to channels in `stalled` wait until `go_on`; of the others
    `late` is the share that lands up to `late_s` seconds after its author was told that the outcome is unknown, and
    `lag` the share of what is read that comes up to `lag_s` seconds later. Entries that were truncated are kept in
    `removed`, for the checks at the end."""

    rng: random.Random
    late: float = 0.0
    late_s: float = 5.0
    lag: float = 0.0
    lag_s: float = 1.0
    landing: int = 0  # appends that are late, and have not landed yet
    stalled: set[str] = field(default_factory=set[str])
    removed: dict[str, list[Entry]] = field(default_factory=dict[str, list[Entry]])
    _held: list[tuple[SimulatedWal, Set[str], Callable[[], None]]] = field(
        default_factory=list["tuple[SimulatedWal, Set[str], Callable[[], None]]"]
    )

    def hold(self, wal: SimulatedWal, channels: Set[str], append: Callable[[], None]) -> None:
        """Keep an append back to channels of which one takes none."""
        self._held.append((wal, channels, append))

    def holds(self, wal: SimulatedWal, channels: Set[str]) -> bool:
        """Whether something that this process has appended to one of the channels is kept back: none overtakes it."""
        return any(each is wal and not held.isdisjoint(channels) for each, held, _ in self._held)

    def go_on(self, channel: str) -> None:
        """End the stall of a channel."""
        self.stalled.discard(channel)
        self.release()

    def release(self) -> None:
        """Let all land, in its order, that nothing holds back any more."""
        held, self._held = self._held, []
        for wal, channels, append in held:
            if wal.holds_back(channels):
                self.hold(wal, channels, append)
            else:
                append()


class SimulatedWal(MemoryWal):
    """A memory WAL which many processes may open, as brokers are, for one `process`. Each process has faults of its
    own, beside those that the log has for all; its machine appends to no channel that it is `cut` off from, and
    reads none that it is `deaf` to. What a killed process had submitted stays submitted."""

    capabilities: Capabilities = replace(MemoryWal.capabilities, one_node=False, one_machine=False)

    def __init__(
        self,
        log: MemoryLog,
        faults: FaultPlan,
        process: SimulatedProcess,
        shared: LogFaults,
        cut: Set[str],
        deaf: Set[str],
    ) -> None:
        super().__init__(log, faults)
        self._process, self._shared, self._cut, self._deaf = process, shared, cut, deaf

    def holds_back(self, channels: Set[str]) -> bool:
        """Whether appends to the channels wait, which one append is for."""
        away = not (channels.isdisjoint(self._shared.stalled) and channels.isdisjoint(self._cut))
        return away or self._shared.holds(self, channels)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self._process.dead:
            return
        if self._process.paused:  # a callback of the loop, which belongs to no task of the process
            self._process.when_running(partial(self.submit, list(entries), done))
            return
        shared, taken, channels = self._shared, list(entries), {entry.channel for entry in entries}

        def answer(result: list[bytes] | TidewalError) -> None:
            self._process.when_running(partial(done, result))

        if self.holds_back(channels):
            shared.hold(self, channels, partial(super().submit, taken, answer))
        elif shared.late and shared.rng.random() < shared.late:
            shared.landing += 1
            asyncio.get_running_loop().call_later(shared.rng.uniform(0, shared.late_s), self._land, channels, taken)
            answer(Unavailable("the log did not answer", outcome_unknown=True))
        else:
            super().submit(taken, answer)

    def _land(self, channels: Set[str], entries: Sequence[Append]) -> None:
        """Write what is late, behind all that this process had submitted before: an append overtakes none."""
        if self.holds_back(channels):
            self._shared.hold(self, channels, partial(self._land, channels, entries))
        else:
            self._shared.landing -= 1
            self._release()
            with suppress(ChannelNotFound):  # dropped meanwhile
                MemoryWal(self.log).submit(entries, _ignore)

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        shared = self._shared
        async for entries in super().read(channel, start):
            if shared.lag and shared.rng.random() < shared.lag:
                await asyncio.sleep(shared.rng.uniform(0, shared.lag_s))
            while channel in self._deaf:  # noqa: ASYNC110 -- a simulated network has no event
                await asyncio.sleep(DEAF_S)
            yield entries

    async def truncate(self, channel: str, id: bytes) -> None:
        if not self._process.dead:
            removed = self._shared.removed.setdefault(channel, [])
            removed += [entry for entry in self.log.channels[channel].entries if entry.id < id]
            await super().truncate(channel, id)


def _ignore(_: list[bytes] | TidewalError) -> None:
    """The author was told something else."""
