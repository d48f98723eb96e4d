"""Tables on a local or mounted POSIX file system: the only module that opens, syncs, lists and removes their files.

A file is durable once it and the folder that has its name are synced.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pa_fs

from ..errors import DirectoryUnwritable
from ..file_sync import sync_file, sync_path
from .digests import digest_of
from .table_store import CURRENT, LOG, CreatedFile, StoreUri, TableLocation, TableStore

# Readable by the node's user only, as the log is.
FOLDER_MODE = 0o700
FILE_MODE = 0o600
IDENTITY_FILE = ".store"
_escape = re.compile(r"%[0-9A-Fa-f]{2}")  # the Delta library writes below such a folder, and reads below another one


class LocalTableLocation(TableLocation):
    """The folder of one table."""

    def __init__(self, folder: StoreUri) -> None:
        self._folder = Path(os.path.abspath(folder))
        super().__init__(str(self._folder))

    def exists(self) -> bool:
        log = self._folder / "_delta_log"
        kept = (log.glob("*.json"), log.glob("*.parquet"), self._folder.glob("*.parquet"))
        return log.is_dir() and any(map(any, kept))

    def prepare(self) -> None:
        store, collection = self._folder.parent.parent, self._folder.parent
        try:
            store.mkdir(parents=True, exist_ok=True)
            for folder in (collection, self._folder, self._folder / "_delta_log"):
                folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error

    def created(self) -> None:
        for folder in (self._folder, self._folder.parent, self._folder.parent.parent):
            sync_path(folder)

    def sync(self, names: Iterable[str]) -> None:
        files = [self._folder / name for name in names]
        for file in files:
            file.chmod(FILE_MODE)  # the Delta library leaves the mode to the umask
        for path in [*files, *dict.fromkeys(file.parent for file in files)]:
            sync_path(path)

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        return pa.OSFile(str(self._folder / name), "rb")

    def file_system(self) -> pa_fs.FileSystem:
        return pa_fs.SubTreeFileSystem(str(self._folder), pa_fs.LocalFileSystem())

    def create(self, stem: str, write: Callable[[BinaryIO], None]) -> CreatedFile:
        path = self._folder / f"{stem}.parquet"
        with open(path, "w+b", opener=_open_for_one_user) as file:
            write(file)
            file.flush()
            sync_file(file.fileno())
            size = file.tell()
            file.seek(0)
            digest = digest_of(file)
        path = path.rename(path.with_name(f"{stem}-{digest}.parquet"))
        sync_path(self._folder)
        return CreatedFile(path.name, size)


class LocalTableStore(TableStore):
    """A folder with a folder for each collection."""

    def __init__(self, folder: StoreUri) -> None:
        self._folder = Path(os.path.abspath(folder))
        super().__init__(str(self._folder))

    def exists(self) -> bool:
        return self._folder.is_dir()

    def prepare(self) -> None:
        if found := _escape.search(os.path.realpath(self._folder)):
            raise DirectoryUnwritable(
                f"{self} cannot have tables: the Delta library takes {found[0]} in a path for another character: "
                "choose another directory",
                path=str(self),
            )
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            writable = os.access(self._folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise DirectoryUnwritable(f"{self} cannot be created: {error.strerror}", path=str(self)) from error
        if not writable:
            raise DirectoryUnwritable(f"{self} cannot be written; check its permissions", path=str(self))

    def identity(self) -> str:
        path = self._folder / IDENTITY_FILE
        made = path.with_name(f".{uuid4().hex}")
        try:
            if not path.exists():
                made.write_text(uuid4().hex)
                with suppress(FileExistsError):  # of another node, which came first
                    path.hardlink_to(made)
                made.unlink()
            return path.read_text()
        except OSError as error:
            raise DirectoryUnwritable(f"{path} cannot be written: {error.strerror}", path=str(path)) from error

    def tables(self) -> list[TableLocation]:
        if not self.exists():
            return []
        collections = sorted(folder for folder in self._folder.iterdir() if folder.is_dir())
        folders = [folder / name for folder in collections for name in (LOG, CURRENT)]
        return [LocalTableLocation(folder) for folder in folders if folder.is_dir()]

    def table(self, collection: str, name: str) -> TableLocation:
        return LocalTableLocation(self._folder / collection / name)

    def remove(self, collection: str) -> None:
        folder = self._folder / collection
        while folder.exists():
            with suppress(FileNotFoundError):  # other nodes remove it at the same time
                shutil.rmtree(folder)


def _open_for_one_user(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
