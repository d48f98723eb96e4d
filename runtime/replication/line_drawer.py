"""Draws lines across the channels of nodes while a replicator mirrors them.

A line is drawn in two steps, so that what a group has acknowledged is in the line with all that was written before:

1. `begin`: where groups stand, and with what, where each channel begins, and, behind that, where it ends in the source
2. `draw`: once the replica has all of these ends, and the owners have promised all that is there (the time of the
   line), the states are read. What they say of later entries is left out when the line is used.

The states are read behind the promises, so whatever an entry of the line rests on is in them: a grant, a topic. Of the
transactions alone it is exact which are of the line, as they are decided at a time: no owner promises that time before.
And what of the states rests on entries without naming them is that of the first step: these are of the line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from ..catalog.catalog import Catalog
from ..catalog.stored_ids import IdIn, as_settled
from ..catalog.topics import Topic
from ..cluster.decided_positions import DecidedPositions
from ..cluster.state import ClusterState
from ..cluster.transaction_decisions import DECIDE
from ..errors import BadRecord, ChannelNotFound, PositionLost, TidewalError
from ..log.heartbeats import Announcement, heard
from ..log.ledger_body import STAGED, is_ledger
from ..log.names import Names
from ..log.record import RecordType
from ..log.replication_state import GroupPlaces, ReplicatedChannel, behind
from ..log.wal import Entry, From, Wal
from ..migration.moved_state import MovedState, StateKind
from ..migration.node_log import CATALOG_KIND, CLUSTER_KIND
from ..replicated.records import decode_entry
from ..streams.stream_base import reading
from ..waiting import side_by_side
from .channel_promise import ChannelPromise
from .consistent_line import ABOVE, ConsistentLine, StoredState
from .line_groups import LineGroups
from .replicated_node import is_written_anew, kept_from, replicated_place

PAUSE_S = 0.5  # before a channel of heartbeats that is not there, or not now, is looked for again
NAMES_SHOWN = 3  # in a reason
AUTHOR = "replication"
FIRST = bytes(7) + b"\1"
"""The id of the first entry of a saved state, by which the others name it."""


class _Waits(Exception):
    """No line can be drawn yet, for the reason that it says."""


class _Begun:
    """The first step of a line. `catalog` is that of then."""

    def __init__(self, catalog: Catalog, groups: LineGroups, least: int) -> None:
        self.groups = groups
        self._checkpoints = {name: each.checkpoint for name, each in catalog.channels.items()}
        self._drained = {name for topic in catalog.topics for name in topic.drained}
        self._pending = {topic.id: _delay_channels(topic) - topic.drained for topic in catalog.topics}
        self.least = least  # time of the line, which has the transactions that have moved these groups
        self.kept: dict[str, bytes] = {}  # from which id on the replica keeps each channel, once the line is drawn
        self.ends: dict[str, bytes] = {}
        self.time: int | None = None  # the same, once the replica has all of the ends: at least all their timestamps

    def settled(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """A later snapshot of the catalog, with what the entries bear out that were there by then."""
        return as_settled(snapshot, self._checkpoints, self._drained)

    def retired(self, catalog: Catalog) -> set[str]:
        """The delay channels that had something pending then, and went with their epochs since: of what was released
        last the line may lack where it went."""
        there = {topic.id: _delay_channels(topic) for topic in catalog.topics}
        return {name for id, pending in self._pending.items() for name in pending - there.get(id, pending)}


class LineDrawer:
    """Draws the lines of the replica `target` of `source`, a log of nodes with these `names`."""

    def __init__(self, source: Wal, target: Wal, names: Names) -> None:
        self._source, self._target, self._names = source, target, names
        self._begun: _Begun | None = None
        self._fronts: dict[str, tuple[bytes | None, bytes | None]] = {}  # of the source, and in the replica, as known
        self._places: dict[str, dict[bytes, bytes]] = {}  # of ids of the source, in the replica
        self._read: tuple[bytes | None, MovedState[Catalog]] | None = None  # the catalog, as of its last entry
        self._members: tuple[bytes | None, ClusterState] = (b"", ClusterState())  # likewise
        self._placed: frozenset[str] = frozenset()  # channels of other names that the catalog has
        self.waits_for: str = ""  # why no line could be drawn the last time; "" where one was

    @property
    def is_begun(self) -> bool:
        """Whether a line waits to be drawn."""
        return self._begun is not None

    async def follow(self, promise_of: Callable[[str], ChannelPromise | None]) -> None:
        """Pass on what the owners announce to the promises of the channels, until cancelled."""
        while True:
            with suppress(TidewalError):  # not there yet, or not now: ticks tell the time of what is written
                async with reading(self._source, self._names.heartbeats, From.LATEST) as batches:
                    async for entries in batches:
                        for announced in (each for entry in entries for each in heard(entry.payload)):
                            if (promise := promise_of(announced.channel)) is not None:
                                promise.announce(announced)
            await asyncio.sleep(PAUSE_S)

    def forget(self, channel: str) -> None:
        """The channel is gone, or is brought over anew."""
        self._places.pop(channel, None)
        self._fronts.pop(channel, None)
        self._begun = None

    # ---- the first step ----------------------------------------------------------------------------------------------

    async def begin(self, known: GroupPlaces, places: Mapping[str, ReplicatedChannel]) -> None:
        """Begin a line. `known` is where groups were last seen, and `places` how far the channels are."""
        catalog = await self._catalog()
        decided = (await self._cluster()).transactions.positions
        has_groups = self._source.capabilities.groups and self._target.capabilities.groups
        groups = LineGroups(await self._source.groups() if has_groups else [], decided, known)
        known_catalog = catalog.state if catalog is not None else Catalog()
        begun = _Begun(known_catalog, groups, (await self._cluster()).transactions.latest)

        async def note(name: str) -> None:
            with suppress(ChannelNotFound, PositionLost):  # dropped meanwhile, or cut: the next line looks again
                await self._note(begun, name, places[name])

        await side_by_side(places, note)
        self._begun = begun

    async def _note(self, begun: _Begun, name: str, place: ReplicatedChannel) -> None:
        info = await self._source.describe(name)
        if self._is_cut(name) and info.latest_id:
            begun.ends[name] = info.latest_id
        if not place.source:
            return
        front, kept = self._fronts.get(name, (b"", None))
        if front != info.first_id:
            kept = await kept_from(self._source, self._target, info)
            self._fronts[name] = (info.first_id if kept is not None else b""), kept
        begun.kept[name] = behind(place.target) if kept is None else min(kept, behind(place.target))

    def _is_cut(self, name: str) -> bool:
        """Whether the channel ends at the line. The ledger of a Spark query, which is halted, is in none."""
        is_left_out = is_ledger(name.removesuffix(STAGED)) or is_written_anew(name, self._names)
        return (name.startswith(f"{self._names.prefix}-") and not is_left_out) or name in self._placed

    async def look(self, places: Mapping[str, ReplicatedChannel], promises: Mapping[str, ChannelPromise]) -> None:
        """See whether the replica has the ends of the line that was begun. To be called now and then."""
        begun = self._begun
        if begun is None or begun.time is not None:
            return
        if all(name not in places or places[name].source >= end for name, end in begun.ends.items()):
            _ask(promises)
            await self._judge(promises)
            begun.time = max(begun.least, *(promises[name].written for name in begun.ends.keys() & promises.keys()), 0)

    async def _judge(self, promises: Mapping[str, ChannelPromise]) -> tuple[MovedState[Catalog] | None, dict[str, int]]:
        """The catalog, and what had been promised of its channels when that was asked: of what was noted by then counts
        what an owner can have written."""
        catalog = await self._catalog()
        if catalog is None:
            return None, {}
        owned = catalog.state.channels.keys() & promises.keys()
        return catalog, {name: promises[name].judge(catalog.state.granted(name)) for name in owned}

    def log_time(self, promises: Mapping[str, ChannelPromise]) -> int:
        """The highest time that the channels of nodes are known to have, in the replica or by what was announced."""
        return max((max(each.written, each.latest) for name, each in promises.items() if self._is_cut(name)), default=0)

    # ---- the second step ---------------------------------------------------------------------------------------------

    async def draw(
        self, places: Mapping[str, ReplicatedChannel], promises: Mapping[str, ChannelPromise]
    ) -> tuple[ConsistentLine, Mapping[str, bytes]] | None:
        """The line that was begun, and from which id on the replica keeps each channel once that is saved; None where
        it cannot be drawn yet. `places` are those of now, with their `promises`: what comes while this waits is not of
        the line, so a time that is promised meanwhile is not its time."""
        begun = self._begun
        if begun is None:
            return None
        _ask(promises)
        try:
            line = await self._drawn(begun, places, promises)
        except _Waits as waits:
            self.waits_for = str(waits)
            return None
        self._begun, self.waits_for = None, ""
        return line, begun.kept

    async def _drawn(
        self, begun: _Begun, places: Mapping[str, ReplicatedChannel], promises: Mapping[str, ChannelPromise]
    ) -> ConsistentLine:
        if begun.time is None:
            late = [name for name, end in begun.ends.items() if name in places and places[name].source < end]
            raise _Waits(f"the replica lacks what is in {_shown(late)}" if late else "the replica has just got its end")
        arrived = await self._arrived(places, promises, begun.time)
        catalog, promised = await self._judge(promises)
        for name in arrived.keys() & promised.keys():
            promised[name] = max(promised[name], promises[name].arrive(arrived[name]))
        cut = {name for name in places if self._is_cut(name)}
        if catalog is not None:
            if retired := begun.retired(catalog.state):
                self._begun = None
                raise _Waits(f"{_shown(retired)} was removed just now")
            if missing := catalog.state.pchannels - places.keys():  # made just now, or refused
                raise _Waits(f"the replica does not have {_shown(missing)}")
            if others := {name for name in catalog.state.channels if not self._is_cut(name)}:
                self._placed, self._begun = self._placed | others, None
                raise _Waits(f"{_shown(others)} came to the channels of nodes just now")
            cut = _channels_of(catalog.state, cut)
        time = await self._time(catalog, {name: places[name] for name in cut}, promises, promised, begun.time)
        states, decided = await self._states(begun, catalog, time, places)
        groups = await begun.groups.at_line(self._source, self._target, places, decided)
        ends = {name: places[name].target for name in cut}
        ends_in_source = {name: places[name].source for name in cut}
        return ConsistentLine(time, f"{self._names.prefix}-", ends, ends_in_source, states, groups)

    async def _arrived(
        self, places: Mapping[str, ReplicatedChannel], promises: Mapping[str, ChannelPromise], least: int
    ) -> dict[str, Announcement]:
        """The heartbeats that wait for a record which the replica has at these places. A replicator that has just begun
        knows the last entry alone, which may be one of a fenced owner that landed late: whose replica has all of the
        channel has the record, too."""
        late = {name: promise.awaited for name, promise in promises.items() if promise.time < least}
        awaited = {name: announced for name, announced in late.items() if announced is not None}
        arrived: dict[str, Announcement] = {}

        async def look(name: str) -> None:
            with suppress(ChannelNotFound):  # dropped meanwhile: the catalog, read behind this, says so
                if (await self._source.latest_id(name) or b"") == places[name].source:
                    arrived[name] = awaited[name]

        await side_by_side(awaited, look)
        return arrived

    async def _time(
        self,
        catalog: MovedState[Catalog] | None,
        places: Mapping[str, ReplicatedChannel],
        promises: Mapping[str, ChannelPromise],
        promised: Mapping[str, int],
        least: int,
    ) -> int:
        """Up to which time, at `least` that, the channels, which are so far, are complete, of what the catalog knows.
        One without an owner is up to its last limit, where nothing came to it since: its next owner stamps later times,
        and may do so before those that other owners have promised. One that no node is to own any more stays with an
        owner that was killed, which promises nothing."""
        channels = {} if catalog is None else catalog.state.channels
        wanted = set[str]() if catalog is None else catalog.state.pchannels
        members = (await self._cluster()).members  # behind the catalog: who owns a channel there has joined
        times: dict[str, int] = {}
        given_up: dict[str, int] = {}
        for name, place in places.items():
            state = channels.get(name)
            if state is not None and state.owner and (name in wanted or state.owner in members):
                if not promised.get(name):
                    raise _Waits(f"{state.owner}, the owner of {name}, has promised no time since it has it")
                times[name] = promised[name]
            elif state is not None:
                if (await self._source.latest_id(name) or b"") != place.source:
                    raise _Waits(f"the replica lacks the end of {name}, which has no owner")
                if name in wanted:
                    given_up[name] = state.used_limit
        if late := [name for name, time in times.items() if time < least]:
            owners = {channels[name].owner for name in late}
            raise _Waits(f"{_shown(owners)} has not promised a later time for {_shown(late)}")
        if times and (late := [name for name, time in given_up.items() if time < least]):
            raise _Waits(f"{_shown(late)} has no owner just now")
        if times:
            return min([*times.values(), *given_up.values()])
        time = max([0, *(promises[name].written for name in places), *(each.used_limit for each in channels.values())])
        if time < least:
            raise _Waits("no channel has an owner, and one is to write a transaction that is committed")
        return time

    # ---- the states --------------------------------------------------------------------------------------------------

    async def _catalog(self) -> MovedState[Catalog] | None:
        name = self._names.catalog
        if not await self._has(name):
            return None
        latest = await self._source.latest_id(name)
        if self._read is None or self._read[0] != latest:  # large, and at rest most of the time
            self._read = latest, await MovedState[Catalog].read(self._source, name, CATALOG_KIND)
        return self._read[1]

    async def _states(
        self,
        begun: _Begun,
        catalog: MovedState[Catalog] | None,
        time: int,
        places: Mapping[str, ReplicatedChannel],
    ) -> tuple[dict[str, StoredState], DecidedPositions]:
        """The states as of the line, with ids of the replica, and the positions that transactions have moved, with
        those of the source."""
        states: list[tuple[MovedState[Any], StateKind[Any], Callable[[Any], Any]]] = []
        if catalog is not None:
            states.append((catalog, CATALOG_KIND, begun.settled))
        decided = DecidedPositions()
        if await self._has(self._names.cluster):
            counts = _DecidedUpTo(time)
            cluster = await MovedState[ClusterState].read(self._source, self._names.cluster, CLUSTER_KIND, counts)
            decided = cluster.state.transactions.positions
            if cluster.state.transactions.latest > time:
                raise _Waits("a snapshot of the members' state has a transaction that was committed later")
            states.append((cluster, CLUSTER_KIND, lambda snapshot: snapshot))
        found: dict[str, StoredState] = {}
        for state, kind, settled in states:
            for channel, ids in state.ids(settled).items():
                await self._find(channel, ids, places.get(channel))
            entries = state.entries_with(
                AUTHOR,
                FIRST,
                lambda snapshot, kind=kind, settled=settled: kind.with_ids(settled(snapshot), self._id_in),
            )
            found[state.channel] = StoredState(state.policy, entries)
        return found, decided

    async def _cluster(self) -> ClusterState:
        """The members, and how transactions were decided, until now."""
        name = self._names.cluster
        if not await self._has(name):
            return ClusterState()
        latest = await self._source.latest_id(name)
        if self._members[0] != latest:
            self._members = latest, (await MovedState[ClusterState].read(self._source, name, CLUSTER_KIND)).state
        return self._members[1]

    @property
    def _id_in(self) -> IdIn:
        return lambda channel, id: self._places.get(channel, {}).get(id, b"")

    async def _find(self, channel: str, ids: set[bytes], place: ReplicatedChannel | None) -> None:
        """Know where the entries are in the replica; what it will have later is `ABOVE`."""
        known, found = self._places.get(channel, {}), dict[bytes, bytes]()
        for id in ids if place is not None else ():
            if id in known and known[id] != ABOVE:
                found[id] = known[id]
            elif place is not None and id > place.source:
                found[id] = ABOVE
            else:
                with suppress(ChannelNotFound, PositionLost):
                    found[id] = await replicated_place(self._source, self._target, channel, id)
        self._places[channel] = found

    async def _has(self, channel: str) -> bool:
        return channel in await self._source.channels()


def _ask(promises: Mapping[str, ChannelPromise]) -> None:
    for promise in promises.values():
        promise.ask()


def _shown(names: Collection[str]) -> str:
    first = sorted(names)[:NAMES_SHOWN]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _delay_channels(topic: Topic) -> set[str]:
    return set(topic.delay_channels.values()) if topic.delays else set()


def _channels_of(catalog: Catalog, names: set[str]) -> set[str]:
    """Those of the channels that are not about to be removed."""
    topics = {name: catalog.topics.of_channel(name) for name in names}
    return {name for name, topic in topics.items() if topic is None or not topic.is_to_go(name)}


class _DecidedUpTo:
    """Which records of the cluster count in a line: all but decisions of transactions above it."""

    def __init__(self, time: int) -> None:
        self._time = time

    def __call__(self, entry: Entry) -> bool:
        try:
            event = decode_entry(entry, RecordType.CLUSTER).event
        except BadRecord:
            return True
        ts: object = event.get("ts")
        return event["kind"] != DECIDE or not isinstance(ts, int) or ts <= self._time
