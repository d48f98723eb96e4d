"""What a task reads of a channel: the range, which travels from the driver to the task, and the entries in it. Imports
no Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...runtime.errors import BadRecord, ChannelNotFound, CorruptLog, PositionLost, TidewalError
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import Record
from ...runtime.log.wal import Entry
from ...runtime.rows.schema import CollectionSchema
from ...runtime.streams.channel_reader import ChannelReader, Granted, OnBadRecord

_logger = logging.getLogger("tidewal.spark")


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """A place between two entries of a channel: just behind the one with `id`, or just before it. `term` and `cseq` are
    those of the last record before it, where they are known. Of two places the lesser comes first in the channel."""

    id: bytes
    behind: bool = True
    term: int = 0
    cseq: int = 0

    def __lt__(self, other: ChannelPlace) -> bool:
        return (self.id, self.behind) < (other.id, other.behind)

    def __str__(self) -> str:
        if not self.id:
            return "earliest" if self.behind else "table"
        record = f" {self.term} {self.cseq}" if self.term else ""
        return f"{'behind' if self.behind else 'at'} {self.id.hex()}{record}"

    @classmethod
    def parse(cls, text: str) -> ChannelPlace:
        """The place that `str` wrote as `text`. Raises `ValueError`."""
        match text.split():
            case ["earliest"]:
                return BEGINNING
            case ["table"]:
                return IN_TABLE
            case ["at" | "behind" as word, id]:
                return cls(bytes.fromhex(id), word == "behind")
            case ["at" | "behind" as word, id, term, cseq]:
                return cls(bytes.fromhex(id), word == "behind", int(term), int(cseq))
            case _:
                raise ValueError(f"{text!r} is no place: earliest, 'behind <id>' or 'at <id>'")


BEGINNING: Final = ChannelPlace(b"")
# Of a time that a collection's table has passed: its place in the log is not needed, the table has what lies before.
IN_TABLE: Final = ChannelPlace(b"", behind=False)


class HistoryTable(NamedTuple):
    """Where rows are that the log has forgotten: the folder of the DataNodes' tables, and all vchannels of the
    collection."""

    folder: str
    vchannels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """What one task reads: the entries of one channel between two places, and of what an owner wrote the records with
    `begin_ts < ts <= end_ts`. Complete in itself, for it travels to another process.

    With a `schema` it holds rows of the collection, those of `vchannels`; else messages, of whose tags `tags` become
    columns. With `fences` (not None) the channel has an owner: then records of a superseded owner and repeated records
    do not count. `end_beyond`: `end` lies behind `end_ts`, and later records before it are left out. `history`: the
    table had none of the rows when the range was planned, and has those now that retention has removed since then.
    `foreign`: the channel is a partition of a topic that others made.
    """

    wal: str = field(repr=False)  # may say how to log in
    channel: str
    begin: ChannelPlace
    end: ChannelPlace
    fail_on_data_loss: bool = True
    begin_ts: int = 0
    end_ts: int = 0
    watermark: int | None = None
    fences: Mapping[int, bytes] | None = None
    end_beyond: bool = False
    schema: CollectionSchema | None = None
    vchannels: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    history: HistoryTable | None = None
    foreign: bool = False

    def reader(self, on_bad: OnBadRecord | None = None) -> ChannelReader | None:
        """The reader that knows which records count; None for a channel without an owner, where all do. In a range of
        a collection each record is of the term of the end, or of one before it."""
        if self.fences is None:
            return None
        return ChannelReader(
            self.channel,
            fences=self.fences,
            after=(self.begin.term, self.begin.cseq),
            on_bad=on_bad,
            granted=None if self.schema is None else Granted(self.end.term),
        )

    def holds(self, record: Record) -> bool:
        """Whether the time of a record lies in the range. Raises `CorruptLog` for one that is later, where none may
        be."""
        if record.ts > self.end_ts and not self.end_beyond:
            raise CorruptLog(
                f"{self.channel} has a record of {record.ts} before the end of the cut at {self.end_ts}: going "
                "on would lose it; this is a fault of Tidewal, please report it",
                channel=self.channel,
            )
        return self.begin_ts < record.ts <= self.end_ts


def entries_of(log: BlockingReader, wanted: ChannelRange) -> Iterator[list[Entry]]:
    """The entries of `wanted`, in batches, each entry once. Raises `PositionLost` and `ChannelNotFound` unless data
    loss is allowed."""
    begin: ChannelPlace | None = wanted.begin
    read = b""
    while begin is not None:
        try:
            for entries in _read(log, wanted, begin):
                read = entries[-1].id
                yield entries
            return
        except (PositionLost, ChannelNotFound) as error:
            if wanted.fail_on_data_loss:
                lost = "retention has removed rows of" if isinstance(error, PositionLost) else "there is no more of"
                raise type(error)(
                    f"{lost} {wanted.channel} that were not read yet ({error.message}). Start with a new "
                    "checkpoint and startingOffsets=earliest, or set failOnDataLoss=false to go on without them",
                    **error.fields,
                ) from error
            _logger.warning(
                "%s: rows are lost, going on with what there is: %s",
                wanted.channel,
                error.message,
                extra={"channel": wanted.channel},
            )
            begin = _behind_loss(error, begin, read)


def _behind_loss(error: TidewalError, begin: ChannelPlace, read: bytes) -> ChannelPlace | None:
    """Where to go on; None: nothing is left. A channel that has nothing behind `begin`, of which nothing was `read`, is
    another one of that name: it is read from its beginning."""
    available = error.fields.get("first_available")
    if isinstance(available, bytes) and available > max(begin.id, read):
        return ChannelPlace(available, behind=False)
    return BEGINNING if begin != BEGINNING and not read else None


def _read(log: BlockingReader, wanted: ChannelRange, begin: ChannelPlace) -> Iterator[list[Entry]]:
    for entries in log.read(wanted.channel, begin.id or None, wanted.end.id, inclusive=not begin.behind):
        within = entries if wanted.end.behind else [entry for entry in entries if entry.id < wanted.end.id]
        if within:
            yield within


def records_of(
    wanted: ChannelRange, batches: Iterable[list[Entry]], wants: Callable[[Record], bool]
) -> Iterator[list[Record]]:
    """Of each batch of entries the records that count, are asked for by `wants`, and lie in the range."""
    reader = wanted.reader(on_bad=warn_of_skipped)
    assert reader is not None, "the channel has no owner"
    for entries in batches:
        yield [record for record in reader.accept(entries) if wants(record) and wanted.holds(record)]


def warn_of_skipped(channel: str, entry: Entry, error: BadRecord) -> None:
    """Log that an entry cannot be read. The DataNode keeps it in the dead-letter channel."""
    _logger.warning("%s: entry %s is skipped: %s", channel, entry.id.hex(), error.message, extra={"channel": channel})
