"""One channel of a migration: copy what is missing at the end of the new channel."""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from ..errors import PositionLost, TidewalError, Unsupported
from ..log.dead_letters import moved_letter
from ..log.record import RecordType, claimed_type, record_type
from ..log.wal import Append, ChannelInfo, Entry, FromId, Payload, Wal
from ..loop_bridge import promise
from ..streams.stream_base import reading

HOLDER = "tidewal-migration"
APPEND_BYTES = 4 * 1024 * 1024  # of payload in one append
APPEND_ENTRIES = 10_000  # in one append: small entries have an overhead that brokers and disks bound as well

Check: TypeAlias = Callable[[], Awaitable[None]]
"""What is called before each write, and raises `Fenced` where another run writes there now."""

Rewrite: TypeAlias = Callable[[str, Entry], Entry]
"""Called with a channel and an entry of the old log; returns it with what it is to hold in the new one, by these alone.
Raises `Unsupported` for what cannot be migrated."""

# Records that hold ids of entries of their log: copied as they are they would point nowhere in another one.
HOLDING_IDS = frozenset(
    {
        RecordType.CATALOG,
        RecordType.CLUSTER,
        RecordType.GROUP,
        RecordType.PRODUCER,
        RecordType.PRODUCERS,
        RecordType.DELAYED,
        RecordType.CANCELLED,
        RecordType.DELAYED_PAGE,
        RecordType.STATE,
        RecordType.LEDGER,
        RecordType.DEAD_LETTER,
    }
)


async def stored_batches(wal: Wal, info: ChannelInfo, behind: bytes = b"") -> AsyncGenerator[Sequence[Entry]]:
    """The entries that a channel had when `info` was made, in order; those behind the id `behind`, where one is given.
    Raises `PositionLost` where retention removes them meanwhile."""
    if info.first_id is None or info.latest_id is None or behind >= info.latest_id:
        return
    start = FromId(behind) if behind else FromId(info.first_id, inclusive=True)
    async with reading(wal, info.name, start) as batches:
        async for entries in batches:
            if entries[-1].id < info.latest_id:
                yield entries
                continue
            if last := [entry for entry in entries if entry.id <= info.latest_id]:
                yield last
            return


async def stored_entries(wal: Wal, info: ChannelInfo) -> AsyncIterator[Entry]:
    """`stored_batches`, one by one."""
    async for entries in stored_batches(wal, info):
        for entry in entries:
            yield entry


async def entry_at(wal: Wal, info: ChannelInfo, id: bytes) -> Entry | None:
    """The entry with this id, where the channel still has it."""
    if not id or info.first_id is None or info.latest_id is None or not info.first_id <= id <= info.latest_id:
        return None
    try:
        async with reading(wal, info.name, FromId(id, inclusive=True)) as batches:
            entry = (await anext(aiter(batches)))[0]
    except PositionLost:
        return None
    return entry if entry.id == id else None


async def hold_channel(wal: Wal, channel: str) -> None:
    """Keep what the channel has from retention while it is copied and compared."""
    info = await wal.describe(channel)
    if info.first_id is not None:
        await wal.hold(channel, HOLDER, info.first_id)


async def unchecked() -> None:
    """The check of a copier that has the new channel to itself."""


def movable_entry(channel: str, entry: Entry) -> Entry:
    """An entry as another log is to have it: a `Rewrite`. A dead letter says from then on that the id of its entry is
    of an earlier log. Raises `Unsupported` for the other records that hold ids."""
    if holds_no_ids(entry.payload):
        return entry
    kind = record_type(entry.payload)
    if kind is RecordType.DEAD_LETTER:
        return entry._replace(payload=moved_letter(entry.payload))
    if kind is not None and kind in HOLDING_IDS:
        raise Unsupported(
            f"{channel} has a record {kind.name} ({entry.id.hex()}), which holds ids of this log: "
            "such channels cannot be migrated yet; drop the channel if it is not needed any more",
            capability="migration",
        )
    return entry


async def copy_channel(
    old: Wal,
    new: Wal,
    info: ChannelInfo,
    check: Check = unchecked,
    rewrite: Rewrite = movable_entry,
    behind: tuple[bytes, bytes] = (b"", b""),
) -> None:
    """Append to the channel in `new` what it lacks of the one in `old`, as that was when `info` was made: as many
    entries as it has are there already. Each is copied as `rewrite` returns it. `behind` are the ids, in both logs, of
    an entry up to which they are known to be equal: what lies before is not read.

    One append at a time is under way, so that whatever becomes of this process the new channel has the first entries
    of the old one and no others; `check` is called just before each, and it is decided when this returns or raises,
    unless the error says `outcome_unknown`. Both channels are held: `HOLDER` keeps retention from what is there. Raises
    `Unsupported` for a record that holds ids of the old log, `MessageTooLarge` for an entry that the new log does not
    take, what `check` and `rewrite` raise, and errors of both logs."""
    channel, (behind_old, behind_new) = info.name, behind
    await hold_channel(old, channel)
    await hold_channel(new, channel)
    there = 0
    async for entries in stored_batches(new, await new.describe(channel), behind_new):
        there += len(entries)
    is_held = there > 0 or bool(behind_new)
    under_way: Future[list[bytes]] | None = None
    try:
        async for entries in _gathered(stored_batches(old, info, behind_old), there):
            entries = [rewrite(channel, entry) for entry in entries]
            if under_way is not None:  # these were read meanwhile
                await under_way
                under_way = None
            await check()
            if not is_held:  # before more than the first one is there: retention must find the hold
                await _submitted(new, channel, entries[:1])
                entries = entries[1:]
                await hold_channel(new, channel)
                is_held = True
                if not entries:
                    continue
                await check()
            under_way = _submitted(new, channel, entries)
    except TidewalError:
        if under_way is not None:
            await under_way
        raise
    if under_way is not None:
        await under_way


def _submitted(new: Wal, channel: str, entries: Sequence[Entry]) -> Future[list[bytes]]:
    """An append of the entries with the timestamps that they have: `append_many` would replace a 0."""
    appended, done = promise()
    new.submit([Append(channel, entry.payload, entry.timestamp) for entry in entries], done)
    return appended


async def _gathered(batches: AsyncIterator[Sequence[Entry]], skipped: int) -> AsyncIterator[Sequence[Entry]]:
    """The entries behind as many as are `skipped`, so many together that an append is worth its sync or its request."""
    gathered: list[Entry] = []
    size = 0
    async for entries in batches:
        for entry in entries[skipped:]:
            if gathered and (size + len(entry.payload) > APPEND_BYTES or len(gathered) == APPEND_ENTRIES):
                yield gathered
                gathered, size = [], 0
            gathered.append(entry)
            size += len(entry.payload)
        skipped -= min(skipped, len(entries))
    if gathered:
        yield gathered


def holds_no_ids(payload: Payload) -> bool:
    """Whether that is sure at a glance: it is of nearly all entries."""
    claimed = claimed_type(payload)
    return claimed is not None and claimed not in HOLDING_IDS


async def check_not_lost(old: Wal, info: ChannelInfo, positions: Iterable[bytes]) -> None:
    """Raise `PositionLost` where an entry behind one of the positions of groups was removed."""
    for id in positions:
        if await is_lost(old, info, id):
            raise PositionLost(
                f"entries of {info.name} behind position {id.hex()} of a group were removed: move the group with "
                "`tidewal groups seek`, or drop it, and go on. A migration that has begun is first taken back with "
                "--cancel",
                channel=info.name,
                requested=id,
                first_available=info.first_id,
            )


async def is_lost(wal: Wal, info: ChannelInfo, id: bytes) -> bool:
    """Whether an entry behind `id` was removed; behind b"" lies what is there."""
    if not id or id >= (info.latest_id or b"") or (info.first_id is not None and id >= info.first_id):
        return False
    if info.first_id is None:
        return True
    try:  # ids need not be dense: what follows may be the first that is there
        async with reading(wal, info.name, FromId(id)) as batches:
            return (await anext(aiter(batches)))[0].id != info.first_id
    except PositionLost:
        return True
