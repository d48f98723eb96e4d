"""A disk that fails as disks do: it loses what was not synced, writes half of a write, is full, or refuses.

`FaultyDisk` keeps real files (what a running process sees is its page cache) and remembers for each sector what the
device would hold. `cut_power` makes every further call fail; `restore_power` leaves the files as the device has them:
each unsynced sector kept or lost, by the seed.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..disk import Disk, Syncer
from ..event_file import EventFile
from ..log.wal import Payload

SECTOR_BYTES = 512
Operation = Literal["open", "read", "write", "sync", "rename", "remove", "sync_directory"]
WRITING = ("open", "write", "rename", "remove")  # a segment is always opened for writing, too


@dataclass(slots=True)
class _File:
    """Sectors whose content the device lacks, with what it has instead. `dirty` ones are written at the next sync;
    those of a failed sync count as clean afterwards and are never written."""

    path: str
    dirty: dict[int, bytes] = field(default_factory=dict[int, bytes])
    abandoned: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(slots=True)
class _Rename:
    """A name that the device does not know yet. `old` is None for a file that was created; `replaced` is the content
    that the name stood for before."""

    new: str
    old: str | None = None
    replaced: bytes | None = None


@dataclass(slots=True)
class _Fault:
    operation: Operation
    name: str
    error: int
    skip: int
    times: int


class FaultySyncer:
    """Syncs of a faulty disk, which end as soon as they begin."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._event = EventFile(blocking=False)
        self.file: int = self._event.file
        self._disk = disk
        self._error: OSError | None = None
        weakref.finalize(self, self._event.close)

    def start(self, file: int) -> bool:
        self._error = None
        try:
            self._disk.sync(file)
        except OSError as error:
            self._error = error
        self._event.set()
        return True

    def finish(self) -> bool:
        try:
            self._event.take()
        except BlockingIOError:
            return False
        if self._error is not None:
            raise self._error
        return True


class FaultyDisk(Disk):
    """A `Disk` for tests. Thread-safe."""

    def __init__(self, seed: int = 0, *, keep_chance: float = 0.5, beside: bool = True) -> None:
        """`keep_chance` is how likely an unsynced sector survives a loss of power. `beside`: it has a syncer."""
        self._beside = beside
        self.free: int | None = None  # free bytes to pretend
        self.write_limit: int | None = None  # bytes that one write takes at most
        self.read_only: bool = False  # as after a remount: nothing can be written, made, renamed or removed
        self.syncs: int = 0
        self._random = random.Random(seed)
        self._keep_chance = keep_chance
        self._faults: list[_Fault] = []
        self._files: dict[int, _File] = {}  # by inode
        self._renames: dict[str, list[_Rename]] = {}  # by directory
        self._power = True
        self._lock = threading.RLock()

    def fail(
        self, operation: Operation, error: int = errno.EIO, *, skip: int = 0, times: int = 1, name: str = ""
    ) -> None:
        """Let the operation fail `times` times after succeeding `skip` times, on paths that contain `name`."""
        self._faults.append(_Fault(operation, name, error, skip, times))

    def heal(self) -> None:
        """Let all operations succeed again."""
        self._faults, self.read_only, self.write_limit = [], False, None

    def cut_power(self) -> None:
        """Refuse all operations from now on."""
        with self._lock:
            self._power = False

    def restore_power(self) -> None:
        """Leave on the files what the device had. Open the log again with this disk."""
        with self._lock:
            for file in self._files.values():
                self._lose(file)
            for renames in self._renames.values():
                for rename in reversed(renames):
                    self._undo(rename)
            self._files, self._renames, self._faults = {}, {}, []
            self._power = True

    def _lose(self, file: _File) -> None:
        lost = dict(file.abandoned)
        lost.update({at: old for at, old in sorted(file.dirty.items()) if self._random.random() >= self._keep_chance})
        if not lost:
            return
        descriptor = os.open(file.path, os.O_RDWR)
        try:
            for at, old in lost.items():
                os.pwrite(descriptor, old, at)
        finally:
            os.close(descriptor)

    def _undo(self, rename: _Rename) -> None:
        if rename.old is None:
            os.unlink(rename.new)
        else:
            os.rename(rename.new, rename.old)
        if rename.replaced is not None:
            with open(rename.new, "wb") as file:
                file.write(rename.replaced)

    def _check(self, operation: Operation, path: str) -> None:
        if not self._power:
            raise OSError(errno.EIO, "the power is off")
        if self.read_only and operation in WRITING:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        for fault in self._faults:
            if fault.operation == operation and fault.name in path:
                if fault.skip:
                    fault.skip -= 1
                elif fault.times:
                    fault.times -= 1
                    raise OSError(fault.error, os.strerror(fault.error))

    # ---- the Disk ----------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        with self._lock:
            self._check("open", path)
            file = super().open(path, create=create)
            self._files.setdefault(os.fstat(file).st_ino, _File(path)).path = path
            if create:
                self._renames.setdefault(os.path.dirname(path), []).append(_Rename(path))
            return file

    def read(self, file: int, size: int, offset: int) -> bytes:
        self._check("read", self._path(file))
        return super().read(file, size, offset)

    def write(self, file: int, buffers: Sequence[Payload], offset: int) -> int:
        with self._lock:
            self._check("write", self._path(file))
            data = b"".join(bytes(buffer) for buffer in buffers)
            if self.write_limit is not None:
                data = data[: self.write_limit]
            self._remember(file, offset, len(data))
            return os.pwrite(file, data, offset)

    def _remember(self, descriptor: int, offset: int, size: int) -> None:
        file = self._files[os.fstat(descriptor).st_ino]
        for at in range(offset - offset % SECTOR_BYTES, offset + size, SECTOR_BYTES):
            if at in file.dirty:
                continue
            old = file.abandoned.pop(at, None)
            file.dirty[at] = os.pread(descriptor, SECTOR_BYTES, at) if old is None else old

    def sync(self, file: int) -> None:
        with self._lock:
            known = self._files[os.fstat(file).st_ino]
            try:
                self._check("sync", known.path)
            except OSError:
                if self._power:
                    known.abandoned.update(known.dirty)
                    known.dirty.clear()
                raise
            known.dirty.clear()
            self.syncs += 1

    def syncer(self) -> Syncer | None:
        return FaultySyncer(self) if self._beside else None

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._check("rename", new)
            inode = os.stat(old).st_ino
            replaced = self._content(new) if os.path.isfile(new) else None
            super().rename(old, new)
            self._files.setdefault(inode, _File(new)).path = new
            self._renames.setdefault(os.path.dirname(new), []).append(_Rename(new, old, replaced))

    def _path(self, descriptor: int) -> str:
        return self._files[os.fstat(descriptor).st_ino].path

    def _content(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def remove(self, path: str) -> None:
        with self._lock:
            self._check("remove", path)
            self._renames.setdefault(os.path.dirname(path), [])
            self._files.pop(os.stat(path).st_ino, None)
            super().remove(path)
            pending = self._renames[os.path.dirname(path)]
            pending[:] = [rename for rename in pending if rename.new != path]

    def sync_directory(self, directory: str) -> None:
        with self._lock:
            self._check("sync_directory", directory)
            self._renames.pop(directory, None)

    def free_bytes(self, directory: str) -> int:
        return super().free_bytes(directory) if self.free is None else self.free
