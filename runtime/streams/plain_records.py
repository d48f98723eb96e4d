"""Entries of topics that others made as records, and back: they have no frame of Tidewal's, but keys and headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..clock import HybridClock
from ..errors import InvalidRequest
from ..log.record import Record, RecordType
from ..log.wal import Append, Entry, Headers
from .channel_reader import ChannelReader, LeftOutRecord

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter


def plain_record(entry: Entry) -> Record:
    """The entry as a record: the payload is the body, the headers are the tags, too; of those that share a name the
    tags have the last. A missing key is an empty one."""
    return Record(
        RecordType.ROWS,
        entry.timestamp,
        key=entry.key or b"",
        tags=dict(entry.headers),
        body=entry.payload,
        id=entry.id,
        headers=entry.headers,
    )


def plain_append(channel: str, record: Record, clock: HybridClock) -> Append:
    """The record as an entry: its body, its key where that is not empty, and its `headers` or else its tags, text as
    UTF-8. Its time is `ts`, or now where that is 0. Raises `InvalidRequest` for a tag that is neither text nor
    bytes."""
    return Append(
        channel, record.body, record.ts or clock.now(), record.key or None, record.headers or _headers_of(record)
    )


def _headers_of(record: Record) -> Headers:
    headers: list[tuple[str, bytes | None]] = []
    for name, value in record.tags.items():
        if value is not None and not isinstance(value, str | bytes):
            raise InvalidRequest(
                f"tag {name!r} is of type {type(value).__name__}: headers of topics that others made are text or bytes"
            )
        headers.append((name, value.encode() if isinstance(value, str) else value))
    return tuple(headers)


class PlainReader(ChannelReader):
    """The reading state of a channel whose entries are no records of Tidewal: each counts, none is bad."""

    def accept_granted(self, entries: Sequence[Entry]) -> tuple[list[Record], Sequence[Entry]]:
        return self.accept(entries), ()

    def accept(self, entries: Sequence[Entry]) -> list[Record]:
        if entries:
            self.counts.records += len(entries)
            self.counts.bytes += sum(len(entry.payload) for entry in entries)
            self.position: tuple[bytes, int, int] = (entries[-1].id, 0, 0)
        records = list(map(plain_record, entries))
        return records if self.where is None else self._passing(records, self.where)

    def _passing(self, records: list[Record], where: RecordFilter) -> list[Record]:
        passing: list[Record] = []
        for record in records:
            if where.passes(record):
                passing.append(record)
            else:
                self.counts.filtered += 1
        if records and (not passing or passing[-1] is not records[-1]):
            passing.append(LeftOutRecord.at(records[-1].id, records[-1].ts, 0, 0))
        return passing
