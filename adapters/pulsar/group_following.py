"""One group as a process sees it that has members in it: its log, what it appends for it, and who and what is there.

Whether a process is there is told by the broker, which knows its connections: of one that was killed the channels are
free within seconds, not only when its session ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from ...runtime.errors import TidewalError
from ...runtime.groups.link import Ack
from ...runtime.wal import Append
from . import group_channels, group_log, group_outputs
from .group_channels import Finder
from .group_log import GroupLog, new_token
from .group_outputs import Outbox
from .group_records import Channels, Commit, Expel, Leave, Stage
from .topics import Topic, group_topic

log = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

LOOK_S = 1.0  # between two looks at what is there
LOOKS_FOR_ALL = 10  # so often each channel is looked at, whether it is still the same
LOOKS_WITHOUT = 3  # in so many looks a process was not there: it is gone
LEAVE_WITHIN_S = 5.0


class Host(group_log.Log, group_outputs.Channels, group_channels.Source, Protocol):
    """What following a group needs of the WAL."""

    async def blocking(self, call: Callable[[], T]) -> T: ...


class Following:
    """Belongs to one event loop."""

    def __init__(self, wal: Host, group: str, finder: Finder) -> None:
        self.group = group
        self.log = GroupLog(wal, group, group_topic(group))
        self._wal = wal
        self._finder = finder
        self._outbox = Outbox(wal, self.log)
        self._presence = Presence(wal.process)
        self._look_now = asyncio.Event()
        self._suspicious = False
        self._looking: asyncio.Task[None] | None = None
        self.log.on_applied = self._outbox.applied
        self.log.on_restored = self._outbox.restored

    def look(self) -> None:
        """Look from now on at what is there; at once when it does so already, since something has changed."""
        self._suspicious = True
        self._look_now.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on(), name=f"looks for group {self.group}")

    async def commit(self, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """`GroupLink.commit`."""
        if not outputs:
            await self.log.ask(Commit(member, list(acks), b"", "", [], {}))
            return []
        await self._outbox.check(outputs)
        token, batch = new_token(), new_token()
        parts = self._outbox.number(outputs)
        stages = [Stage(member, batch, part) for part in parts[:-1]]
        commit = self._outbox.deciding(member, acks, batch, parts)
        self._outbox.expect(token)
        try:
            await self.log.ask(*stages, commit, token=token)
        except BaseException:
            self._outbox.forget(token)
            raise
        return await self._outbox.published(token)

    async def leave(self, member: str) -> None:
        """End the membership, as far as Pulsar answers; otherwise the others notice."""
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                await self.log.ask(Leave(member))
        except (TidewalError, TimeoutError) as error:
            log.info("leaving group %s: %s", self.group, error or "no answer in time")

    async def close(self) -> None:
        """Follow no more; what was decided is appended first."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._outbox.close()
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
                self._outbox.adopt()
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
            if channel is not None and (name not in known or known[name].made != channel.made)
        }
        gone = {name: known[name].made for name, channel in seen.items() if channel is None and name in known}
        if found or gone:
            await self.log.ask(Channels(found, gone))

    async def _look_at_processes(self) -> None:
        publishers = await self._wal.blocking(partial(self._wal.admin.publishers, Topic(self.log.topic)))
        state = self.log.state
        gone = self._presence.look(publishers, {joined.process for joined in state.members.values()})
        for member, joined in state.members.items():
            if joined.process == self._wal.process and member not in self.log.local:
                self.log.propose(Leave(member))  # it gave up joining or leaving, and its process still beats
            if joined.process in gone:
                log.warning("the process of member %s of group %s is gone", member, self.group)
                self.log.propose(Expel(member, state.last_beats[joined.process]))


class Presence:
    """Which processes the broker has no connection of, by their producers of the group's log."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._connected: str | None = None  # since when this process is
        self._looks_without: dict[str, int] = {}
        self._to_come: set[str] = set()  # not seen since we were connected anew: as long, their sessions decide

    def look(self, publishers: Mapping[str, str], processes: set[str]) -> set[str]:
        """Which of the processes are gone. `publishers` are the names of producers, and since when they are there."""
        since = {process_of(name): connected for name, connected in publishers.items()}
        connected = since.get(self._process)
        others = processes - {self._process}
        if connected is None or (self._connected is not None and connected != self._connected):
            self._to_come = others  # the broker was away, or our connection to it: who is slower is not gone
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
