"""Whether a log is the source of replicas, a replica, a replica that was promoted, or a source whose replica was.

The log itself says so, in the channel `tidewal-replication`, which only replication creates. Each entry, or several
parts of a long one (`long_entries`), is the whole state as JSON, and counts only where it follows from what counts
before it (`_follows`): its number is higher, so of two that were written upon one state the first in the log's order
counts, and what a replicator writes that another one has replaced does not. Entries before the last that counts are
truncated. `open_wal` refuses to write to a replica, and to a source that another log has replaced.

An entry that stays keeps RocksMQ's retention, which removes the front of the journal only, from what lies behind. So a
log that is in use says what it is in the name of an empty channel (`mark_of`), and the entry is truncated (`settle`).
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

from ..errors import (
    ChannelNotFound,
    CorruptLog,
    InvalidRequest,
    Moved,
    PositionLost,
    PreconditionFailed,
    ReplicaReadOnly,
)
from ..waiting import to_its_end
from .long_entries import PART_BYTES, EntryReader, in_entries
from .wal import ChannelPolicy, Entry, FromId, Wal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

REPLICATION_CHANNEL = "tidewal-replication"
REPLICATION_POLICY = ChannelPolicy(retention_s=None)
REPLICATION_MARK_PREFIX = "tidewal-replication-"
REPLICA_MARK_PREFIX = "tidewal-replica-"  # and the `log_id` of a replica, in its source: an empty channel
_MARK = re.compile(re.escape(REPLICATION_MARK_PREFIX) + "([0-9a-f]{32})(?:-([0-9a-f]{32}))?")  # others: programs'
_REPLICA_MARK = re.compile(re.escape(REPLICA_MARK_PREFIX) + "[0-9a-f]{32}")
VERSION = 1


class ReplicationPhase(StrEnum):
    """What a log is to replication."""

    NONE = "none"  # it says nothing
    SOURCE = "source"  # it is in use, and replicas of it may be
    REPLICA = "replica"  # a replicator writes it, and nothing else
    PROMOTED = "promoted"  # it was a replica, and is in use by itself
    REPLACED = "replaced"  # it was a source, and a promoted replica has taken its place


@dataclass(frozen=True, slots=True)
class ReplicatedChannel:
    """How far a channel of the source is in the replica: up to the entry `source` there, which is the entry `target` in
    the replica; `timestamp` is the highest that was brought over. b"" for nothing yet. `halted` is the reason why it
    does not go on; "" where it does. `behind` entries more are in the replica, counted when it was promoted; `digest`
    and `behind_digest` are those of the entry and of these then, in hex, "" for none."""

    source: bytes = b""
    target: bytes = b""
    timestamp: int = 0
    halted: str = ""
    behind: int = 0
    digest: str = ""
    behind_digest: str = ""

    def to_wire(self) -> list[object]:
        """The wire form, for JSON."""
        rest = self.timestamp, self.halted, self.behind, self.digest, self.behind_digest
        return [self.source.hex(), self.target.hex(), *rest]


class GroupPlace(NamedTuple):
    """A group's position in a channel of the `source`, where that is in the replica (`target`), b"" before all, and
    what is stored with it there (`metadata`), with ids of the replica; b"" for nothing."""

    source: bytes
    target: bytes
    metadata: bytes = b""


GroupPlaces = Mapping[str, Mapping[str, GroupPlace]]
"""By group and channel."""


@dataclass(frozen=True, slots=True)
class ReplicationState:
    """The last that counts. `log_id` names this log, `source_id` the source of a replica, by its own `log_id`; `other`
    is the URL, without credentials, of a replica's source or of what replaced a source. `claim` names the replicator
    that writes the replica, "" where none does. `number` rises with each entry; a mark has none. `channels` of a
    source that was replaced are those that the replica was promoted with. `of_node`: nodes have used the source; `node`
    is, in a promotion, where they go on in the replica (`NodeProof.to_wire`), empty until that is known. `line` is what
    a promotion without the source goes on from (`ConsistentLine.to_wire`), empty until the replica has one, or is not
    of nodes; `line_kept` are the bytes that came to the replica since that was begun."""

    phase: ReplicationPhase = ReplicationPhase.NONE
    log_id: str = ""
    source_id: str = ""
    other: str = ""
    claim: str = ""
    number: int = 0
    channels: Mapping[str, ReplicatedChannel] = field(default_factory=dict[str, ReplicatedChannel])
    groups: GroupPlaces = field(default_factory=dict[str, "Mapping[str, GroupPlace]"])
    of_node: bool = False
    node: Mapping[str, Any] = field(default_factory=dict[str, Any])
    line: Mapping[str, Any] = field(default_factory=dict[str, Any])
    line_kept: int = 0

    def entries(self) -> list[bytes]:
        """The entries that say so: one, or parts, which count with the last, where it has very many channels."""
        without = replace(self, channels={}, groups={}, node={}, line={})  # these are large, and would be copied
        fields = {**asdict(without), "node": self.node, "line": self.line, "v": VERSION}
        fields["channels"] = {name: each.to_wire() for name, each in self.channels.items()}
        fields["groups"] = {
            group: {name: [part.hex() for part in each] for name, each in places.items()}
            for group, places in self.groups.items()
        }
        return in_entries(fields, PART_BYTES)


def _decoded(reader: EntryReader, entry: Entry) -> ReplicationState | None:
    """The state that an entry says; None while parts of it are missing."""
    try:
        fields = reader.take(bytes(entry.payload))
        if fields is None:
            return None
        fields["phase"] = ReplicationPhase(fields["phase"])
        fields["channels"] = {
            name: ReplicatedChannel(bytes.fromhex(source), bytes.fromhex(target), *rest)
            for name, (source, target, *rest) in fields["channels"].items()
        }
        fields["groups"] = {
            group: {name: GroupPlace(*map(bytes.fromhex, each)) for name, each in places.items()}
            for group, places in fields["groups"].items()
        }
        state = ReplicationState(**fields)
        _check_types(state)
        return state
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise CorruptLog(f"an entry of {REPLICATION_CHANNEL} cannot be read: {error}") from error


def _check_types(state: ReplicationState) -> None:
    """Raise `TypeError` where a field, of which JSON knows no type, is not of its own one."""
    texts: list[object] = [state.log_id, state.source_id, state.other, state.claim]
    numbers: list[object] = [state.number, state.line_kept]
    for place in state.channels.values():
        texts += [place.halted, place.digest, place.behind_digest]
        numbers += [place.timestamp, place.behind]
    others: list[object] = [state.of_node, state.node, state.line]
    if {*map(type, texts)} - {str} or {*map(type, numbers)} - {int} or [*map(type, others)] != [bool, dict, dict]:
        raise TypeError("a text, a number or the like is of another type")


_NEXT = {
    ReplicationPhase.NONE: set(ReplicationPhase),  # the first that is there: what was before it is truncated
    ReplicationPhase.SOURCE: {ReplicationPhase.REPLACED},
    ReplicationPhase.REPLICA: {ReplicationPhase.REPLICA, ReplicationPhase.PROMOTED},
    ReplicationPhase.PROMOTED: {ReplicationPhase.REPLACED},  # it may be a source as well
    ReplicationPhase.REPLACED: {ReplicationPhase.REPLACED},  # by the same log
}


def _follows(before: ReplicationState, after: ReplicationState) -> bool:
    """Whether `after` counts behind `before`."""
    same_log = before.phase is ReplicationPhase.NONE or before.log_id == after.log_id
    if before.phase is ReplicationPhase.REPLACED and before.source_id != after.source_id:
        return False
    return same_log and after.number > before.number and after.phase in _NEXT[before.phase]


def _behind_entry(before: ReplicationState, reader: EntryReader, entry: Entry) -> ReplicationState:
    """What a log says with one more entry."""
    after = _decoded(reader, entry)
    return after if after is not None and _follows(before, after) else before


def mark_of(state: ReplicationState) -> str:
    """The name of the empty channel that says what `state` does, a source's or a promoted replica's."""
    return REPLICATION_MARK_PREFIX + "-".join(filter(None, (state.log_id, state.source_id)))


def is_replication_channel(name: str) -> bool:
    """Whether replication has made the channel, for itself."""
    return name == REPLICATION_CHANNEL or any(mark.fullmatch(name) for mark in (_MARK, _REPLICA_MARK))


def replica_mark(state: ReplicationState) -> str:
    """The name of the empty channel by which a source knows that it holds entries for the replica that says `state`."""
    return REPLICA_MARK_PREFIX + state.log_id


def replicas_of(names: Iterable[str]) -> list[str]:
    """The `log_id` of each replica for which a source that has the channels `names` holds entries."""
    return [name.removeprefix(REPLICA_MARK_PREFIX) for name in names if _REPLICA_MARK.fullmatch(name)]


def _of_mark(mark: re.Match[str]) -> ReplicationState:
    log_id, source_id = mark[1], mark[2] or ""
    return ReplicationState(
        ReplicationPhase.PROMOTED if source_id else ReplicationPhase.SOURCE, log_id=log_id, source_id=source_id
    )


def replication_in(entries: Iterable[Entry]) -> ReplicationState:
    """What the entries of a log's `REPLICATION_CHANNEL` say. Raises `FormatTooNew`, `CorruptLog`."""
    reader, state = EntryReader("replication", VERSION), ReplicationState()
    for entry in entries:
        state = _behind_entry(state, reader, entry)
    return state


def replica_id(names: Iterable[str], state: ReplicationState) -> str:
    """What tells a replica, promoted or not, from its source, whose entries have other ids: its `log_id`; "" for a log
    that is none. It has the channels `names`, and its `REPLICATION_CHANNEL` says `state`."""
    marks = filter(None, map(_MARK.fullmatch, names))
    of_mark = next((mark[1] for mark in marks if mark[2]), "")
    is_replica = state.phase in (ReplicationPhase.REPLICA, ReplicationPhase.PROMOTED)
    return of_mark or (state.log_id if is_replica else "")


def behind(id: bytes) -> bytes:
    """The least id of its length above `id`. A hold there keeps all that follows `id`, and not its entry: that would
    keep the whole log of a channel that is idle."""
    return (int.from_bytes(id) + 1).to_bytes(len(id)) if id else id


class ReplicationStates:
    """The state of one log as it was last read, and changes of it. One task at a time uses it."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self._read_to: bytes = b""
        self._reader = EntryReader("replication", VERSION)
        self.state: ReplicationState = ReplicationState()
        self.is_settled: bool = False  # a mark says what `state` does

    async def read(self) -> ReplicationState:
        """What the log says now. Raises `FormatTooNew`, `CorruptLog`, and errors of the log."""
        await self.read_entries()
        if self.state.phase in (ReplicationPhase.NONE, ReplicationPhase.SOURCE, ReplicationPhase.PROMOTED):
            marked = await self._marked()
            self.is_settled = marked is not None
            if marked is not None and self.state.phase is ReplicationPhase.NONE:
                self.state = marked
        return self.state

    async def _marked(self) -> ReplicationState | None:
        marks = [mark for name in sorted(await self._wal.channels()) if (mark := _MARK.fullmatch(name))]
        return _of_mark(marks[0]) if marks else None

    async def read_entries(self) -> ReplicationState:
        """What its entries say now: all but that it is settled. Raises as `read`."""
        while True:
            try:
                info = await self._wal.describe(REPLICATION_CHANNEL)
            except ChannelNotFound:
                return self.state
            if info.first_id is None or info.latest_id is None or self._read_to >= info.latest_id:
                return self.state
            is_next = self._read_to >= info.first_id
            if not is_next:
                self._reader = EntryReader("replication", VERSION)
            start = FromId(self._read_to) if is_next else FromId(info.first_id, inclusive=True)
            try:
                await self._read_from(start, info.latest_id)
            except PositionLost:  # truncated meanwhile: what is there now says it all
                continue

    async def _read_from(self, start: FromId, upto: bytes) -> None:
        batches = cast("AsyncGenerator[Sequence[Entry], None]", self._wal.read(REPLICATION_CHANNEL, start))
        async with aclosing(batches):
            async for entries in batches:
                for entry in entries:
                    self.state = _behind_entry(self.state, self._reader, entry)
                    self._read_to = entry.id
                if self._read_to >= upto:
                    return

    async def change(self, after: ReplicationState) -> None:
        """Let the log say `after`, with the next number, durably, and read it back. Raises `PreconditionFailed` where
        the log said something else by then, which is `state` now."""
        after = replace(after, number=self.state.number + 1)
        await self._wal.create_channel(REPLICATION_CHANNEL, REPLICATION_POLICY)
        ids: list[bytes] = []
        for entry in after.entries():
            append = self._wal.append(REPLICATION_CHANNEL, entry)
            ids.append(await to_its_end(asyncio.ensure_future(append)))  # else a change behind might not know of it
        if await self.read() != after:
            raise PreconditionFailed(f"the replication of this log was changed meanwhile: it is {self.state.phase} now")
        if self._wal.capabilities.truncate:
            await self._wal.truncate(REPLICATION_CHANNEL, ids[0])

    async def settle(self) -> None:
        """Let a mark say what `state` does, a source's or a promoted replica's, and truncate the entry: how far its
        channels are, and its `other`, are gone then. May be repeated. Of two that settle a new source at once the first
        one counts, which is `state` then: it makes its mark before it truncates what the other one looks for."""
        marked = await self._marked()
        if marked is None:
            await self._wal.create_channel(mark_of(self.state), ChannelPolicy())
            marked = ReplicationState(self.state.phase, self.state.log_id, self.state.source_id)
        self.state, self.is_settled = replace(marked, number=self.state.number), True
        if self._read_to and self._wal.capabilities.truncate:
            await self._wal.truncate(REPLICATION_CHANNEL, behind(self._read_to))


async def replication_state(wal: Wal) -> ReplicationState:
    """What `wal` says now. Raises as `ReplicationStates.read`."""
    return await ReplicationStates(wal).read()


async def check_not_replica(wal: Wal, shown: str) -> None:
    """Raise `ReplicaReadOnly` where the log, whose URL without credentials is `shown`, is a replica, and `Moved` where
    one has taken its place."""
    state = await ReplicationStates(wal).read_entries()  # a log with a mark is in use
    if state.phase is ReplicationPhase.REPLICA:
        raise ReplicaReadOnly(
            f"{shown} is a replica of {state.other}: open it with read_only=True, or promote it (`tidewal promote`)",
            source=state.other,
        )
    check_not_replaced(state, shown)


def check_not_replaced(state: ReplicationState, shown: str) -> None:
    """Raise `Moved` where the log, shown as `shown`, says `state`, and a replica has taken its place."""
    if state.phase is ReplicationPhase.REPLACED:
        raise Moved(
            f"a replica of {shown} was promoted and has taken its place: set wal to {state.other}, with the "
            "credentials for it",
            url=state.other,
        )


async def check_source_fenced(wal: Wal) -> None:
    """Raise `InvalidRequest` where `wal` is a replica that was promoted without its source, which was not fenced since:
    what that had beyond could not be salvaged any more when another log takes the place of `wal`."""
    states = ReplicationStates(wal)
    state = await states.read()
    if state.phase is ReplicationPhase.PROMOTED and not states.is_settled:
        raise InvalidRequest(
            f"this log was promoted without its source, {state.other}, which was not fenced since: do that with "
            "`tidewal promote --from --salvage`, or give it up with `tidewal promote --forget`, and go on"
        )


def new_id() -> str:
    """An id for a log or a replicator."""
    return uuid4().hex
