"""The dead letters of a log, as commands find them: those of its readers, and those of its consumer groups.

A letter that was replayed or dropped stays in its channel; a record behind it says so, with the same channel and entry,
as often `moved`, and the tag `resolved`. What a group gives up again after that is a new letter; what a reader keeps
again is the old one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from ..runtime.clock import HybridClock
from ..runtime.errors import BadRecord, InvalidRequest
from ..runtime.log.dead_letters import MOVED, times_moved
from ..runtime.log.names import Names
from ..runtime.log.record import Record, RecordType, TagValue, decode, encode
from ..runtime.log.wal import Append, Entry, FromId, Wal
from .open_log import entries, shown_time, stored

OF_GROUPS = "g-"  # begins the id of a group's letter, as commands show it
MOST_LISTED = 100_000  # in memory; older ones are found by their ids


@dataclass(slots=True)
class DeadLetter:
    """A dead letter as commands show it: its own id, and the channel and id of the bad entry; `times` counts how often
    it was kept, which readers do again when they start before it. `group` is empty for a letter of a reader, and
    `attempts` 0. One that was `moved` to this log from others has the entry's id in the first of them."""

    id: str
    time: str
    channel: str
    entry: str
    group: str
    reason: str
    size: int
    attempts: int
    message: str
    moved: int = 0
    times: int = 1
    resolved: str = ""


Key = tuple[str, str, str, int]


def key_of(letter: DeadLetter) -> Key:
    """What a letter is about."""
    return letter.group, letter.channel, letter.entry, letter.moved


async def open_letters(wal: Wal, names: Names) -> list[DeadLetter]:
    """The letters that are neither replayed nor dropped, each bad entry once, in the order of their times."""
    of_readers, _ = await _open(wal, names.dead_letters, "")
    of_groups, _ = await _open(wal, names.group_dead_letters, OF_GROUPS)
    return sorted([*of_readers, *of_groups], key=lambda letter: letter.time)


async def open_of_groups(wal: Wal, names: Names) -> list[DeadLetter] | None:
    """The letters of groups among them; None where there may be older ones beside those that can be listed."""
    letters, whole = await _open(wal, names.group_dead_letters, OF_GROUPS)
    return letters if whole else None


async def _open(wal: Wal, channel: str, prefix: str) -> tuple[list[DeadLetter], bool]:
    """The open letters of a channel, and whether these are all."""
    found: dict[Key, DeadLetter] = {}
    whole = True
    resolved: set[Key] = set()
    async for record in records(stored(wal, channel)):
        letter = letter_of(record, prefix)
        before = found.pop(key_of(letter), None)
        if letter.resolved:
            resolved.add(key_of(letter))
        elif prefix or key_of(letter) not in resolved:
            letter.times += before.times if before else 0
            found[key_of(letter)] = letter
            if len(found) > MOST_LISTED:
                del found[next(iter(found))]
                whole = False
    return list(found.values()), whole


async def find(wal: Wal, names: Names, id: str) -> tuple[Record, DeadLetter]:
    """The letter with an id as `list` shows it, and what became of it (`resolved`). Raises `InvalidRequest`, with
    `gone` for one that may have been there: what lies before the first entry was removed."""
    prefix = OF_GROUPS if id.startswith(OF_GROUPS) else ""
    channel = names.group_dead_letters if prefix else names.dead_letters
    try:
        number = bytes.fromhex(id.removeprefix(prefix))
    except ValueError:
        raise InvalidRequest(f"{id!r} is no id: `tidewal dlq list` prints those of the letters") from None
    found: tuple[Record, DeadLetter] | None = None
    gone = False
    if channel in await wal.channels():
        ends = await wal.describe(channel)
        gone = ends.first_id is not None and number < ends.first_id and len(number) == len(ends.first_id)
        if ends.first_id is not None and ends.latest_id is not None and ends.first_id <= number <= ends.latest_id:
            async for record in records(entries(wal, channel, FromId(number, inclusive=True), ends.latest_id)):
                letter = letter_of(record, prefix)
                if record.id == number and not letter.resolved:
                    found = record, letter
                elif found is None:
                    break
                elif letter.resolved and key_of(letter) == key_of(found[1]):
                    found[1].resolved = letter.resolved
    if found is None:
        raise InvalidRequest(f"there is no dead letter {id}: `tidewal dlq list` prints the ids", gone=gone)
    return found


async def records(found: AsyncIterator[Entry]) -> AsyncIterator[Record]:
    """The letters among entries, and the records that resolve them."""
    async for entry in found:
        try:
            record = decode(entry.payload, entry.id)
        except BadRecord:  # another program wrote it here: `tail` shows it
            continue
        if record.type is RecordType.DEAD_LETTER:
            yield record


def letter_of(record: Record, prefix: str) -> DeadLetter:
    """The fields of a letter."""
    texts = (str(record.tags.get(name, "")) for name in ("channel", "group", "reason", "message", "resolved"))
    numbers = (record.tags.get(name) for name in ("size", "attempts"))
    channel, group, reason, message, resolved = texts
    size, attempts = (number if isinstance(number, int) else None for number in numbers)
    return DeadLetter(
        id=prefix + record.id.hex(),
        time=shown_time(record.ts),
        channel=channel,
        entry=record.key.hex(),
        group=group,
        reason=reason,
        size=len(record.body) if size is None else size,
        attempts=attempts or 0,
        message=message,
        moved=times_moved(record),
        resolved=resolved,
    )


def resolution(names: Names, letter: DeadLetter, resolved: str, clock: HybridClock) -> Append:
    """The record that says what became of a letter."""
    ts = clock.now()
    tags: dict[str, TagValue] = {"channel": letter.channel, "group": letter.group, "resolved": resolved}
    if letter.moved:
        tags[MOVED] = letter.moved
    channel = names.group_dead_letters if letter.id.startswith(OF_GROUPS) else names.dead_letters
    record = Record(RecordType.DEAD_LETTER, ts, key=bytes.fromhex(letter.entry), tags=tags)
    return Append(channel, encode(record), ts)
