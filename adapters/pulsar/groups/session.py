"""A process's part in a group with members in it: the group's log, the outputs, and checks of channels and processes.

The broker knows the connections of the processes: so the channels of a killed process are free within seconds, not
only when its session times out.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from ....runtime.clock import SystemClock
from ....runtime.errors import TidewalError
from ....runtime.groups import group_log
from ....runtime.groups.commands import ChannelsChanged, CommitOutputs, EvictMember, Leave, Stage
from ....runtime.groups.coordinator_client import Ack
from ....runtime.groups.group_log import GroupLog
from ....runtime.log.wal import Append
from ..topics import PulsarTopic, group_topic
from . import channels as group_channels
from . import outputs as group_outputs
from .channels import ChannelFinder
from .outputs import OutputPublisher

log: logging.Logger = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

LOOK_S = 1.0  # between two checks of channels and processes
LOOKS_FOR_ALL = 10  # every so many checks, each known channel is checked for its incarnation
LOOKS_WITHOUT = 3  # a process without connection in so many checks in a row is gone
LEAVE_WITHIN_S = 5.0
ID_BYTES = 12


class GroupSessionHost(group_log.GroupLogHost, group_outputs.OutputHost, group_channels.FinderSource, Protocol):
    """What a group session needs of the WAL."""

    async def blocking(self, call: Callable[[], T]) -> T: ...


class GroupSession:
    """This process's part in one group: its log, its outputs, and the checks of channels and processes. Belongs to one
    event loop."""

    def __init__(self, wal: GroupSessionHost, group: str, finder: ChannelFinder) -> None:
        self.group = group
        self.log: GroupLog = GroupLog(
            wal, group, group_topic(group), clock=SystemClock(), new_id=partial(os.urandom, ID_BYTES)
        )
        self._wal = wal
        self._finder = finder
        self._output_publisher = OutputPublisher(wal, self.log)
        self._failure_detector = FailureDetector(wal.process)
        self._look_now = asyncio.Event()
        self._suspicious = False
        self._looking: asyncio.Task[None] | None = None
        self.log.on_command = self._output_publisher.applied
        self.log.on_snapshot = self._output_publisher.restored

    def look(self) -> None:
        """Begin to check channels and processes; if begun already, check now, since channels may have changed."""
        self._suspicious = True
        self._look_now.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on(), name=f"looks for group {self.group}")

    async def commit(self, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """`CoordinatorClient.commit`."""
        if not outputs:
            await self.log.ask(CommitOutputs(member, list(acks), b"", "", [], {}))
            return []
        await self._output_publisher.check(outputs)
        token, batch = self.log.new_id(), self.log.new_id()
        parts = self._output_publisher.number(outputs)
        stages = [Stage(member, batch, part) for part in parts[:-1]]
        commit = self._output_publisher.deciding(member, acks, batch, parts)
        self._output_publisher.expect(token)
        try:
            await self.log.ask(*stages, commit, token=token)
        except BaseException:
            self._output_publisher.forget(token)
            raise
        return await self._output_publisher.published(token)

    async def leave(self, member: str) -> None:
        """End the membership. If Pulsar does not answer in time, the other processes evict the member."""
        try:
            async with asyncio.timeout(min(LEAVE_WITHIN_S, self._wal.timeout_s)):  # not also for its outcome, once lost
                await self.log.ask(Leave(member))
        except (TidewalError, TimeoutError) as error:
            log.info("leaving group %s: %s", self.group, error or "no answer in time")

    async def close(self) -> None:
        """Publish what is decided, and stop following the log."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._output_publisher.close()
        await self.log.close()

    # ---- looking ----------------------------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        looks = 0
        while self.log.ended is None:
            suspicious, self._suspicious = self._suspicious or looks % LOOKS_FOR_ALL == 0, False
            self._look_now.clear()
            try:
                await self._look_at_channels(suspicious)
                await self._look_at_processes()
                self._output_publisher.adopt()
            except TidewalError as error:
                log.info("looking around for group %s: %s", self.group, error)
            looks += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._look_now.wait()

    async def _look_at_channels(self, each: bool) -> None:
        names = set(await self._finder.names())
        state = self.log.state
        known = dict(state.known)
        new = {name for name in names - known.keys() if state.asked_for(name)}
        missing = known.keys() - names
        same = known.keys() & names if each else set[str]()
        seen = await self._finder.look_at(self.group, sorted(new | missing | same))
        found = {
            name: channel
            for name, channel in seen.items()
            if channel is not None and (name not in known or known[name].incarnation != channel.incarnation)
        }
        gone = {name: known[name].incarnation for name, channel in seen.items() if channel is None and name in known}
        if found or gone:
            await self.log.ask(ChannelsChanged(found, gone))

    async def _look_at_processes(self) -> None:
        publishers = await self._wal.blocking(partial(self._wal.admin.publishers, PulsarTopic(self.log.topic)))
        state = self.log.state
        gone = self._failure_detector.look(publishers, {joined.process for joined in state.members.values()})
        for member, joined in state.members.items():
            if joined.process == self._wal.process and member not in self.log.local:
                self.log.tell(Leave(member))  # it gave up joining or leaving, and its process still sends heartbeats
            if joined.process in gone:
                log.warning("the process of member %s of group %s is gone", member, self.group)
                self.log.tell(EvictMember(member, state.last_beats[joined.process]))


class FailureDetector:
    """Finds processes without a connection to the broker, by their producers of the group's log."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._connected: str | None = None  # since when this process is connected
        self._looks_without: dict[str, int] = {}
        self._to_come: set[str] = (
            set()
        )  # not seen since this process reconnected: until then, their session timeouts decide

    def look(self, publishers: Mapping[str, str], processes: set[str]) -> set[str]:
        """Those of `processes` that are gone. `publishers` are the names of producers, and since when each is
        connected."""
        since = {process_of(name): connected for name, connected in publishers.items()}
        connected = since.get(self._process)
        others = processes - {self._process}
        if connected is None or (self._connected is not None and connected != self._connected):
            self._to_come = others  # the broker or its connection was down: slower processes are not gone
            self._looks_without.clear()
        if connected is not None:
            self._connected = connected
        self._to_come &= others - since.keys()
        self._looks_without = {
            other: self._looks_without.get(other, 0) + 1 for other in others - since.keys() - self._to_come
        }
        return {other for other, looks in self._looks_without.items() if looks >= LOOKS_WITHOUT}


def process_of(producer: str) -> str:
    """The process, by the name of one of its producers: `tidewal-PROCESS-NUMBER`."""
    return producer.removeprefix("tidewal-").rpartition("-")[0]
