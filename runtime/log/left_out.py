"""What stands in the place of entries that a filter has left out before they were sent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ..clock import MAX_TIMESTAMP
from ..errors import BadRecord
from .record import header_size, read_header
from .wal import Entry, Payload

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter

Header: TypeAlias = tuple[Any, ...]

MAX_PATTERN_STEPS: Final = 1 << 20
"""Bytes of a header times characters of patterns of `like` that `EntryFilter` compares for one entry: some
milliseconds, in which the process that owns a log does nothing else."""

_log = logging.getLogger(__name__)
_STATE = Struct(">QQQ")
_PART = 6  # in a header


class LeftOut(Entry):
    """An entry in the place of a run of entries without a gap, all of one term, which do not pass a filter: a reader
    has come up to `(id, term, cseq, timestamp)` behind it, as if it had read them. `id` is that of the last one."""

    __slots__ = ()

    @classmethod
    def of(cls, id: bytes, timestamp: int, state: bytes) -> LeftOut:
        """As it travels, with `payload` as its `state`. Raises `BadRecord`, also for numbers that no record has."""
        if len(state) != _STATE.size or max(timestamp, *_STATE.unpack(state)) > MAX_TIMESTAMP:
            raise BadRecord("what stands in the place of entries that were left out cannot be read", reason="frame")
        return cls(id, timestamp, state)

    @property
    def state(self) -> tuple[int, int, int]:
        """The term and the highest number of the owner in the run, and the count of its entries."""
        return cast("tuple[int, int, int]", _STATE.unpack(self.payload))


class EntryFilter:
    """Leaves entries out of what is sent, where they surely do not pass: its reader has the last word.

    A batch is left out whole, where all of it is here and none of its parts passes; else it is all sent. What is no
    intact record is sent, for the reader must see it; so is one for which the filter cannot be evaluated, or costs more
    than `MAX_PATTERN_STEPS`.
    """

    def __init__(self, where: RecordFilter) -> None:
        self._where = where
        self._kept: list[Entry] = []
        self._kept_bytes = 0
        self._run_end = b""  # the id of the last entry of a run that is left out; empty where there is none
        self._run: list[int] = [0, 0, 0, 0]  # its time, term, highest number and count
        self._batch: list[tuple[Entry, Header]] = []  # the parts so far of one that may be left out

    @property
    def kept_bytes(self) -> int:
        """Bytes of payloads that are to be sent so far."""
        return self._kept_bytes

    def add(self, entries: Iterable[Entry]) -> None:
        """Take the entries that follow."""
        for _ in self.added(entries):
            pass

    def added(self, entries: Iterable[Entry]) -> Iterator[None]:
        """Take the entries that follow, one with each step, so that a caller can do something else between two."""
        passes, leave_out = self._passes, self._leave_out
        for entry in entries:
            header = read_header(entry.payload)
            if header is None or self._is_too_dear(entry.payload):
                self._keep(entry)
            elif header[_PART] is not None:
                self._add_part(entry, header)
            elif passes(header):
                self._keep(entry)
            else:
                if self._batch:
                    self._keep_batch()
                leave_out(entry.id, header)
            yield

    def taken(self) -> list[Entry]:
        """What is to be sent, in order: also of a batch that is not all here."""
        self._keep_batch()
        self._end_run()
        kept, self._kept = self._kept, []
        self._kept_bytes = 0
        return kept

    def _is_too_dear(self, payload: Payload) -> bool:
        """Whether evaluating the filter may take too long; most payloads are too small for that, whatever they hold."""
        length = self._where.pattern_length
        return length * len(payload) > MAX_PATTERN_STEPS and length * header_size(payload) > MAX_PATTERN_STEPS

    def _passes(self, header: Header) -> bool:
        try:
            return self._where.passes_header(header)
        except Exception:  # one entry must not end the answers of all: the reader meets it, and says so
            _log.exception("a filter could not be evaluated; the entry is sent")
            return True

    def _add_part(self, entry: Entry, header: Header) -> None:
        _, number, of = header[_PART]
        if self._batch and header[_PART] != _following(self._batch[-1][1]):
            self._keep_batch()
        if self._passes(header) or number != len(self._batch):  # else its beginning is not here, or is to be sent
            self._keep(entry)
            return
        self._batch.append((entry, header))
        if number + 1 == of:
            for part, part_header in self._batch:
                self._leave_out(part.id, part_header)
            self._batch = []

    def _keep_batch(self) -> None:
        batch, self._batch = self._batch, []
        for entry, _ in batch:
            self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        if self._batch:
            self._keep_batch()
        self._end_run()
        self._kept.append(entry)
        self._kept_bytes += len(entry.payload)

    def _leave_out(self, id: bytes, header: Header) -> None:
        run, ts, term, cseq = self._run, header[1], header[2], header[3]
        if self._run_end and run[1] == term:
            if ts > run[0]:
                run[0] = ts
            if cseq > run[2]:
                run[2] = cseq
            run[3] += 1
        else:
            self._end_run()
            self._run = [ts, term, cseq, 1]
        self._run_end = id

    def _end_run(self) -> None:
        if self._run_end:
            ts, *state = self._run
            self._kept.append(LeftOut(self._run_end, ts, _STATE.pack(*state)))
            self._run_end = b""


def _following(header: Header) -> tuple[int, int, int]:
    """The part that follows the one with this header."""
    batch, number, of = header[_PART]
    return batch, number + 1, of
