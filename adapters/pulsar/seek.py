"""Resolving positions, times and ends to the place after which a reader starts. All functions block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from ...runtime.errors import PositionLost, TidewalError
from ...runtime.log.wal import From, FromId, FromTime, Start
from .client import NativeTimeout, ignore, place_of
from .failures import call_failure
from .ids import MessagePlace, decode, encode, ledger_behind
from .topics import TopicContents

if TYPE_CHECKING:
    from .wal import Pulsar

ONE_MESSAGE = 1  # prefetched where only one message is needed
WINDOW_ENTRIES = 16
# How many late entries of a superseded owner, in a row, `find_time` looks behind: what such an owner had sent or queued
# when it was stopped. Fewer where entries are large, so that a search reads `LATE_BYTES` or so at most.
LATE_ENTRIES = 4096
LATE_BYTES = 16 * 1024 * 1024


def begin(wal: Pulsar, channel: str, start: Start) -> MessagePlace:
    """The place just before the first entry to read. Raises `ChannelNotFound`, `PositionLost`."""
    contents = wal.contents(channel)
    match start:
        case From.EARLIEST:
            return before_first(contents)
        case From.LATEST:
            return after_last(wal, channel, contents)
        case FromId(id, inclusive):
            return _behind_id(wal, channel, contents, id, inclusive)
        case FromTime(timestamp):
            if contents.first is None:
                return before_first(contents)
            end = after_last(wal, channel, contents)
            found = find_time(wal, channel, contents, timestamp)
            return end if found is None else found.just_before


def before_first(contents: TopicContents) -> MessagePlace:
    """The place before the first entry, or where the first one will be."""
    first = contents.first
    return contents.end if first is None else first.just_before


def after_last(wal: Pulsar, channel: str, contents: TopicContents) -> MessagePlace:
    """The last message, or where the first one will be."""
    last = wal.last(channel)
    return contents.end if last.entry < 0 else last


def first_message(wal: Pulsar, channel: str, contents: TopicContents) -> MessagePlace | None:
    """The first message of the channel; None where it has none."""
    first = contents.first
    if first is None or wal.last(channel) < first:
        return None
    if first == contents.stored_from:
        return first
    found = read_one(wal, channel, first.just_before)  # truncated within a batch
    return None if found is None else found[0]


def lost(wal: Pulsar, channel: str, requested: bytes, contents: TopicContents) -> PositionLost:
    first = first_message(wal, channel, contents)
    return PositionLost(
        f"the next entry in {channel} was removed by retention, or never existed",
        requested=requested,
        first_available=None if first is None else encode(first),
        channel=channel,
    )


def _behind_id(wal: Pulsar, channel: str, contents: TopicContents, id: bytes, inclusive: bool) -> MessagePlace:
    wanted = decode(id)
    ledger = None if wanted is None else ledger_behind(wanted)
    if ledger is not None:
        return _before_ledger(wal, channel, contents, id, ledger)
    if wanted is None or wanted.entry >= dict(contents.ledgers).get(wanted.ledger, 0):
        raise lost(wal, channel, id, contents)
    if wanted[:2] == contents.last[:2] and wanted > wal.last(channel):
        raise lost(wal, channel, id, contents)
    first = contents.first
    if first is not None and wanted < first:
        next_message = read_one(wal, channel, wanted)
        if inclusive or (next_message is not None and next_message[0] < first):
            raise lost(wal, channel, id, contents)
    return wanted.just_before if inclusive else wanted


def _before_ledger(wal: Pulsar, channel: str, contents: TopicContents, id: bytes, ledger: int) -> MessagePlace:
    """The place of the position before a whole ledger. Raises `PositionLost`."""
    first, entries = contents.first, dict(contents.ledgers)
    if ledger not in entries:  # Pulsar also removes a ledger that stayed empty
        is_own = contents.first_ledger is not None and ledger >= contents.first_ledger
        if is_own and contents.is_whole(time.time_ns() // 1_000_000):
            return before_first(contents)
        raise lost(wal, channel, id, contents)
    if first is None or (not entries[ledger] and first.ledger < ledger):
        return MessagePlace(ledger, -1)  # not after the last entry, which may be newer than `contents`
    begin = MessagePlace(ledger, 0)
    if first > begin and entries[ledger]:
        raise lost(wal, channel, id, contents)
    return max(first, begin).just_before


def find_time(wal: Pulsar, channel: str, contents: TopicContents, timestamp: int) -> MessagePlace | None:
    """The first message whose timestamp is ≥ `timestamp`, None when there is none.

    By bisection over the entries: timestamps ascend in a channel, as its owner writes them, but for late entries of a
    superseded owner. These have lower timestamps than what lies before them, so a step that reads nothing else goes too
    far; therefore the entries before the place that was found are read, too (`LATE_ENTRIES`).
    """
    first = contents.first
    if first is None:
        return None
    entries = [
        (ledger, max(0, first.entry if ledger == first.ledger else 0), count)
        for ledger, count in contents.ledgers
        if ledger > first.ledger or (ledger == first.ledger and count > first.entry)
    ]
    low, high = 0, sum(count - begin for _, begin, count in entries) - 1
    if high < 0:
        return None
    while low < high:  # find the last entry up to which all timestamps are below, or the first entry
        middle = (low + high + 1) // 2
        window = max(middle - WINDOW_ENTRIES + 1, 0)
        if _all_below(wal, channel, _entry_at(entries, window).just_before, _entry_at(entries, middle), timestamp):
            low = middle
        else:
            high = middle - 1
    late = min(LATE_ENTRIES, LATE_BYTES // max(contents.entry_bytes, 1))
    return _scan(wal, channel, max(_entry_at(entries, max(low - late, 0)), first).just_before, timestamp)


def _entry_at(entries: list[tuple[int, int, int]], number: int) -> MessagePlace:
    for ledger, begin, count in entries:
        if number < count - begin:
            return MessagePlace(ledger, begin + number)
        number -= count - begin
    raise IndexError(number)


def read_one(wal: Pulsar, channel: str, after: MessagePlace) -> tuple[MessagePlace, int] | None:
    """The first message after `after`, with its timestamp; None where there is none."""
    with contextlib.closing(_messages(wal, channel, after, ONE_MESSAGE)) as messages:
        return next(messages, None)


def _all_below(wal: Pulsar, channel: str, after: MessagePlace, entry: MessagePlace, timestamp: int) -> bool:
    """Whether all messages after `after`, to the end of the entry, have lower timestamps."""
    with contextlib.closing(_messages(wal, channel, after)) as messages:
        for place, found in messages:
            if place[:2] > entry[:2]:
                return True
            if found >= timestamp:
                return False
    return True


def _scan(wal: Pulsar, channel: str, after: MessagePlace, timestamp: int) -> MessagePlace | None:
    with contextlib.closing(_messages(wal, channel, after)) as messages:
        return next((place for place, found in messages if found >= timestamp), None)


def _messages(
    wal: Pulsar, channel: str, after: MessagePlace, queue_messages: int | None = None
) -> Generator[tuple[MessagePlace, int]]:
    """The messages after `after` up to the present last one, with their timestamps."""
    last = wal.last(channel)
    if last <= after or last.entry < 0:
        return
    reader = wal.open_reader(channel, after, queue_messages)
    try:
        while True:
            message = reader.read_next(wal.timeout_ms)
            place = place_of(message.message_id())
            if place > after:
                yield place, wal.timestamp_of(channel, message)
            if place >= last:
                return
    except NativeTimeout as error:
        wal.contents(channel)  # raises where the channel was dropped meanwhile
        raise call_failure(error, f"seeking in {channel}", channel=channel) from error
    except TidewalError:
        raise
    except Exception as error:
        raise call_failure(error, f"seeking in {channel}", channel=channel) from error
    finally:
        reader.close_async(ignore)
