"""The index: a RocksDB that says where in the journal to look, and has nothing that the journal does not have.

It is written without syncs after each commit and rebuilt from the journal where it lacks something, so losing it costs
time only. Four kinds of keys, all numbers big-endian:

    I channel id           → epoch, offset: the frame with that entry, the first of its channel for `SPAN_BYTES`
    T channel timestamp id → the same value; the timestamp is the highest of all *earlier* entries of the channel
    S epoch                → summary of a full segment (`SegmentSummary`)
    E                      → epoch, offset: frames were durable up to here, so recovery must find at least these

rocksdict's traps are avoided: no iterator bounds (its lower bound is the upper one, and dropped ReadOptions dangle), no
`write(sync=True)` (it holds the GIL), an iterator that ends is asked whether it failed, and the index has nothing that
its lenient recovery could lose for good.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, TypeVar, cast

import msgpack
import rocksdict

SPAN_BYTES = 1024 * 1024  # one index entry per channel and this much journal
WRITE_BYTES = 4 * 1024 * 1024  # of journal, after which its index entries are written together
WRITE_ENTRIES = 256  # or so many: a thousand channels must not stop the journal to write all of theirs at once
FORMAT = b"1"

ENTRY_KEY = Struct(">cIQ")
TIME_KEY = Struct(">cIQQ")
SEGMENT_KEY = Struct(">cQ")
ENTRY = Struct(">QQQ")
END = Struct(">QQ")
_FORMAT_KEY = b"F"
_END_KEY = b"E"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class IndexEntry(NamedTuple):
    """An indexed entry: its id, where the frame that holds it begins, and the highest timestamp of all entries of its
    channel before it."""

    id: int
    epoch: int
    offset: int
    earlier_timestamp: int


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What a full segment holds. `sealed_ms` (wall clock, milliseconds) is not before its last append; `channels` maps
    a channel's number to its last id and bytes here. `sealed_at`, which is not stored: the same moment by the monotonic
    clock, in seconds, if this incarnation of the owner sealed it."""

    sealed_ms: int
    last_sequence: int
    end: int
    channels: dict[int, tuple[int, int]]
    sealed_at: float | None = None


class IndexFailed(Exception):
    """The index cannot answer: search the journal."""


class Index:
    """The RocksDB beside the journal. Thread-safe; every call blocks for microseconds.

    It is a cache, and trusted as far as RocksDB's checksums go. Where it cannot be read when it is opened, it is built
    anew from the journal. Where no new one can be made (a full disk), and after an error later, it is not used until
    the log is closed: that is logged, counted (`failed`), and it is removed, so that the next opening builds it again;
    what is added then is dropped, and lookups raise `IndexFailed`.
    """

    def __init__(self, path: str, failed: Callable[[], None] = lambda: None) -> None:
        """Open the index at `path`, or begin anew where that fails. `failed` is called when it cannot be used. Raises
        `OSError` for a directory that cannot be removed."""
        self.rebuilt: bool = False
        self._path, self._failed = path, failed
        self._lock = threading.Lock()
        self._unwritten: list[tuple[int, IndexEntry]] = []
        self._db: rocksdict.Rdict | None = None  # None: the index is not used any more
        self._summaries: dict[int, SegmentSummary] = {}
        self._durable_to = self._written_to = (0, 0)
        why = self._load()
        if why is not None:
            what = "finds no space" if os.strerror(errno.ENOSPC) in why else "is damaged"
            _log.warning("the index %s %s, and is built again from the journal: %s", path, what, why)
            failed()
            self._start_over()

    @property
    def usable(self) -> bool:
        """Whether the index may be asked; False for good after an error."""
        return self._db is not None

    def _load(self) -> str | None:
        """Open, and read what recovery will ask for, so that recovery cannot fail half-way. Returns what is wrong."""
        try:
            db = self._db = self._open()
            if db.get(_FORMAT_KEY) != FORMAT:
                self._start_over()
                return None
            end = db.get(_END_KEY)
            epoch, offset = END.unpack(end) if isinstance(end, bytes) else (0, 0)
            self._durable_to = self._written_to = epoch, offset
            found = db.iter()
            found.seek(b"S")
            while _valid(found) and isinstance(key := found.key(), bytes) and key[:1] == b"S":
                _, epoch = SEGMENT_KEY.unpack(key)
                self._summaries[epoch] = summary_in(found.value())
                found.next()
        except OSError:
            raise
        except (
            Exception
        ) as error:  # rocksdict raises bare Exceptions; whatever is wrong with a cache, a new one mends it
            return str(error)
        return None

    def _open(self) -> rocksdict.Rdict:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(4 * 1024 * 1024)
        options.set_keep_log_file_num(2)
        options.set_manifest_preallocation_size(64 * 1024)
        options.set_max_open_files(64)
        return rocksdict.Rdict(self._path, options)

    def _start_over(self) -> None:
        self._release()
        self._summaries, self._durable_to, self._written_to = {}, (0, 0), (0, 0)
        if os.path.isdir(self._path):
            shutil.rmtree(self._path)
        elif os.path.lexists(self._path):
            os.unlink(self._path)
        self.rebuilt = True
        try:
            self._db = self._open()
            self._db.put(_FORMAT_KEY, FORMAT)
        except Exception as error:  # rocksdict raises bare Exceptions
            self._give_up(f"it cannot be made: {error}")

    def _release(self) -> None:
        """Close RocksDB, and release its lock, in whatever state it is."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(Exception):  # what it could not write is in the journal
                db.close()

    def distrust(self, what: str) -> None:
        """Use the index no more, because the journal contradicts it; `what` says how."""
        with self._lock:
            if self._db is not None:
                self._give_up(what)

    def _give_up(self, what: str) -> None:
        """Under the lock, or before another thread has this index."""
        self._release()
        self._unwritten = []
        shutil.rmtree(self._path, ignore_errors=True)
        _log.error(
            "the index %s failed, and is used no more: readers search the journal, which takes longer, and the next "
            "opening builds the index again: %s",
            self._path,
            what,
        )
        self._failed()

    def _change(self, change: Callable[[rocksdict.Rdict], None]) -> None:
        """Under the lock. Never raises: what is not written, the journal has."""
        if self._db is None:
            return
        try:
            change(self._db)
        except Exception as error:
            what = str(error)
        else:
            return
        self._give_up(what)

    def _look_up(self, look: Callable[[rocksdict.Rdict], T]) -> T:
        """Raises `IndexFailed`."""
        with self._lock:
            self._change(self._write)
            if self._db is None:
                raise IndexFailed
            try:
                return look(self._db)
            except Exception as error:
                what = str(error)
            self._give_up(what)
            raise IndexFailed

    def add(self, entries: list[tuple[int, IndexEntry]], durable_to: tuple[int, int]) -> None:
        """Take (channel number, index entry) pairs, and the epoch and offset up to which the journal is durable.

        They count at once for lookups here. They are written some at a time, with each seal, and when closing; what a
        crash loses before that lies in the last segment, which recovery reads.
        """
        with self._lock:
            if self._db is None:
                return
            self._unwritten += entries
            self._durable_to = max(self._durable_to, durable_to)
            (epoch, offset), (written_epoch, written_offset) = self._durable_to, self._written_to
            far = epoch != written_epoch or offset - written_offset >= WRITE_BYTES
            if far or len(self._unwritten) >= WRITE_ENTRIES:
                self._change(self._write)

    def _write(self, db: rocksdict.Rdict) -> None:
        """Write the index entries that were added."""
        if not self._unwritten and self._written_to == self._durable_to:
            return
        batch = rocksdict.WriteBatch(raw_mode=True)
        for channel, (id, epoch, offset, earlier_timestamp) in self._unwritten:
            value = ENTRY.pack(epoch, offset, earlier_timestamp)
            batch.put(ENTRY_KEY.pack(b"I", channel, id), value)
            batch.put(TIME_KEY.pack(b"T", channel, earlier_timestamp, id), value)
        batch.put(_END_KEY, END.pack(*self._durable_to))
        db.write(batch)
        self._unwritten, self._written_to = [], self._durable_to

    def durable_to(self) -> tuple[int, int]:
        """The farthest epoch and offset that `add` got, from this incarnation of the owner or an earlier one."""
        with self._lock:
            return self._durable_to

    def at_or_before(self, channel: int, id: int) -> IndexEntry | None:
        """The last index entry of the channel, by its number, whose id is ≤ `id`. Raises `IndexFailed`."""

        def look(db: rocksdict.Rdict) -> IndexEntry | None:
            found = db.iter()
            found.seek_for_prev(ENTRY_KEY.pack(b"I", channel, id))
            return _entry_at(found, channel)

        return self._look_up(look)

    def after(self, channel: int, id: int) -> IndexEntry | None:
        """The first index entry of the channel, by its number, whose id is > `id`. Raises `IndexFailed`."""

        def look(db: rocksdict.Rdict) -> IndexEntry | None:
            found = db.iter()
            found.seek(ENTRY_KEY.pack(b"I", channel, id + 1))
            return _entry_at(found, channel)

        return self._look_up(look)

    def before_timestamp(self, channel: int, timestamp: int) -> IndexEntry | None:
        """The last index entry of the channel before which no entry has a timestamp ≥ `timestamp`; None: start at the
        channel's first entry. Raises `IndexFailed`."""

        def look(db: rocksdict.Rdict) -> IndexEntry | None:
            found = db.iter()
            found.seek_for_prev(TIME_KEY.pack(b"T", channel, timestamp, 0))
            row = _row_at(found, TIME_KEY, b"T", channel)
            if row is None:
                return None
            (earlier_timestamp, id), (epoch, offset, _) = row
            return IndexEntry(id, epoch, offset, earlier_timestamp)

        return self._look_up(look)

    def seal(self, epoch: int, summary: SegmentSummary) -> None:
        """Store the summary of a segment that takes no more frames."""
        channels = [[number, *values] for number, values in summary.channels.items()]
        fields = [summary.sealed_ms, summary.last_sequence, summary.end, channels]
        packed = cast(bytes, msgpack.packb(fields))

        def change(db: rocksdict.Rdict) -> None:
            self._write(db)
            db.put(SEGMENT_KEY.pack(b"S", epoch), packed)

        with self._lock:
            self._change(change)

    def summary(self, epoch: int) -> SegmentSummary | None:
        """The summary of a segment that was stored when the index was opened."""
        return self._summaries.get(epoch)

    def forget(self, epoch: int, channels: list[int]) -> None:
        """Remove what points into the segment of that epoch, which is removed, and into those before it; `channels` are
        the numbers of the channels that it holds."""
        self._summaries.pop(epoch, None)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.delete(SEGMENT_KEY.pack(b"S", epoch))
        try:
            for channel in channels:
                entry = self.after(channel, 0)
                while entry is not None and entry.epoch <= epoch:
                    batch.delete(ENTRY_KEY.pack(b"I", channel, entry.id))
                    batch.delete(TIME_KEY.pack(b"T", channel, entry.earlier_timestamp, entry.id))
                    entry = self.after(channel, entry.id)
        except IndexFailed:
            return
        with self._lock:
            self._change(lambda db: db.write(batch))

    def close(self) -> None:
        """Write what was added, and close. Never raises: what could not be written, the journal has."""
        with self._lock:
            self._change(self._write)
            self._release()


def _valid(found: rocksdict.RdictIter) -> bool:
    """Whether the iterator is at an entry. RocksDB ends an iteration at what it cannot read, too, and says so only when
    it is asked."""
    if found.valid():
        return True
    found.status()  # raises
    return False


def _row_at(
    found: rocksdict.RdictIter, form: Struct, kind: bytes, channel: int
) -> tuple[list[int], tuple[int, ...]] | None:
    """The numbers in key and value of the row, if it is of that kind and channel, with a key of that form."""
    if not _valid(found):
        return None
    key, value = found.key(), found.value()
    if not isinstance(key, bytes) or not isinstance(value, bytes) or len(key) != form.size:
        return None
    of_kind, number, *numbers = form.unpack(key)
    return (numbers, ENTRY.unpack(value)) if (of_kind, number) == (kind, channel) else None


def _entry_at(found: rocksdict.RdictIter, channel: int) -> IndexEntry | None:
    row = _row_at(found, ENTRY_KEY, b"I", channel)
    return None if row is None else IndexEntry(*row[0], *row[1])


def summary_in(packed: object) -> SegmentSummary:
    """The summary of a segment, as `Index.seal` stores it."""
    sealed_ms, last_sequence, end, channels = cast(
        "tuple[int, int, int, list[list[int]]]", msgpack.unpackb(cast(bytes, packed))
    )
    return SegmentSummary(sealed_ms, last_sequence, end, {number: (last, size) for number, last, size in channels})
