"""Whether a log is in use, is being migrated, was migrated, or is the target of a migration that has not ended.

The log itself says so, in the channel `tidewal-migration`, which only a migration creates: a log without it is in use.
Its entries are JSON, states or parts of long ones, and each state counts only where it follows from what counts before
it (`_follows`), so of two migrations that begin at once the log's order decides. `open_wal` refuses to write to a log
that is not in use.

A log comes into use when that channel is dropped, so that no entry stays in it which would keep RocksMQ's retention,
which removes the front of the journal only, from what lies behind. The target of a migration keeps an empty channel
that bears its id (`mark_of`): by this a repeated call, and the translation of positions, know that log.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from ..errors import ChannelNotFound, ConfigError, CorruptLog, Moved, PreconditionFailed, Unavailable
from .long_entries import EntryReader, in_entries
from .replication_state import check_not_replica, is_replication_channel
from .wal import ChannelPolicy, Entry, FromId, Wal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

MIGRATION_CHANNEL = "tidewal-migration"
MIGRATION_POLICY = ChannelPolicy(retention_s=None)
MARK_PREFIX = "tidewal-migrated-"
MARK = re.compile(re.escape(MARK_PREFIX) + "[0-9a-f]{32}")  # others that begin so are programs'
VERSION = 1
SHORT_BYTES = 4 * 1024  # of the last entry, which each look reads again


def mark_of(id: str) -> str:
    """The empty channel of a log to which the migration `id` has brought everything."""
    return MARK_PREFIX + id


def is_migration_channel(name: str) -> bool:
    """Whether migrations or replication have made the channel: no group of a pattern gets it, and none is migrated."""
    return name == MIGRATION_CHANNEL or MARK.fullmatch(name) is not None or is_replication_channel(name)


class MigrationPhase(StrEnum):
    """What may be done with a log."""

    OPEN = "open"  # it is in use, and says nothing
    PREPARING = "preparing"  # it is in use, and what it has is copied to another log meanwhile
    MIGRATING = "migrating"  # it is being copied to another log; that can be taken back
    CANCELLING = "cancelling"  # that is being taken back; a late record that it is migrated does not count any more
    MIGRATED = "migrated"  # the other log has everything, and takes its place
    RESERVED = "reserved"  # it is to be the target of a migration; whatever it has is not of that one
    PENDING = "pending"  # it is the target, was empty when it was reserved, and has not everything yet

    @property
    def in_use(self) -> bool:
        """Whether programs may write to the log."""
        return self in (MigrationPhase.OPEN, MigrationPhase.PREPARING)


_FOLLOWING = {  # which phases follow one, of the same run
    MigrationPhase.PREPARING: (MigrationPhase.MIGRATING, MigrationPhase.CANCELLING),
    MigrationPhase.MIGRATING: (MigrationPhase.PREPARING, MigrationPhase.MIGRATED, MigrationPhase.CANCELLING),
    MigrationPhase.MIGRATED: (MigrationPhase.MIGRATED, MigrationPhase.CANCELLING),
}


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The last that counts of the migrations of a log. `id` is that of the migration, `other` the URL, without
    credentials, of the log that it goes to or comes from, and `proof` what was found equal (`MigrationProof`), or,
    while it is `migrating`, whether it was in use before. `run` is the run that has the migration, "" for none
    (`MigrationRun`), and `number` how often runs have claimed it or let go of it by then. The record of a claim has no
    proof: what was proven before it goes on to count."""

    phase: MigrationPhase = MigrationPhase.OPEN
    id: str = ""
    other: str = ""
    proof: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run: str = ""
    number: int = 0

    def entries(self) -> list[bytes]:
        """The entries that say so: one, or as many parts as the proof needs, and a short one, with which it counts."""
        return in_entries({"v": VERSION, **asdict(self)}, SHORT_BYTES)


class _StateReader:
    """Reads the entries of a log's state in order."""

    def __init__(self) -> None:
        self._entries = EntryReader("migration", VERSION)

    def take(self, entry: Entry) -> MigrationState | None:
        """The state that an entry says; None while parts of it are missing."""
        try:
            fields = self._entries.take(bytes(entry.payload))
            if fields is None:
                return None
            fields["phase"] = MigrationPhase(fields["phase"])
            return MigrationState(**fields)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise CorruptLog(f"an entry of {MIGRATION_CHANNEL} cannot be read: {error}") from error


def _follows(before: MigrationState, after: MigrationState) -> bool:
    """Whether `after` counts behind `before`."""
    if after.phase is MigrationPhase.RESERVED:
        return before == MigrationState()
    if after.phase is MigrationPhase.PENDING:
        return before == replace(after, phase=MigrationPhase.RESERVED)
    if before.phase is MigrationPhase.OPEN:
        begins = after.phase in (MigrationPhase.PREPARING, MigrationPhase.MIGRATING)
        return begins and not after.number  # else a late claim of one taken back
    if after.id != before.id:
        return False
    if after.run != before.run:  # a run that claims the migration, or lets go of it
        return after.number == before.number + 1 and after.phase is before.phase
    return after.phase in _FOLLOWING.get(before.phase, ())


def _next(before: MigrationState, after: MigrationState) -> MigrationState:
    """What a log says with the record `after`, which counts behind `before`."""
    is_claim = before.run != after.run and before.phase is not MigrationPhase.OPEN
    return replace(after, proof=before.proof) if is_claim else after


def state_in(entries: Iterable[Entry]) -> MigrationState:
    """What a log says whose `MIGRATION_CHANNEL` has these entries. Raises `FormatTooNew` and `CorruptLog`."""
    reader, state = _StateReader(), MigrationState()
    for entry in entries:
        after = reader.take(entry)
        if after is not None and _follows(state, after):
            state = _next(state, after)
    return state


class MigrationStates:
    """The state of one log as it was last read, and changes of it. One task at a time uses it.

    It reads on from the last entry that it has read, which comes once more: where another one has its place now, the
    channel was dropped and made again since, perhaps by another migration, and is read from its beginning."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.state: MigrationState = MigrationState()
        self._record = self.state  # the last that counts, as it was written: a claim has no proof
        self._reader = _StateReader()
        self._last: tuple[bytes, bytes] | None = None  # id and payload of what was read last

    async def read(self) -> MigrationState:
        """What the log says now: the last of its entries that counts. Raises `FormatTooNew`, `CorruptLog`, and errors
        of the log."""
        while True:
            try:
                info = await self._wal.describe(MIGRATION_CHANNEL)
            except ChannelNotFound:
                info = None
            if info is None or info.first_id is None or info.latest_id is None:
                self._begin_anew()
                return self.state
            if self._last is not None and not info.first_id <= self._last[0] <= info.latest_id:
                self._begin_anew()
            if await self._read_from(self._last[0] if self._last else info.first_id, info.latest_id):
                return self.state
            self._begin_anew()

    async def _read_from(self, first: bytes, upto: bytes) -> bool:
        """Take the entries from `first` to `upto`. Whether these go on from what was read before, and are there: the
        channel may be dropped meanwhile."""
        try:
            return await self._take_all(first, upto)
        except ChannelNotFound:
            return False

    async def _take_all(self, first: bytes, upto: bytes) -> bool:
        batches = self._wal.read(MIGRATION_CHANNEL, FromId(first, inclusive=True))
        known = self._last
        async with aclosing(cast("AsyncGenerator[Sequence[Entry], None]", batches)):
            async for entries in batches:
                for entry in entries:
                    if known is None:
                        self._take(entry)
                    elif known != (entry.id, bytes(entry.payload)):
                        return False
                    known = None
                if entries[-1].id >= upto:
                    break
        return True

    def _take(self, entry: Entry) -> None:
        after = self._reader.take(entry)
        if after is not None and _follows(self.state, after):
            self._record = after
            self.state = _next(self.state, after)
        self._last = entry.id, bytes(entry.payload)

    async def change(self, record: MigrationState) -> None:
        """Let the log say `record`, durably, and read it back. Raises `PreconditionFailed` where it does not follow
        from what counts by then."""
        await self._wal.create_channel(MIGRATION_CHANNEL, MIGRATION_POLICY)
        for entry in record.entries():
            await self._wal.append(MIGRATION_CHANNEL, entry)
        await self.read()
        if self._record != record:
            raise PreconditionFailed(f"another migration of this log came first: it is {self.state.phase} now")


async def migration_state(wal: Wal) -> MigrationState:
    """What `wal` says now. Raises as `MigrationStates.read`."""
    return await MigrationStates(wal).read()


async def change_migration_state(wal: Wal, record: MigrationState) -> None:
    """Let `wal` say `record`. Raises as `MigrationStates.change`."""
    await MigrationStates(wal).change(record)


async def come_into_use(wal: Wal) -> None:
    """End what `wal` says: it is in use. May be repeated."""
    await wal.drop_channel(MIGRATION_CHANNEL)


async def check_in_use(wal: Wal, shown: str) -> None:
    """Raise `Moved` where the log, whose URL without credentials is `shown`, was migrated, or a promoted replica has
    taken its place, `ReplicaReadOnly` where it is a replica, and `Unavailable` where a migration from or to it has not
    ended."""
    if wal.capabilities.foreign_topics:  # its channels are others' topics
        return
    try:
        state = await migration_state(wal)
        await check_not_replica(wal, shown)
    except ConfigError:  # this process may not look at that channel: it has rights for its own ones alone
        return
    _check_open(state, shown)


async def check_not_migrating(wal: Wal, shown: str) -> None:
    """Raise `Moved` where the log, shown as `shown`, was migrated, and `Unavailable` where a migration from or to it
    has not ended, also where the log is in use meanwhile."""
    state = await migration_state(wal)
    if state.phase is MigrationPhase.PREPARING:
        raise _not_ended(f"tidewal migrate {shown} --to {state.other}")
    _check_open(state, shown)


async def check_not_migrated(wal: Wal, shown: str) -> None:
    """Raise `Moved` where the log, shown as `shown`, was migrated."""
    check_not_left(await migration_state(wal), shown)


def check_not_left(state: MigrationState, shown: str) -> None:
    """Raise `Moved` where the log, shown as `shown`, was migrated as `state` says."""
    if state.phase is MigrationPhase.MIGRATED:
        _check_open(state, shown)


def _check_open(state: MigrationState, shown: str) -> None:
    match state.phase:
        case MigrationPhase.OPEN | MigrationPhase.PREPARING:
            return
        case MigrationPhase.MIGRATED:
            raise Moved(
                f"{shown} was migrated to {state.other}: set wal to that log, with the credentials for it",
                url=state.other,
            )
        case MigrationPhase.MIGRATING | MigrationPhase.CANCELLING:
            begun = f"tidewal migrate {shown} --to {state.other}"
        case MigrationPhase.RESERVED | MigrationPhase.PENDING:
            begun = f"tidewal migrate {state.other} --to {shown}"
    raise _not_ended(begun)


def _not_ended(command: str) -> Unavailable:
    return Unavailable(f"the migration of this log has not ended: `{command}` goes on, with --cancel it is taken back")
