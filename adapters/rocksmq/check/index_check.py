"""Compare the index with the journal while the journal is read, from an index opened for reading only.

rocksdict rewrites a file of its own even then, and ends the process at a damaged file of options, which a reader does
not need. So it opens links to all others in a folder of their own. What RocksDB cannot read becomes a `CorruptLog` with
the index's path.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import rocksdict

from ....runtime.errors import CorruptLog
from ..index.index import END, ENTRY, ENTRY_KEY, SEGMENT_KEY, SPAN_BYTES, TIME_KEY, SegmentSummary, summary_in
from .findings import SegmentReport

_NOT_READ = ("rocksdict-config.json", "OPTIONS-")  # how their names begin


class IndexCheck:
    """Asked about each frame and each segment in turn; every method may raise `CorruptLog`. Close it."""

    @classmethod
    def open(cls, path: str) -> IndexCheck | None:
        """None where there is no index: the next opening builds it. Raises `CorruptLog` for one that cannot be read."""
        if not os.path.isdir(path):
            return None
        with _reading(path):
            links = tempfile.TemporaryDirectory(prefix="tidewal-index-")
            try:
                for name in os.listdir(path):
                    if not name.startswith(_NOT_READ):
                        os.symlink(os.path.abspath(os.path.join(path, name)), os.path.join(links.name, name))
                access = rocksdict.AccessType.read_only()
                return cls(
                    path, rocksdict.Rdict(links.name, rocksdict.Options(raw_mode=True), access_type=access), links
                )
            except BaseException:
                links.cleanup()
                raise

    def __init__(self, path: str, db: rocksdict.Rdict, links: tempfile.TemporaryDirectory[str]) -> None:
        self._path, self._db, self._links = path, db, links
        self._first_epoch: int | None = None
        self._matched = 0  # index entries that point at a frame with their id
        self._reachable: dict[int, tuple[int, int]] = {}  # channel → epoch and end of what its last index entry covers
        self._complete_to = self.durable_to()  # the index of a process that was killed ends there; opening completes it

    def frame(self, epoch: int, offset: int, firsts: dict[int, int]) -> Iterator[str]:
        """What is wrong about a frame's entries; `firsts` maps each channel in it to its first id there."""
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        for channel, id in firsts.items():
            value = self._get(ENTRY_KEY.pack(b"I", channel, id))
            if value is not None:
                indexed_epoch, indexed_offset, earlier = ENTRY.unpack(value)
                if (indexed_epoch, indexed_offset) != (epoch, offset):
                    yield f"the index has id {id:016x} of channel {channel} at {indexed_epoch}, {indexed_offset}"
                    continue
                self._matched += 1
                if self._get(TIME_KEY.pack(b"T", channel, earlier, id)) != value:
                    yield f"the index does not find id {id:016x} of channel {channel} by its time"
                self._reachable[channel] = epoch, offset + SPAN_BYTES
            elif self._reachable.get(channel, (0, 0)) <= (epoch, offset) < self._complete_to:
                yield f"the index does not find id {id:016x} of channel {channel}"
                self._reachable[channel] = epoch, offset + SPAN_BYTES  # once is enough

    def segment(
        self, report: SegmentReport, sequence: int | None, *, final: bool, intact: bool
    ) -> Iterator[tuple[int, str]]:
        """What is wrong about a segment that was read; `final`: the journal ends in it; `intact`: nothing was wrong in
        it or before."""
        if final:
            if intact and (astray := self._count_entries() - self._matched) > 0:
                yield report.end, f"the index points {astray} times to where no frame with that id begins"
            epoch, offset = self.durable_to()
            if (epoch, offset) > (report.epoch, report.end):
                yield report.end, f"segment {epoch} was durable up to offset {offset}, but the journal ends here"
        summary = self.summary(report.epoch) if report.frames else None
        if summary is None:
            return
        if summary.end != report.end:
            yield report.end, f"the index says that the segment ends at {summary.end}"
        elif summary.channels != report.channels:
            yield report.end, "the index says otherwise about the channels in this segment"
        elif sequence is not None and summary.last_sequence > sequence:
            yield report.end, f"the index says that the segment ends with frame {summary.last_sequence}"

    def summary(self, epoch: int) -> SegmentSummary | None:
        """What the index knows of a full segment; None where it knows nothing."""
        packed = self._get(SEGMENT_KEY.pack(b"S", epoch))
        with _reading(self._path):
            return None if packed is None else summary_in(packed)

    def durable_to(self) -> tuple[int, int]:
        """The epoch and offset up to which the journal was durable, as far as the index knows."""
        epoch, offset = END.unpack(self._get(b"E") or bytes(END.size))
        return epoch, offset

    def _count_entries(self) -> int:
        """The number of index entries for the segments that were read."""
        count = 0
        with _reading(self._path):
            found = self._db.iter()
            found.seek(b"I")
            while found.valid() and isinstance(key := found.key(), bytes) and key[:1] == b"I":
                value = found.value()
                epoch = ENTRY.unpack(value)[0] if isinstance(value, bytes) else 0
                count += len(key) == ENTRY_KEY.size and self._first_epoch is not None and epoch >= self._first_epoch
                found.next()
            if not found.valid():
                found.status()  # raises where the iteration ended at what RocksDB cannot read
        return count

    def _get(self, key: bytes) -> bytes | None:
        with _reading(self._path):
            value = self._db.get(key)
        return value if isinstance(value, bytes) else None

    def close(self) -> None:
        self._db.close()
        self._links.cleanup()


@contextmanager
def _reading(path: str) -> Generator[None]:
    """Give rocksdict's bare exceptions a type."""
    try:
        yield
    except Exception as error:
        raise CorruptLog(f"the index {path} cannot be read: {error}", path=path, offset=0) from error
