"""The index: RocksDB knows where in the journal to look, and nothing that the journal does not know.

It is written without syncs after each commit and rebuilt from the journal where it lacks something, so losing it costs
time only. Three kinds of keys, all numbers big-endian:

    I channel id           → epoch, offset: the frame with that entry, the first of its channel for `SPAN_BYTES`
    T channel timestamp id → the same place; the timestamp is the highest of all *earlier* entries of the channel
    S epoch                → summary of a full segment (`SegmentSummary`)
    E                      → epoch, offset: frames were durable up to here, so recovery must find at least these

rocksdict's traps are kept out: no iterator bounds (its lower bound is the upper one, and dropped ReadOptions dangle),
no `write(sync=True)` (it holds the GIL), and nothing here that its lenient recovery could lose for good.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, cast

import msgpack
import rocksdict

SPAN_BYTES = 1024 * 1024  # one index entry per channel and this much journal
WRITE_BYTES = 4 * 1024 * 1024  # of journal, after which its places are written together
WRITE_PLACES = 256  # or so many: a thousand channels must not stop the journal for all of theirs at once
FORMAT = b"1"

_PLACE_KEY = Struct(">cIQ")
_TIME_KEY = Struct(">cIQQ")
_SEGMENT_KEY = Struct(">cQ")
_PLACE = Struct(">QQQ")
_END = Struct(">QQ")
_FORMAT_KEY = b"F"
_END_KEY = b"E"


class Place(NamedTuple):
    """An indexed entry: its id and where the frame that holds it begins."""

    id: int
    epoch: int
    offset: int
    earlier_timestamp: int


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What a full segment holds. `sealed_ms` is not before its last append; `channels` maps a channel's number to its
    last id and bytes here. `sealed_at`, which is not stored: the same by the monotonic clock, if in this life."""

    sealed_ms: int
    last_sequence: int
    end: int
    channels: dict[int, tuple[int, int]]
    sealed_at: float | None = None


class Index:
    """The RocksDB beside the journal. Thread-safe; every call blocks for microseconds."""

    def __init__(self, path: str) -> None:
        """Open, or begin anew where that fails. Raises `OSError` when that fails, too."""
        self.rebuilt = False
        self._path = path
        self._lock = threading.Lock()
        self._unwritten: list[tuple[int, Place]] = []
        try:
            self._open()
        except Exception:  # rocksdict raises bare Exceptions; whatever is wrong with a cache, a new one mends it
            self._start_over()
        if self._db.get(_FORMAT_KEY) != FORMAT:
            self._db.close()
            self._start_over()
        self._durable_to = self._written_to = self._stored_end()

    def _open(self) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(4 * 1024 * 1024)
        options.set_keep_log_file_num(2)
        options.set_manifest_preallocation_size(64 * 1024)
        options.set_max_open_files(64)
        self._db = rocksdict.Rdict(self._path, options)

    def _start_over(self) -> None:
        if os.path.isdir(self._path):
            shutil.rmtree(self._path)
        elif os.path.lexists(self._path):
            os.unlink(self._path)
        try:
            self._open()
            self._db.put(_FORMAT_KEY, FORMAT)
        except Exception as error:  # a bare one again, which tells its cause in words only
            code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
            raise OSError(code, f"the index cannot be made: {error}", self._path) from error
        self.rebuilt = True

    def add(self, places: list[tuple[int, Place]], durable_to: tuple[int, int]) -> None:
        """Take (channel number, place) pairs, and the epoch and offset up to which the journal is durable.

        They count at once for whoever asks here. They are written some at a time, with each seal, and when closing;
        what is lost by then lies in the last segment, which recovery reads.
        """
        with self._lock:
            self._unwritten += places
            self._durable_to = max(self._durable_to, durable_to)
            (epoch, offset), (written_epoch, written_offset) = self._durable_to, self._written_to
            far = epoch != written_epoch or offset - written_offset >= WRITE_BYTES
            if far or len(self._unwritten) >= WRITE_PLACES:
                self._write()

    def _write(self) -> None:
        """Write what was added. Under the lock."""
        if not self._unwritten and self._written_to == self._durable_to:
            return
        batch = rocksdict.WriteBatch(raw_mode=True)
        for channel, (id, epoch, offset, earlier_timestamp) in self._unwritten:
            value = _PLACE.pack(epoch, offset, earlier_timestamp)
            batch.put(_PLACE_KEY.pack(b"I", channel, id), value)
            batch.put(_TIME_KEY.pack(b"T", channel, earlier_timestamp, id), value)
        batch.put(_END_KEY, _END.pack(*self._durable_to))
        self._db.write(batch)
        self._unwritten, self._written_to = [], self._durable_to

    def durable_to(self) -> tuple[int, int]:
        """The farthest epoch and offset that `add` was told, in this life or an earlier one."""
        with self._lock:
            return self._durable_to

    def _stored_end(self) -> tuple[int, int]:
        value = self._db.get(_END_KEY)
        epoch, offset = _END.unpack(value) if isinstance(value, bytes) else (0, 0)
        return epoch, offset

    def at_or_before(self, channel: int, id: int) -> Place | None:
        """The last place of the channel whose id is ≤ `id`."""
        with self._lock:
            self._write()
            found = self._db.iter()
            found.seek_for_prev(_PLACE_KEY.pack(b"I", channel, id))
            return _place(found, channel)

    def after(self, channel: int, id: int) -> Place | None:
        """The first place of the channel whose id is > `id`."""
        with self._lock:
            self._write()
            found = self._db.iter()
            found.seek(_PLACE_KEY.pack(b"I", channel, id + 1))
            return _place(found, channel)

    def before_timestamp(self, channel: int, timestamp: int) -> Place | None:
        """The last place before which no entry has a timestamp ≥ `timestamp`; None: start at the first."""
        with self._lock:
            self._write()
            found = self._db.iter()
            found.seek_for_prev(_TIME_KEY.pack(b"T", channel, timestamp, 0))
            if not found.valid():
                return None
            key, value = found.key(), found.value()
        if not isinstance(key, bytes) or not isinstance(value, bytes) or len(key) != _TIME_KEY.size:
            return None
        kind, number, earlier_timestamp, id = _TIME_KEY.unpack(key)
        if (kind, number) != (b"T", channel):
            return None
        epoch, offset, _ = _PLACE.unpack(value)
        return Place(id, epoch, offset, earlier_timestamp)

    def seal(self, epoch: int, summary: SegmentSummary) -> None:
        """Store the summary of a segment that takes no more frames."""
        channels = [[number, *values] for number, values in summary.channels.items()]
        fields = [summary.sealed_ms, summary.last_sequence, summary.end, channels]
        picture = cast(bytes, msgpack.packb(fields))
        with self._lock:
            self._write()
            self._db.put(_SEGMENT_KEY.pack(b"S", epoch), picture)

    def summary(self, epoch: int) -> SegmentSummary | None:
        with self._lock:
            picture = self._db.get(_SEGMENT_KEY.pack(b"S", epoch))
        if not isinstance(picture, bytes):
            return None
        sealed_ms, last_sequence, end, channels = cast(
            "tuple[int, int, int, list[list[int]]]", msgpack.unpackb(picture)
        )
        return SegmentSummary(sealed_ms, last_sequence, end, {number: (last, size) for number, last, size in channels})

    def forget(self, epoch: int, channels: list[int]) -> None:
        """Remove what points into a segment that is going and the ones before it."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.delete(_SEGMENT_KEY.pack(b"S", epoch))
        for channel in channels:
            place = self.after(channel, 0)
            while place is not None and place.epoch <= epoch:
                batch.delete(_PLACE_KEY.pack(b"I", channel, place.id))
                batch.delete(_TIME_KEY.pack(b"T", channel, place.earlier_timestamp, place.id))
                place = self.after(channel, place.id)
        with self._lock:
            self._db.write(batch)

    def close(self) -> None:
        with self._lock:
            self._write()
            self._db.close()


def _place(found: rocksdict.RdictIter, channel: int) -> Place | None:
    if not found.valid():
        return None
    key, value = found.key(), found.value()
    if not isinstance(key, bytes) or not isinstance(value, bytes) or len(key) != _PLACE_KEY.size:
        return None
    kind, number, id = _PLACE_KEY.unpack(key)
    if (kind, number) != (b"I", channel):
        return None
    return Place(id, *_PLACE.unpack(value))
