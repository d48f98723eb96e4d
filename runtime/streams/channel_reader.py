"""What every reader of a pchannel does with its entries first: decode, drop what a fence hides, drop duplicates, and
put the parts of a batch together. Bad records go to the dead-letter handler.

With a catalog a reader accepts only what was granted: a record of a term that was never granted, without a term, from
before its term's fence, or with a time beyond every limit is a bad record. Without a catalog, the records of the
highest term count, and writers to the log are trusted not to make terms up.

With a filter the reader has the last word on what passes it: a batch does where any of its parts does, as a whole. How
far it has come in what does not pass, it says with `LeftOutRecord`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..clock import MAX_TIMESTAMP
from ..errors import BadRecord, TidewalError
from ..log.left_out import LeftOut
from ..log.record import NOT_A_RECORD, Record, RecordType, decode
from ..log.wal import Entry

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter

BAD_RECORDS_MAX = 100  # intact ones without a good one between: then the code is wrong, and the reader stops

_FOREIGN = (*NOT_A_RECORD, "grant")  # in any version of the code: no record, or none of an owner


@dataclass(frozen=True, slots=True)
class LeftOutRecord(Record):
    """In the place of records that do not pass a filter, without a gap: the place and the time of the last one. It is
    never in a log, and no reader delivers it."""

    @classmethod
    def at(cls, id: bytes, ts: int, term: int, cseq: int) -> LeftOutRecord:
        """The mark of records up to that one."""
        return cls(RecordType.ROWS, ts, term, cseq, id=id)


OnBadRecord = Callable[[str, Entry, BadRecord], None]


class Granted(NamedTuple):
    """The grants of a channel so far: the highest term, the timestamp above which no owner has stamped or promised
    anything, and for each term that has one the id of its fence."""

    term: int
    limit: int = MAX_TIMESTAMP
    fences: Mapping[int, bytes] = {}

    def covers(self, term: int, ts: int) -> bool:
        """Whether an owner of that term can have stamped or promised `ts`."""
        return 1 <= term <= self.term and ts <= self.limit


class Grants(Protocol):
    """Where a reader gets grants: the catalog, which has each before anything is written under it."""

    def granted(self, pchannel: str) -> Granted: ...

    async def catch_up(self) -> object:
        """Read all that is granted by now."""
        ...


@dataclass(slots=True)
class ReadCounts:
    """What a channel reader has seen; from `duplicates` on, what was dropped of it."""

    records: int = 0
    bytes: int = 0
    duplicates: int = 0
    fenced: int = 0
    incomplete: int = 0  # batches of which a part was missing
    bad: int = 0
    lost: int = 0  # times that retention had removed what was to be read next, and `reset_to` moved the stream
    filtered: int = 0  # entries that do not pass the filter, those included that were not sent for that reason
    late: int = 0  # counted by a time-ticked stream: behind a time already announced


class ChannelReader:
    """The reading state of one pchannel: the highest (term, cseq), and `position`: the id, term and cseq of the last
    entry that is processed, behind which reading can go on later.

    `fences` maps each term to the id of its fence, from the catalog: a reader that starts behind a fence takes its
    lowest term from there (guarantee 3). Records without an owner (term 0: control and event channels) pass unchecked,
    except where there are `grants`.

    `after` is the term and cseq of the record behind which the reader begins, which may be one part of a batch: then
    the batch's other parts are accepted, once the last one is there.
    """

    def __init__(
        self,
        channel: str,
        *,
        fences: Mapping[int, bytes] | None = None,
        after: tuple[int, int] = (0, 0),
        on_bad: OnBadRecord | None = None,
        grants: Grants | None = None,
        granted: Granted | None = None,
        where: RecordFilter | None = None,
    ) -> None:
        """`grants` are looked up as they are needed, by `accept_granted`; `granted` are known and do not change.
        `on_bad` gets the entries that cannot be read, whatever the filter `where` says."""
        self.channel = channel
        self.term: int = after[0]
        self.cseq: int = after[1]
        self.position: tuple[bytes, int, int] = (b"", *after)
        self.counts: ReadCounts = ReadCounts()
        self.fences: Mapping[int, bytes] = fences or {}
        self._placed = after != (0, 0)
        self._after = after
        self.on_bad: OnBadRecord | None = on_bad
        self.grants: Grants | None = grants
        self._granted = granted if grants is None else grants.granted(channel)
        self.where: RecordFilter | None = where
        self._bad_in_a_row = 0
        self._parts: list[Record] = []

    def accept_granted(self, entries: Sequence[Entry]) -> tuple[list[Record], Sequence[Entry]]:
        """Accept `entries` as `accept` does, up to the first record that no known grant covers. Returns the records
        that count before it, and the entries from it on. Before such a record is taken for bad the grants are read
        anew: hand out the records, for the position is behind them now, then await `learn_grants`, and `accept` the
        rest."""
        accepted: list[Record] = []
        return accepted, self._accept(entries, accepted, doubting=self.grants is not None)

    async def learn_grants(self) -> None:
        """Read the grants to their present end: the grant of a record was stored before the record was written."""
        assert self.grants is not None
        await self.grants.catch_up()
        self._granted = self.grants.granted(self.channel)

    def accept(self, entries: Sequence[Entry]) -> list[Record]:
        """The records of `entries` that count, in order, with a `LeftOutRecord` in the place of those that do not pass
        the filter. An incomplete batch is held until its last part is here.
        Raises plain `TidewalError` after `BAD_RECORDS_MAX` that are intact and cannot be read, without a good one
        between them."""
        accepted: list[Record] = []
        self._accept(entries, accepted, doubting=False)
        return accepted

    def _accept(self, entries: Sequence[Entry], accepted: list[Record], *, doubting: bool) -> Sequence[Entry]:
        """Add the records that count to `accepted`. Returns the entries from the first one on that no known grant
        covers, where `doubting`; else that one is bad."""
        if entries and not self._placed:
            self._place(entries[0].id)
        for at, entry in enumerate(entries):
            if isinstance(entry, LeftOut):
                if not self._pass_over(entry, accepted, doubting):
                    return entries[at:]
                continue
            try:
                record = decode(entry.payload, entry.id)
                if self._granted is not None:
                    why = self._ungranted(record, self._granted)
                    if why and doubting:
                        return entries[at:]
                    if why:
                        raise BadRecord(why, reason="grant")
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
        return ()

    def _pass_over(self, left_out: LeftOut, accepted: list[Record], doubting: bool) -> bool:
        """Go behind entries that were left out as if they had been read; False, and nothing done, where they are to be
        looked at again with newer grants. Such as no grant covers say nothing."""
        term, cseq, count = left_out.state
        mark = LeftOutRecord.at(left_out.id, left_out.timestamp, term, cseq)
        ungranted = self._granted is not None and bool(self._ungranted(mark, self._granted))
        if ungranted and doubting:
            return False
        self.counts.records += count
        self.counts.filtered += count
        if not ungranted and self._counts(mark):
            self._end_batch()
            _mark(accepted, mark)
        if not self._parts:
            self.position = (left_out.id, self.term, self.cseq)
        return True

    @staticmethod
    def _ungranted(record: Record, granted: Granted) -> str:
        """Why no owner can have written the record; empty where one can."""
        if not granted.covers(record.term, record.ts):
            return (
                f"a record of term {record.term} at {record.ts}: no owner was granted more than term {granted.term} "
                f"and times up to {granted.limit}"
            )
        if record.id < granted.fences.get(record.term, b""):
            return f"a record of term {record.term} from before the fence of that term"
        return ""

    def _place(self, first_id: bytes) -> None:
        self.term = max((term for term, fence in self.fences.items() if fence <= first_id), default=0)
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
        """A batch's parts follow each other in the log: a batch with another record between its parts was never whole.
        A reader that begins within a batch gets the rest of it: `after` is the number of the part before."""
        part = record.part
        held = self._parts[-1].part if self._parts else None
        if held is not None and (part is None or part.batch != held.batch or part.number != held.number + 1):
            self._end_batch()
        if part is None or part.of == 1:
            if self.where is None:  # the hot path
                accepted.append(record)
            else:
                self._hand_on([record], accepted)
        elif self._parts or part.number == 0 or (record.term, record.cseq - 1) == self._after != (0, 0):
            self._parts.append(record)
            if part.number + 1 == part.of:
                self._hand_on(self._parts, accepted)
                self._parts = []

    def _end_batch(self) -> None:
        """Give up a batch of which something is missing."""
        if self._parts:
            self.counts.incomplete += 1
            self._parts = []

    def _hand_on(self, records: list[Record], accepted: list[Record]) -> None:
        """Accept a record or a whole batch that passes the filter. The rest of one that began before the reader did
        passes, for the reader is behind what has passed."""
        part = records[0].part
        if self.where is None or (part is not None and part.number) or any(map(self.where.passes, records)):
            accepted += records
            return
        last = records[-1]
        self.counts.filtered += len(records)
        _mark(accepted, LeftOutRecord.at(last.id, last.ts, last.term, last.cseq))

    def _bad(self, entry: Entry, error: BadRecord) -> None:
        self.counts.bad += 1
        self._bad_in_a_row += error.fields.get("reason") not in _FOREIGN
        if self.on_bad is not None:
            self.on_bad(self.channel, entry, error)
        if self._bad_in_a_row >= BAD_RECORDS_MAX:
            raise TidewalError(
                f"{self._bad_in_a_row} intact records of {self.channel} cannot be read ({error.message}); stopping, "
                "for this looks like a fault of the reader, not of the records",
                channel=self.channel,
            )


def _mark(accepted: list[Record], mark: LeftOutRecord) -> None:
    """Add the mark, together with one right before it: the highest of both, where owners and others have written."""
    if accepted and isinstance(accepted[-1], LeftOutRecord):
        before = accepted.pop()
        term, cseq = max((before.term, before.cseq), (mark.term, mark.cseq))
        mark = LeftOutRecord.at(mark.id, max(before.ts, mark.ts), term, cseq)
    accepted.append(mark)
