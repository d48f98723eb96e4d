"""One append in flight, from its numbering to its decision."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

from ..errors import OutcomeUnknown, TidewalError, Unavailable
from ..log.record import BatchPart, Record
from .acks import Opened
from .owned_channel import OwnedChannel
from .producers import BatchOutcome

BATCH_ROWS = "batch_rows"  # tag: how many rows the whole batch has, for the answer to a retry
BATCH_CHANNELS = "batch_channels"  # tag: how many channels the batch is for, where that is more than one
BATCH_DIGEST = "batch_digest"  # tag: the producer's digest of the content, for the same

RecordKey = tuple[str, int, int]  # channel, term, cseq


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
class AppendBatch:
    """One append. It is `decided` once its records are durable or have certainly failed; `unknown` says that the log
    could not tell."""

    ts: int
    rows: int
    size: int  # bytes
    producer: str
    pseq: int
    records: list[tuple[OwnedChannel, int]]  # owner, cseq
    digest: int = 0
    ids: list[bytes] = field(default_factory=list[bytes])
    error: TidewalError | None = None
    unknown: bool = False
    decided: bool = False
    opened: Opened[AppendBatch] | None = None
    begun_s: float = field(default_factory=perf_counter)
    waiters: list[asyncio.Future[Appended]] = field(default_factory=list["asyncio.Future[Appended]"])
    _found_by_key: dict[RecordKey, bool] = field(default_factory=dict[RecordKey, bool])

    def record_keys(self) -> list[RecordKey]:
        """The keys of its records in the log."""
        return [(own.channel, own.term, cseq) for own, cseq in self.records]

    def resolve(self, terms: dict[str, int], found: Set[RecordKey]) -> bool:
        """Note what a recovery says of this batch: below the fences of `terms` (channel to new term) the log holds
        `found`. Returns whether the batch is decided by it."""
        for key in self.record_keys():
            if key[1] < terms.get(key[0], 0):
                self._found_by_key.setdefault(key, key in found)
        if len(self._found_by_key) < len(self.records):
            return False
        present = sum(self._found_by_key.values())
        if present == len(self.records):
            self.error = None
        elif present == 0:
            self.error = Unavailable("the append did not happen: its owner lost the answer; retry")
        else:
            self.error = OutcomeUnknown("some channels have the batch and others do not: read before writing again")
        return True


def missing(records: Sequence[tuple[str, Record]], known: BatchOutcome, channels: int) -> Sequence[tuple[str, Record]]:
    """Those of a repeated batch's `records` whose channels do not have it yet. `known` is its outcome so far,
    `channels` the number of channels it is for. Raises `OutcomeUnknown` when it is another batch than the one that was
    written in part."""
    rest = [(channel, record) for channel, record in records if channel not in known.present]
    if channels != known.channels or len({channel for channel, _ in rest}) != channels - len(known.present):
        raise OutcomeUnknown(
            f"only {', '.join(known.present)} got this batch, and it is for other channels now: "
            "read before writing again"
        )
    return rest


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
        if producer and record.producer != producer:
            record = replace(record, producer=producer, pseq=pseq, tags={**record.tags, **tags})
        if record.part is None and sizes[channel] > 1:
            record = replace(record, part=BatchPart(ts, numbers[channel], sizes[channel]))
            numbers[channel] += 1
        result.append(record)
    return result


def recorded_outcome(channel: str, record: Record) -> BatchOutcome:
    """The outcome of the batch that a record of `channel` is from, by its tags (see `prepared`)."""
    rows, digest, channels = (_number(record.tags.get(tag)) for tag in (BATCH_ROWS, BATCH_DIGEST, BATCH_CHANNELS))
    return BatchOutcome(record.ts, rows, digest, (channel,) if channels > 1 else (), channels)


def _number(tag: object) -> int:
    return tag if isinstance(tag, int) else 0
