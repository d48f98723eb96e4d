"""Where to begin: positions, times and ends as the place behind which a reader starts. All of it blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Protocol

from ...runtime.errors import PositionLost, TidewalError
from ...runtime.wal import From, FromId, FromTime, Start
from .client import NativeReader, NativeTimeout, ignore, place_of, timestamp_of
from .failures import call_failure
from .ids import Place, decode, encode, ledger_behind
from .topics import Survey

ONE_MESSAGE = 1  # prefetched where one is looked at
WINDOW_ENTRIES = 16


class Source(Protocol):
    """What looking for a place needs of the log."""

    @property
    def timeout_ms(self) -> int: ...

    def open_reader(self, channel: str, start: Place, queue_messages: int | None = None) -> NativeReader: ...

    def survey(self, channel: str) -> Survey: ...

    def last(self, channel: str) -> Place: ...


def begin(source: Source, channel: str, start: Start) -> Place:
    """The place just before the first entry to read. Raises `ChannelNotFound`, `PositionLost`."""
    survey = source.survey(channel)
    match start:
        case From.EARLIEST:
            return before_first(survey)
        case From.LATEST:
            return after_last(source, channel, survey)
        case FromId(id, inclusive):
            return _behind_id(source, channel, survey, id, inclusive)
        case FromTime(timestamp):
            if survey.first is None:
                return before_first(survey)
            end = after_last(source, channel, survey)
            found = find_time(source, channel, survey, timestamp)
            return end if found is None else found.just_before


def before_first(survey: Survey) -> Place:
    first = survey.first
    return survey.end if first is None else first.just_before


def after_last(source: Source, channel: str, survey: Survey) -> Place:
    """The last message, or where the first one will be."""
    last = source.last(channel)
    return survey.end if last.entry < 0 else last


def first_message(source: Source, channel: str, survey: Survey) -> Place | None:
    """The first message that the channel has now; None where it has none."""
    first = survey.first
    if first is None or source.last(channel) < first:
        return None
    if first == survey.stored_from:
        return first
    found = read_one(source, channel, first.just_before)  # truncated between two messages
    return None if found is None else found[0]


def lost(source: Source, channel: str, requested: bytes, survey: Survey) -> PositionLost:
    first = first_message(source, channel, survey)
    return PositionLost(
        f"retention has removed what comes next in {channel}, or that never was",
        requested=requested,
        first_available=None if first is None else encode(first),
        channel=channel,
    )


def _behind_id(source: Source, channel: str, survey: Survey, id: bytes, inclusive: bool) -> Place:
    wanted = decode(id)
    ledger = None if wanted is None else ledger_behind(wanted)
    if ledger is not None:
        return _before_ledger(source, channel, survey, id, ledger)
    if wanted is None or wanted.entry >= dict(survey.ledgers).get(wanted.ledger, 0):
        raise lost(source, channel, id, survey)
    if wanted[:2] == survey.last[:2] and wanted > source.last(channel):
        raise lost(source, channel, id, survey)
    first = survey.first
    if first is not None and wanted < first:
        following = read_one(source, channel, wanted)
        if inclusive or (following is not None and following[0] < first):
            raise lost(source, channel, id, survey)
    return wanted.just_before if inclusive else wanted


def _before_ledger(source: Source, channel: str, survey: Survey, id: bytes, ledger: int) -> Place:
    """Where what began in that ledger begins."""
    first, entries = survey.first, dict(survey.ledgers)
    if ledger not in entries:  # Pulsar removes a ledger that stayed empty too
        ours = survey.first_ledger is not None and ledger >= survey.first_ledger
        if ours and survey.is_whole(time.time_ns() // 1_000_000):
            return before_first(survey)
        raise lost(source, channel, id, survey)
    if first is None or (not entries[ledger] and first.ledger < ledger):
        return Place(ledger, -1)  # not behind the last, which may have come since the survey
    begin = Place(ledger, 0)
    if first > begin and entries[ledger]:
        raise lost(source, channel, id, survey)
    return max(first, begin).just_before


def find_time(source: Source, channel: str, survey: Survey, timestamp: int) -> Place | None:
    """The first message whose timestamp is ≥ `timestamp`, None when there is none.

    By bisection over the entries: timestamps ascend in a channel, as its owner writes them. Late ones of an earlier
    owner do no harm, since each step looks at `WINDOW_ENTRIES` together.
    """
    first = survey.first
    if first is None:
        return None
    entries = [
        (ledger, max(0, first.entry if ledger == first.ledger else 0), count)
        for ledger, count in survey.ledgers
        if ledger > first.ledger or (ledger == first.ledger and count > first.entry)
    ]
    low, high = 0, sum(count - begin for _, begin, count in entries) - 1
    if high < 0:
        return None
    while low < high:  # the last entry up to which all are below, or the first of all
        middle = (low + high + 1) // 2
        window = max(middle - WINDOW_ENTRIES + 1, 0)
        if _all_below(source, channel, _entry_at(entries, window).just_before, _entry_at(entries, middle), timestamp):
            low = middle
        else:
            high = middle - 1
    return _scan(source, channel, max(_entry_at(entries, low), first).just_before, timestamp)


def _entry_at(entries: list[tuple[int, int, int]], number: int) -> Place:
    for ledger, begin, count in entries:
        if number < count - begin:
            return Place(ledger, begin + number)
        number -= count - begin
    raise IndexError(number)


def read_one(source: Source, channel: str, after: Place) -> tuple[Place, int] | None:
    """The first message behind `after`, with its timestamp."""
    with contextlib.closing(_messages(source, channel, after, ONE_MESSAGE)) as messages:
        return next(messages, None)


def _all_below(source: Source, channel: str, after: Place, entry: Place, timestamp: int) -> bool:
    """Whether all messages behind `after`, to the end of the entry, have lower timestamps."""
    with contextlib.closing(_messages(source, channel, after)) as messages:
        for place, found in messages:
            if place[:2] > entry[:2]:
                return True
            if found >= timestamp:
                return False
    return True


def _scan(source: Source, channel: str, after: Place, timestamp: int) -> Place | None:
    with contextlib.closing(_messages(source, channel, after)) as messages:
        return next((place for place, found in messages if found >= timestamp), None)


def _messages(
    source: Source, channel: str, after: Place, queue_messages: int | None = None
) -> Generator[tuple[Place, int]]:
    """The messages behind `after`, up to what is the last one now, with their timestamps."""
    last = source.last(channel)
    if last <= after or last.entry < 0:
        return
    reader = source.open_reader(channel, after, queue_messages)
    try:
        while True:
            message = reader.read_next(source.timeout_ms)
            place = place_of(message.message_id())
            if place > after:
                yield place, timestamp_of(message)
            if place >= last:
                return
    except NativeTimeout as error:
        source.survey(channel)  # raises where the channel was dropped meanwhile
        raise call_failure(error, f"looking for a place in {channel}", channel=channel) from error
    except TidewalError:
        raise
    except Exception as error:
        raise call_failure(error, f"looking for a place in {channel}", channel=channel) from error
    finally:
        reader.close_async(ignore)
