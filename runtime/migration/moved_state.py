"""A replicated state of a log that is migrated: read to its end, and written anew, with the ids of the new log.

Its records cannot be copied: a claim is named by its id, and a snapshot by that of the record behind which it holds. So
the new channel begins with a record of the migration, a claim or `begin`, and a snapshot as of that. What decides on
records to come, the level and the numbers of authors, is in the snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import msgpack

from ..catalog.stored_ids import IdIn
from ..log.record import RecordType, stamp
from ..log.wal import ChannelInfo, ChannelPolicy, Entry, Wal
from ..replicated.fold import Fold, State
from ..replicated.records import BEGIN, LEVELS, Claim, Event, beginning_level, claim_event, encode_event, pages_of
from .channel_copy import Check, hold_channel, stored_entries
from .compared_channel import ChannelProof, checksum_of

CLAIM_TERM = 1  # that of a log's first claim


@dataclass(frozen=True, slots=True)
class StateKind(Generic[State]):
    """What kind of state a channel has: how its records are read (`create`, `type`, `led` of `Fold`), and `with_ids`,
    which returns a snapshot of it with other ids."""

    create: Callable[[], State]
    type: RecordType
    led: bool
    with_ids: Callable[[Any, IdIn], Any]


class MovedState(Generic[State]):
    """The state of one channel as it was when it was read. `state` is its content, `begun` says whether it has any, and
    `entries` whether the channel has."""

    def __init__(self, info: ChannelInfo, kind: StateKind[State], fold: Fold[State], time: int) -> None:
        self._info, self._kind, self._fold, self._time = info, kind, fold, time
        self._packed: bytes | None = None  # the snapshot, which is taken once: it is dear, and nothing more is read

    @classmethod
    async def read(
        cls, old: Wal, channel: str, kind: StateKind[State], counts: Callable[[Entry], bool] = lambda _: True
    ) -> MovedState[State]:
        """Read the channel to its present end. Entries that no node can read are passed over, as nodes do, and so are
        those for which `counts` is false. Raises `CorruptLog`, and `FormatTooNew` for what a newer Tidewal has
        written."""
        info = await old.describe(channel)
        fold = Fold(kind.create, kind.type, led=kind.led)
        time = 0
        async for entry in stored_entries(old, info):
            if not counts(entry):
                continue
            fold.read(entry)
            time = max(time, entry.timestamp)
        fold.finish()
        return cls(info, kind, fold, time)

    @property
    def channel(self) -> str:
        return self._info.name

    @property
    def policy(self) -> ChannelPolicy:
        return self._info.policy

    @property
    def time(self) -> int:
        """The highest timestamp of its entries."""
        return self._time

    @property
    def state(self) -> State:
        return self._fold.state

    @property
    def begun(self) -> bool:
        return self._fold.begun

    @property
    def entries(self) -> bool:
        return self._info.first_id is not None

    def ids(self, changed: Callable[[Any], Any] = lambda snapshot: snapshot) -> Mapping[str, set[bytes]]:
        """The ids that the state holds, by channel, as `changed` returns its snapshot."""
        found: defaultdict[str, set[bytes]] = defaultdict(set)

        def note(channel: str, id: bytes) -> bytes:
            found[channel].add(id)
            return id

        self._kind.with_ids(changed(self._snapshot()), note)
        return found

    async def write(self, new: Wal, author: str, id_in: IdIn, check: Check) -> ChannelProof:
        """Let the channel in `new`, where it is there, hold this state, as `author` writes it, with the ids that
        `id_in` returns, and nothing else; what an earlier run has left there is gone on with, or begun anew. `check` is
        called before each write. Returns what is there."""
        name = self._info.name
        there = await _content(new, name)
        wanted = self._entries(author, id_in, there[0].id) if there else []
        if [(entry.timestamp, bytes(entry.payload)) for entry in there] != wanted[: len(there)]:
            await check()
            await new.drop_channel(name)
            await check()
            await new.create_channel(name, self._info.policy)
            there = []
        if self.begun and not there:
            await check()
            first = await new.append(name, self._first(author), self._time)
            wanted, there = self._entries(author, id_in, first), await _content(new, name)
        for timestamp, payload in wanted[len(there) :]:
            await check()
            await new.append(name, payload, timestamp)
        await hold_channel(new, name)
        return self._proof(await _content(new, name))

    def _proof(self, entries: Sequence[Entry]) -> ChannelProof:
        size, last_new = sum(len(entry.payload) for entry in entries), entries[-1].id if entries else b""
        last_old = self._info.latest_id or b""
        return ChannelProof(len(entries), size, checksum_of(entries), last_old, last_new, last_old)

    def _snapshot(self) -> Any:
        """The state as readers of a snapshot in the log have it."""
        if self._packed is None:
            self._packed = cast(bytes, msgpack.packb(self._fold.state.snapshot()))
        return cast(Any, msgpack.unpackb(self._packed, strict_map_key=False))

    def _entries(self, author: str, id_in: IdIn, first: bytes) -> list[tuple[int, bytes]]:
        return self.entries_with(author, first, lambda snapshot: self._kind.with_ids(snapshot, id_in))

    def entries_with(self, author: str, first: bytes, changed: Callable[[Any], Any]) -> list[tuple[int, bytes]]:
        """Timestamps and payloads of a channel that holds this state, as `author` writes it and `changed` returns its
        snapshot, and nothing else; its first entry has the id `first`."""
        if not self.begun:
            return []
        claim = Claim(first, CLAIM_TERM, author) if self._kind.led else Claim()
        snapshot = self._fold.snapshot_for(claim, changed(self._snapshot()))
        pages = pages_of(snapshot, first, self._fold.level)
        payloads = [self._first(author), *(self._payload(page, author, 0, None) for page in pages)]
        return [(self._time, payload) for payload in payloads]

    def _first(self, author: str) -> bytes:
        if self._kind.led:
            return self._payload(claim_event(author, Claim(), LEVELS), author, 1, Claim(b"", CLAIM_TERM, author))
        return self._payload({"kind": BEGIN, **beginning_level(LEVELS)}, author, 1, None)

    def _payload(self, event: Event, author: str, number: int, claim: Claim | None) -> bytes:
        record = encode_event(self._kind.type, event, author, number, claim)
        return stamp(record, self._time, record.term, 0)


async def _content(wal: Wal, channel: str) -> list[Entry]:
    return [entry async for entry in stored_entries(wal, await wal.describe(channel))]
