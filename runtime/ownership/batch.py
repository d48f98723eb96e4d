"""One append in flight, from its numbering to its decision."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from ..errors import OutcomeUnknown, TidewalError, Unavailable
from ..log.record import BatchPart, Record, Tags, make_record
from .acks import Opened
from .owned_channel import OwnedChannel
from .prepared import ATTEMPT, PREPARED_TYPE, TransactionId
from .producers import BatchOutcome

BATCH_ROWS = "batch_rows"  # tag: how many rows the whole batch has, for the answer to a retry
BATCH_CHANNELS = "batch_channels"  # tag: how many channels the batch is for, where that is more than one
BATCH_DIGEST = "batch_digest"  # tag: the producer's digest of the content, for the same
SOURCE = "tidewal.source"  # tag: the source of a record that has one, see `ProducerTable`
SOURCE_OFFSET = "tidewal.offset"  # tag: its offset there
OWNERS_TAGS = frozenset({BATCH_ROWS, BATCH_CHANNELS, BATCH_DIGEST, SOURCE, SOURCE_OFFSET, ATTEMPT, PREPARED_TYPE})

RecordKey = tuple[int, int]  # term, cseq: of a record in its channel


class Appended(NamedTuple):
    """The result of appending a batch. `repeated`: it had been appended before, by the same producer under the same
    number, and `rows` and `digest` are those of what was appended then. `ids` of its records, in order, where they are
    known: not for a repeated batch, nor for one found below a fence."""

    ts: int
    rows: int
    repeated: bool
    ids: tuple[bytes, ...] = ()
    digest: int = 0


@dataclass(slots=True, eq=False)
class AppendPart:
    """What of a batch is for one channel. It is decided once its records are durable or have certainly failed: then
    `present` says how many of them are in the log."""

    batch: AppendBatch
    own: OwnedChannel
    cseqs: list[int] = field(default_factory=list[int])
    last: int = 0  # the place of its last record in the batch
    size: int = 0  # bytes
    present: int | None = None
    opened: Opened[AppendPart] | None = None

    @property
    def keys(self) -> list[RecordKey]:
        """The keys of its records in the channel."""
        return [(self.own.term, cseq) for cseq in self.cseqs]

    @property
    def durable(self) -> bool:
        return self.present == len(self.cseqs)

    def ack(self) -> None:
        """Note in its channel that it is durable. One found below a fence is of an earlier term, and has no ids."""
        if self.batch.ids and self.batch.control:
            self.own.ack_control(self.cseqs[-1], self.batch.ids[self.last])
        elif self.batch.ids:
            self.own.ack(self.cseqs[-1], self.batch.ids[self.last], self.batch.outcome.ts)


@dataclass(slots=True, eq=False)
class AppendBatch:
    """One append. `refusal` is why it has certainly failed, where the log said so; `lost` says that its outcome will
    not be known here."""

    size: int  # bytes
    producer: str
    pseq: int
    outcome: BatchOutcome  # what each of its channels remembers, of the whole batch; this may be what some of them lack
    parts: list[AppendPart] = field(default_factory=list[AppendPart])
    records: int = 0
    unreleased: int = 0  # parts
    ids: list[bytes] = field(default_factory=list[bytes])
    refusal: TidewalError | None = None
    lost: TidewalError | None = None
    source: str = ""
    source_offset: bytes = b""  # of its last record
    prepares: TransactionId | None = None
    commits: TransactionId | None = None
    control: bool = False  # it has no time that readers see, and no outcome for its producer
    begun_s: float = field(default_factory=perf_counter)
    waiters: list[asyncio.Future[Appended]] = field(default_factory=list["asyncio.Future[Appended]"])

    def undecided(self) -> list[AppendPart]:
        """The parts whose outcome is not known yet."""
        return [part for part in self.parts if part.present is None]

    @property
    def error(self) -> TidewalError | None:
        """Once all parts are decided: why the batch has failed; None where it is durable."""
        if self.lost is not None:
            return self.lost
        present = sum(part.present or 0 for part in self.parts)
        if present == self.records:
            return None
        if present:
            return OutcomeUnknown("some channels have the batch and others do not: read before writing again")
        return self.refusal or Unavailable("the append did not happen: its owner lost the answer; retry")


def number(batch: AppendBatch, owned: Sequence[OwnedChannel], records: Sequence[tuple[str, Record]]) -> list[int]:
    """Divide a batch into its parts, and number its `records` in the channels `owned`. Returns their numbers."""
    parts: dict[str, AppendPart] = {}
    cseqs: list[int] = []
    for place, (own, (channel, record)) in enumerate(zip(owned, records, strict=True)):
        part = parts.get(channel)
        if part is None:
            part = parts[channel] = AppendPart(batch, own)
        own.cseq = cseq = own.cseq + 1
        cseqs.append(cseq)
        part.cseqs.append(cseq)
        part.last = place
        part.size += len(record.body)
    for part in parts.values():
        part.own.unsave(len(part.cseqs), part.size)
    batch.parts = list(parts.values())
    batch.records, batch.unreleased = len(records), len(parts)
    return cseqs


def repeated(
    known: Mapping[str, BatchOutcome], channels: Sequence[str], digest: int, count: int
) -> BatchOutcome | None:
    """The answer to a batch for `channels`, of which those in `known` have its number; it is for `count` channels, some
    of other owners. None: what some of them have is of this batch, and the others do not have it. Raises
    `OutcomeUnknown` where it is of one for other channels."""
    for outcome in known.values():
        if outcome.digest != digest:  # another batch, or one that was given up: the caller compares
            return outcome
    whole = len(known) == len(channels)
    if any(outcome.channels != count and not (whole and outcome.channels == 1) for outcome in known.values()):
        raise OutcomeUnknown(
            f"{', '.join(sorted(known))} got this batch, and it is for other channels now: read before writing again"
        )
    return next(iter(known.values())) if whole and known else None


def prepared(
    records: Sequence[tuple[str, Record]],
    ts: int,
    producer: str,
    pseq: int,
    rows: int,
    digest: int = 0,
    channels: int = 1,
) -> list[Record]:
    """The records of one batch as the log must have them: with the producer's identity, by which a next owner
    recognises a retry, and in parts where a channel gets several, so that a reader sees all of them or none. `channels`
    counts the channels of the whole batch, of which `records` may be the rest that is not written yet."""
    sizes = Counter(channel for channel, _ in records) if len(records) > 1 else Counter[str]()
    numbers: Counter[str] = Counter()
    tags = {BATCH_ROWS: rows}
    if digest:
        tags[BATCH_DIGEST] = digest
    if channels > 1:
        tags[BATCH_CHANNELS] = channels
    result: list[Record] = []
    for channel, record in records:
        own_tags, name, sequence, part = record.tags, record.producer, record.pseq, record.part
        if SOURCE in own_tags:  # of one that was read, and is sent on: it has no source here
            own_tags = {name: tag for name, tag in own_tags.items() if name not in OWNERS_TAGS}
        if producer and name != producer:
            name, sequence, own_tags = producer, pseq, {**own_tags, **tags}
        if part is None and sizes[channel] > 1:
            part = BatchPart(ts, numbers[channel], sizes[channel])
            numbers[channel] += 1
        if own_tags is not record.tags or part is not record.part:
            record = _with_identity(record, name, sequence, part, own_tags)
        result.append(record)
    return result


def sourced(source: str, offset: bytes, record: Record) -> Record:
    """The record as the log must have it, so that a next owner knows how far the source has come."""
    tags = {**record.tags, SOURCE: source, SOURCE_OFFSET: offset}
    return _with_identity(record, record.producer, record.pseq, None, tags)


def _with_identity(record: Record, producer: str, pseq: int, part: BatchPart | None, tags: Tags) -> Record:
    """The content of `record`, to be stamped by its owner, in a batch that is identified by the rest."""
    return make_record(
        record.type,
        0,
        0,
        0,
        producer,
        pseq,
        part,
        record.vchannel,
        record.key,
        tags,
        record.trace,
        record.schema_version,
        record.body,
    )


def recorded_source(record: Record) -> tuple[str, bytes] | None:
    """The source of a record and its offset there; None where it has none."""
    source, offset = record.tags.get(SOURCE), record.tags.get(SOURCE_OFFSET)
    return (source, offset) if isinstance(source, str) and isinstance(offset, bytes) else None


def recorded_outcome(record: Record) -> BatchOutcome:
    """The outcome of the batch that a record is from, by its tags (see `prepared`)."""
    rows, digest, channels = (_number(record.tags.get(tag)) for tag in (BATCH_ROWS, BATCH_DIGEST, BATCH_CHANNELS))
    return BatchOutcome(record.ts, rows, digest, max(1, channels))


def channels_of(records: Iterable[tuple[str, Record]]) -> list[str]:
    """The channels of `records`, each once, in the order of their first record."""
    return list(dict.fromkeys(channel for channel, _ in records))


def _number(tag: object) -> int:
    return tag if isinstance(tag, int) else 0
