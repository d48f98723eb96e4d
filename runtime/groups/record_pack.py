"""What a member that reads records delivers: those of one channel, between two times of the channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..log.record import Record
from ..log.wal import Delivered, Entry


@dataclass(frozen=True, slots=True)
class RecordPack:
    """Records of one channel in the order of its log, each once, batches whole.

    In a channel with an owner these are all of its records with `begin_ts` < ts ≤ `end_ts` (hybrid timestamps of the
    channel), and none at or before `end_ts` follows; the next pack begins where this one ends, also at another member.
    Other channels promise no order of time: there `end_ts` is the highest timestamp so far. `entries` are those of the
    log that acknowledging the pack covers, beside what lies before.
    """

    channel: str
    records: list[Record]
    begin_ts: int
    end_ts: int
    entries: Sequence[Entry]
    assignment_epoch: int
    owned_before: tuple[int, int] = (0, 0)  # the highest term and number of an owner, as of its begin
    owned: tuple[int, int] = (0, 0)  # and as of its end

    def __len__(self) -> int:
        return len(self.records)

    @property
    def first(self) -> bytes:
        """The id of the first record."""
        return self.records[0].id

    @property
    def handled(self) -> Sequence[Entry]:
        """The entries of the records."""
        ids = {record.id for record in self.records}
        return [entry for entry in self.entries if entry.id in ids]

    @property
    def delivered(self) -> Delivered:
        """The entries, as the member under it has delivered them."""
        return Delivered(self.channel, self.entries, self.assignment_epoch)

    def parts(self) -> list[Self]:
        """The records one by one, and batches as a whole: each can be acknowledged or committed by itself, in order."""
        place = {entry.id: at for at, entry in enumerate(self.entries)}
        units = _units(self.records)
        packs: list[Self] = []
        begin, begin_ts, owned = 0, self.begin_ts, self.owned_before
        for number, unit in enumerate(units):
            end = place[unit[-1].id] + 1
            end_ts = max(begin_ts, unit[-1].ts)
            before, owned = owned, (unit[-1].term, unit[-1].cseq) if unit[-1].term else owned
            if number + 1 == len(units):
                end, end_ts, owned = len(self.entries), self.end_ts, self.owned
            packs.append(
                replace(
                    self,
                    records=unit,
                    begin_ts=begin_ts,
                    end_ts=end_ts,
                    entries=self.entries[begin:end],
                    owned_before=before,
                    owned=owned,
                )
            )
            begin, begin_ts = end, end_ts
        return packs


def _units(records: Sequence[Record]) -> list[list[Record]]:
    units: list[list[Record]] = []
    for record in records:
        part = record.part
        if part is not None and part.number and units:
            units[-1].append(record)
        else:
            units.append([record])
    return units
