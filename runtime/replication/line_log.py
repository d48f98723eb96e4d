"""A replica of a log of nodes as of its line: a log that was left then, for a migration to bring it to another one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ..catalog.catalog import DROPPING, Catalog, Collection
from ..catalog.stored_ids import without_later
from ..errors import ChannelNotFound, InvalidRequest
from ..log.read_only import ReadOnlyWal
from ..log.record import RecordType, record_type
from ..log.replication_state import is_replication_channel
from ..log.wal import (
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    FromId,
    GroupInfo,
    Payload,
    Start,
    Wal,
)
from ..migration.channel_copy import Check, is_lost
from ..migration.moved_state import MovedState
from ..migration.node_log import CATALOG_KIND, STATE_CHANNELS
from ..streams.channel_reader import Granted
from ..streams.stream_base import reading
from .consistent_line import ABOVE, ConsistentLine, LineEnd, StoredState, first_above
from .line_drawer import AUTHOR, FIRST

_log = logging.getLogger(__name__)

_BEGUN = (RecordType.EPOCH_BEGIN, RecordType.MESSAGE)


class LineLog(ReadOnlyWal):
    """The replica `wal` as of its line. Where each channel of nodes ends is found by `open`; the states of the nodes
    are channels as they were saved with the line, but for what they say of later entries. Nothing uses it: it counts as
    the log of one node.

    The collections `dropped` are being dropped in it: their tables are gone.

    It takes what a migration writes into a log that it copies: its own state, and holds. `check` is called as channels
    are listed, and raises where the line may not be what the replica has any more."""

    def __init__(self, wal: Wal, line: ConsistentLine, check: Check, dropped: Set[str] = frozenset()) -> None:
        super().__init__(wal)
        self.capabilities: Capabilities = replace(wal.capabilities, one_node=True)
        self.line: ConsistentLine = line
        self.collections: Mapping[str, Collection] = {}  # by name, as of the line
        self._check, self._dropped = check, dropped
        self._states: dict[str, tuple[ChannelPolicy, list[Entry]]] = {}
        self._latest: dict[str, bytes] = dict(line.ends)

    @classmethod
    async def open(cls, wal: Wal, line: ConsistentLine, check: Check, dropped: Set[str] = frozenset()) -> LineLog:
        """The replica as of its line. Raises `InvalidRequest` where that has not all collections that are `dropped`,
        and errors of the log."""
        log = cls(wal, line, check, dropped)
        catalog: MovedState[Catalog] | None = None
        for name, state in line.states.items():
            log._put(name, state)
            if name.endswith(tuple(ending for ending, type in STATE_CHANNELS.items() if type is RecordType.CATALOG)):
                catalog = await MovedState[Catalog].read(log, name, CATALOG_KIND)
        there = set(await wal.channels())
        for name in line.ends.keys() & there:
            is_owned = catalog is not None and name in catalog.state.channels
            await log._find_end(name, catalog.state.granted(name) if catalog is not None and is_owned else None)
        for name in sorted(dropped - (set() if catalog is None else catalog.state.collections.keys())):
            raise InvalidRequest(f"the replica has no collection {name}", argument="dropped")
        if catalog is not None:
            await log._leave_out_later(catalog)
        return log

    def _put(self, name: str, state: StoredState) -> None:
        numbered = enumerate(state.entries, int.from_bytes(FIRST))
        entries = [Entry(number.to_bytes(len(FIRST)), time, payload) for number, (time, payload) in numbered]
        self._states[name] = state.policy, entries

    async def _find_end(self, name: str, granted: Granted | None) -> None:
        """Let the channel end before its first entry that is not of the line."""
        first = await first_above(self._wal, name, LineEnd(self.line.time_of(name), granted), self._latest[name])
        if first is not None:
            self._latest[name] = (int.from_bytes(first) - 1).to_bytes(len(first))  # there need not be such an entry

    async def _leave_out_later(self, catalog: MovedState[Catalog]) -> None:
        begun = {name for topic in catalog.state.topics for name in topic.begun}
        unbegun = {name for name in begun if not await self._has_begun(name)}

        def as_of_line(snapshot: Mapping[str, Any]) -> dict[str, Any]:
            left = without_later(snapshot, self._is_later, unbegun)
            collections = (
                {**wire, "state": DROPPING} if Collection.from_wire(wire).name in self._dropped else wire
                for wire in left["collections"]
            )
            changed = {**left, "collections": [*collections]}
            self.collections = {each.name: each for each in map(Collection.from_wire, changed["collections"])}
            return changed

        entries = catalog.entries_with(AUTHOR, FIRST, as_of_line)
        self._put(catalog.channel, StoredState(catalog.policy, entries))

    def _is_later(self, channel: str, id: bytes) -> bool:
        return id == ABOVE or (channel in self._latest and id > self._latest[channel])

    async def _has_begun(self, name: str) -> bool:
        """Whether the partition of a later epoch has its beginning in the line. One whose front was removed may have
        lost it: its owner begins it anew."""
        if name not in self._latest or (await self.describe(name)).first_id is None:
            return False
        async with reading(self, name, From.EARLIEST) as batches:
            async for entries in batches:
                if any(record_type(entry.payload) in _BEGUN for entry in entries):
                    return True
        return False

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def channels(self) -> list[str]:
        await self._check()
        there = {name for name in await self._wal.channels() if not is_replication_channel(name)}
        later = {name for name in there if self.line.is_of_nodes(name) and name not in self.line.ends}
        return sorted((there - later) | self._states.keys())

    async def describe(self, channel: str) -> ChannelInfo:
        if channel in self._states:
            policy, entries = self._states[channel]
            ids = [entry.id for entry in entries] or [None]
            return ChannelInfo(channel, policy, ids[0], ids[-1])
        if is_replication_channel(channel):
            raise ChannelNotFound(f"no channel {channel}", channel=channel)
        info = await self._wal.describe(channel)
        latest = self._latest.get(channel, info.latest_id)
        if not latest or info.first_id is None or info.first_id > latest:
            return replace(info, first_id=None, latest_id=None) if channel in self._latest else info
        return replace(info, latest_id=latest)

    async def latest_id(self, channel: str) -> bytes | None:
        return (await self.describe(channel)).latest_id

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        """What the line has of the channel; ends behind that, where it has an end."""
        if channel in self._states:
            if entries := [entry for entry in self._states[channel][1] if _is_from(entry, start)]:
                yield entries
            return
        latest = self._latest.get(channel)
        if latest == b"":
            return
        async with reading(self._wal, channel, start) as batches:
            async for entries in batches:
                if latest is None or entries[-1].id < latest:
                    yield entries
                    continue
                if last := [entry for entry in entries if entry.id <= latest]:
                    yield last
                return

    async def groups(self) -> list[GroupInfo]:
        found: list[GroupInfo] = []
        there = set(await self._wal.channels())
        for name, positions in self.line.groups.items():
            capped = {
                channel: min(each.id, self._latest.get(channel, each.id))
                for channel, each in positions.items()
                if channel in there
            }
            kept = {channel: await self._kept(name, channel, id) for channel, id in capped.items()}
            stored = {name: positions[name].metadata for name, id in kept.items() if id == positions[name].id}
            metadata = {channel: each for channel, each in stored.items() if each}  # others are about what is not there
            found.append(GroupInfo(name, {channel: id or None for channel, id in kept.items()}, {}, metadata))
        return found

    async def _kept(self, group: str, channel: str, id: bytes) -> bytes:
        """The position `id` of a group, b"" where retention has removed what follows: it goes on with what is left. The
        log in which somebody could move it is gone, and a replica is read-only."""
        if not await is_lost(self, await self.describe(channel), id):
            return id
        _log.warning(
            "group %s has not done all that retention has removed of %s: it goes on behind that", group, channel
        )
        return b""

    # ---- what a migration writes -------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._wal.create_channel(channel, policy)

    async def drop_channel(self, channel: str) -> None:
        await self._wal.drop_channel(channel)

    async def append(self, channel: str, payload: Payload, timestamp: int = 0, **options: Any) -> bytes:
        return await self._wal.append(channel, payload, timestamp, **options)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        if channel not in self._states:
            await self._wal.hold(channel, holder, id)


def _is_from(entry: Entry, start: Start) -> bool:
    if not isinstance(start, FromId):
        return True
    return entry.id >= start.id if start.inclusive else entry.id > start.id
