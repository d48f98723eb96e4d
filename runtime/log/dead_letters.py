"""Dead letters: records that could not be used are kept aside, with their reason, and the channel goes on.

A dead letter is a record of type `DEAD_LETTER` whose body is the unchanged bad entry, whose key is the entry's id, and
whose tags say `channel`, `reason`, `message` and `size` (bytes; a larger size than the body's means that it was cut).
A reader that restarts before a bad record keeps it again, with the same channel and key.

One that came along from another log, by a migration or a replication, has the tag `moved`: how often. Its key is the id
that the entry had in the first one (`moved_letter`).

The dead letters of consumer groups (`group_letter`) have the tags `group`, `attempts` and `timestamp` (the entry's),
too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ..arguments import checked
from ..clock import HybridClock
from ..errors import BadRecord, TidewalError
from .record import Record, RecordType, TagValue, decode, encode, stamp
from .wal import Append, ChannelPolicy, Entry, Payload, Wal

LETTERS_PER_S = 100
LETTER_BYTES_PER_S = 4 * 1024 * 1024
LETTER_BODY_BYTES = 4 * 1024 * 1024  # below every backend's message limit
MESSAGE_CHARACTERS = 1_000
MOVED = "moved"
REPORTED_S = 60.0  # between two log lines about the same channel and reason

_log = logging.getLogger("tidewal.dead_letters")

REASONS: Final = (
    "body",
    "checksum",
    "cut",
    "frame",
    "grant",
    "header",
    "heartbeat",
    "kind",
    "late",
    "length",
    "level",
    "producers",
    "rows",
    "schema",
    "type",
    "values",
    "version",
)
"""Why a record of the log can be bad."""

GROUP_REASONS: Final = ("handler", "crash", "record")
"""Why an entry becomes a dead letter of a consumer group: its handler failed in the last attempt, no process saw the
end of that, or the entry is no record where records are read."""

DELAYED_REASONS: Final = ("due",)
"""Why a delayed message becomes a dead letter: its channel did not take it when it was due."""

OnCounted = Callable[[str, str], None]


def group_letter(
    channel: str, entry: Entry, group: str, reason: str, message: str, attempts: int, ts: int, body_bytes: int
) -> bytes:
    """The bytes of the letter that `group` writes at `ts` for an entry of `channel`, with at most `body_bytes` of
    it."""
    tags = {
        **_tags(channel, reason, message, len(entry.payload)),
        "group": group,
        "attempts": attempts,
        "timestamp": entry.timestamp,
    }
    body = memoryview(entry.payload)[:body_bytes]
    return stamp(Record(RecordType.DEAD_LETTER, key=entry.id, tags=tags, body=body), ts, 0, 0)


def delayed_letter(
    channel: str, id: bytes, record: Record, message: str, ts: int, body_bytes: int | None = None
) -> bytes:
    """The bytes of the letter that is written at `ts` for a delayed message that its channel did not take, with all of
    it, or `body_bytes`."""
    payload = encode(record)
    tags = _tags(channel, "due", message, len(payload))
    body = memoryview(payload)[:body_bytes]
    return stamp(Record(RecordType.DEAD_LETTER, key=id, tags=tags, body=body), ts, 0, 0)


def moved_letter(payload: Payload) -> Payload:
    """The bytes of a letter, or of the record that resolves one, as another log is to have them; what is not one stays
    as it is."""
    try:
        letter = decode(payload)
    except BadRecord:
        return payload
    return encode(replace(letter, tags={**letter.tags, MOVED: times_moved(letter) + 1}))


def times_moved(letter: Record) -> int:
    """How often a letter was brought to another log."""
    moved = letter.tags.get(MOVED)
    return moved if isinstance(moved, int) else 0


def _tags(channel: str, reason: str, message: str, size: int) -> dict[str, TagValue]:
    return {"channel": channel, "reason": reason, "message": message[:MESSAGE_CHARACTERS], "size": size}


@dataclass(slots=True)
class DeadLetterCounts:
    """How many bad records were kept, and how many were not."""

    kept: int = 0
    over_limit: int = 0  # counted only: too many at a time
    failed: int = 0  # the dead-letter channel did not take them


class DeadLetters:
    """Handlers for readers: `bad` as their `on_bad`, `late` as their `on_late`. They never block and never raise.

    At most `letters_per_s` and `bytes_per_s` are kept, with a burst of one second's worth; the rest is counted. Every
    bad record is reported to `on_counted(channel, reason)`, kept or not. The first one of a channel and reason is a
    warning in the process' log, and then one in `REPORTED_S`, with how many there were.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        channel: str,
        *,
        letters_per_s: float = LETTERS_PER_S,
        bytes_per_s: float = LETTER_BYTES_PER_S,
        on_counted: OnCounted | None = None,
    ) -> None:
        self.counts: DeadLetterCounts = DeadLetterCounts()
        self._wal = wal
        self._clock = clock
        self._channel = channel
        self._letters = _Bucket(letters_per_s, clock)
        self._bytes = _Bucket(bytes_per_s, clock)
        self._on_counted = on_counted
        self._reports: dict[tuple[str, str], _Report] = {}

    async def open(self) -> None:
        """Create the channel, durable, where it is missing."""
        await self._wal.create_channel(self._channel, ChannelPolicy())

    def bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        """Keep an entry that could not be read."""
        self._keep(channel, entry.id, str(error.fields.get("reason", "unknown")), error.message, entry.payload)

    def late(self, channel: str, record: Record) -> None:
        """Keep a record that came behind a time already announced."""
        message = f"a record at {record.ts} came behind a time that was announced already"
        self._keep(channel, record.id, "late", message, encode(record))

    def _keep(self, channel: str, id: bytes, reason: str, message: str, payload: Payload) -> None:
        if self._on_counted is not None:
            self._on_counted(channel, reason)
        self._report(channel, reason, message)
        body = memoryview(payload)[:LETTER_BODY_BYTES]
        if not self._letters.holds(1) or not self._bytes.holds(len(body)):
            self.counts.over_limit += 1
            return
        self._letters.take(1)
        self._bytes.take(len(body))
        tags = _tags(channel, reason, message, len(payload))
        ts = self._clock.now()
        letter = stamp(Record(RecordType.DEAD_LETTER, key=id, tags=tags, body=body), ts, 0, 0)
        try:
            self._wal.submit([Append(self._channel, letter, ts)], self._kept)
        except TidewalError:
            self.counts.failed += 1

    def _report(self, channel: str, reason: str, message: str) -> None:
        report = self._reports.setdefault((channel, reason), _Report())
        report.unsaid += 1
        now_s = self._clock.clock.monotonic()
        if now_s - report.at_s >= REPORTED_S:
            more = f", the last of {report.unsaid} since the line before" if report.unsaid > 1 else ""
            _log.warning("a record of %s cannot be used (%s): %s%s", channel, reason, message, more)
            report.at_s, report.unsaid = now_s, 0

    def _kept(self, result: list[bytes] | TidewalError) -> None:
        if isinstance(result, TidewalError):
            self.counts.failed += 1
        else:
            self.counts.kept += 1


@dataclass(slots=True)
class _Report:
    """When a log line was written, and how many bad records there were since."""

    at_s: float = -math.inf
    unsaid: int = 0


class _Bucket:
    """A token bucket: `per_s` per second, and a burst of one second's worth. A larger amount passes when the bucket is
    full."""

    def __init__(self, per_s: float, clock: HybridClock) -> None:
        self._per_s = per_s
        self._clock = clock.clock
        self._level = per_s
        self._at = self._clock.monotonic()

    def holds(self, amount: float) -> bool:
        now = self._clock.monotonic()
        self._level = min(self._per_s, self._level + (now - self._at) * self._per_s)
        self._at = now
        return self._level >= min(amount, self._per_s)

    def take(self, amount: float) -> None:
        self._level -= amount
