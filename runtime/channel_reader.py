"""What every reader of a pchannel does with its entries before anyone else sees them: decode, drop what a fence
hides, drop what was seen, and put the parts of a batch together. Bad records go to the dead-letter handler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .errors import BadRecord, TidewalError
from .record import Record, decode
from .wal import Entry

BAD_RECORDS_MAX = 100  # in a row without a good one: then it is the code that is wrong, and the reader stops

OnBadRecord = Callable[[str, Entry, BadRecord], None]


@dataclass(slots=True)
class ReadCounts:
    """What a channel reader has seen; from `duplicates` on, what was dropped of it."""

    records: int = 0
    bytes: int = 0
    duplicates: int = 0
    fenced: int = 0
    incomplete: int = 0  # batches of which a part was missing
    bad: int = 0
    late: int = 0  # counted by a time-ticked stream: behind a time already told


class ChannelReader:
    """The reading state of one pchannel: the highest (term, cseq), and `position`: the id, term and cseq of the last
    entry that is done with, behind which reading can go on later.

    `fences` maps each term to the id of its fence, from the catalog: a reader that starts behind a fence takes its
    lowest term from there (guarantee 3). Records of no owner (term 0: control and event channels) pass unchecked.
    """

    def __init__(
        self,
        channel: str,
        *,
        fences: Mapping[int, bytes] | None = None,
        after: tuple[int, int] = (0, 0),
        on_bad: OnBadRecord | None = None,
    ) -> None:
        self.channel = channel
        self.term, self.cseq = after
        self.position = (b"", *after)
        self.counts = ReadCounts()
        self._fences = fences or {}
        self._placed = after != (0, 0)
        self._on_bad = on_bad
        self._bad_in_a_row = 0
        self._parts: list[Record] = []

    def accept(self, entries: Sequence[Entry]) -> list[Record]:
        """The records of `entries` that count, in order. An incomplete batch is held until its last part is here.
        Raises plain `TidewalError` after `BAD_RECORDS_MAX` bad ones in a row."""
        if entries and not self._placed:
            self._place(entries[0].id)
        accepted: list[Record] = []
        for entry in entries:
            try:
                record = decode(entry.payload, entry.id)
            except BadRecord as error:
                self._bad(entry, error)
            else:
                self._bad_in_a_row = 0
                self.counts.records += 1
                self.counts.bytes += len(entry.payload)
                if self._counts(record):
                    self._assemble(record, accepted)
            if not self._parts:
                self.position = (entry.id, self.term, self.cseq)
        return accepted

    def _place(self, first_id: bytes) -> None:
        self.term = max((term for term, fence in self._fences.items() if fence <= first_id), default=0)
        self._placed = True

    def _counts(self, record: Record) -> bool:
        if record.term == 0:
            return True
        if record.term < self.term:
            self.counts.fenced += 1
            return False
        if record.term == self.term and record.cseq <= self.cseq:
            self.counts.duplicates += 1
            return False
        self.term, self.cseq = record.term, record.cseq
        return True

    def _assemble(self, record: Record, accepted: list[Record]) -> None:
        """A batch's parts follow each other in the log: with another record between them it never was whole."""
        part = record.part
        held = self._parts[0].part if self._parts else None
        if held is not None and (part is None or part.batch != held.batch or part.number != len(self._parts)):
            self.counts.incomplete += 1
            self._parts = []
        if part is None or part.of == 1:
            accepted.append(record)
        elif part.number == len(self._parts):
            self._parts.append(record)
            if len(self._parts) == part.of:
                accepted += self._parts
                self._parts = []

    def _bad(self, entry: Entry, error: BadRecord) -> None:
        self.counts.bad += 1
        self._bad_in_a_row += 1
        if self._on_bad is not None:
            self._on_bad(self.channel, entry, error)
        if self._bad_in_a_row >= BAD_RECORDS_MAX:
            raise TidewalError(
                f"{self._bad_in_a_row} records in a row of {self.channel} cannot be read ({error.message}); stopping, "
                "for this looks like a fault of the reader, not of the records",
                channel=self.channel,
            )
