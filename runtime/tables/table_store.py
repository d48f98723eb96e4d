"""Where the Delta tables lie: one seam for all that Tidewal itself does with their files, beside what the Delta library
does. A file system is one implementation (`local_store.py`), a bucket the other (`object_store.py`).

    <store>/<collection>/log        row versions
    <store>/<collection>/current    current rows

What the Delta library does (commits, merges, scans, vacuum), it does by a location's `uri` and `storage_options`.
Unless a method says otherwise it blocks, and raises `OSError` as Python's file functions do, `FileNotFoundError` for
what is not there; `storage_errors` of the DataNode makes Tidewal's errors of these.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from typing import BinaryIO, ClassVar, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs

from ..errors import ConfigError
from ..log.redaction import shown_url

LOG: Final = "log"
CURRENT: Final = "current"

_is_object_table = re.compile(r"(.+/.+)/([^/]+)/([^/]+)")
_is_url = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


class CreatedFile(NamedTuple):
    """A file that `TableLocation.create` stored: its name in the table, and its size in bytes."""

    name: str
    size: int


class TableLocation(ABC):
    """The place of one table. Names of files are relative to it, with `/` between their parts, as Delta has them.

    `uri` and `storage_options` are what the Delta library opens the table by; the options may hold credentials, the
    `uri`, which is its text, holds none. `retention_h`: for how many hours a file stays that no commit names any more,
    since readers that do not say what they read may be reading it. `log_retention_h`: for how many hours commits stay.
    """

    retention_h: ClassVar[int] = 24
    log_retention_h: ClassVar[int] = 1

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.uri = uri
        self.storage_options: dict[str, str] | None = None if storage_options is None else dict(storage_options)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """Which table of its collection this is: `LOG` or `CURRENT`."""
        return self.uri.rsplit("/", 1)[-1]

    @property
    def collection(self) -> str:
        """The name of its collection."""
        return self.uri.rsplit("/", 2)[-2]

    @abstractmethod
    def exists(self) -> bool:
        """Whether a table was created here, damaged or not: there is a commit, or rows whose commits are gone. One that
        is just being created is not there yet."""

    @abstractmethod
    def prepare(self) -> None:
        """Ensure that a table can be created here. Does nothing where one is."""

    @abstractmethod
    def created(self) -> None:
        """Make the names of a table that was just created durable: all above its files."""

    @abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Make files durable that the Delta library wrote, and their names, and readable by the node's user only. The
        library writes each under its name in one step, and syncs nothing. Nothing to do where a written file is durable
        and access is given otherwise."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole file."""

    @abstractmethod
    def open(self, name: str) -> pa.NativeFile:
        """The file, for reading at any place."""

    def file_system(self) -> pa_fs.FileSystem | None:
        """By which pyarrow scans the table's files; None for the Delta library's own, which is in Python: where
        pyarrow's threads still read ahead for a scan that was given up when Python ends, the process crashes or never
        ends, so a scan by it has to be read to its end."""
        return None

    @abstractmethod
    def create(self, stem: str, write: Callable[[BinaryIO], None]) -> CreatedFile:
        """Store what `write` writes as a new file, durable on return. Its name is the unique `stem`, `-`, the digest of
        its bytes (`digests.py`) and `.parquet`. No commit names it yet; where this or the commit fails, a vacuum
        removes it."""


class TableStore(ABC):
    """The place of all tables of a node; `uri` names it, and is its text. A collection's tables lie under its name."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __str__(self) -> str:
        return self.uri

    @abstractmethod
    def exists(self) -> bool:
        """Whether the store is there: a node has prepared it."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the store where there is none, and check that tables can be written in it. Raises
        `DirectoryUnwritable` (`path`)."""

    @abstractmethod
    def identity(self) -> str:
        """The id of the store, which it gets here where it has none: two nodes that find the same one have the same
        tables before them. Raises `DirectoryUnwritable` (`path`)."""

    @abstractmethod
    def tables(self) -> list[TableLocation]:
        """The places at which tables are or were begun, sorted by collection, `LOG` before `CURRENT`. None where the
        store is not there."""

    @abstractmethod
    def table(self, collection: str, name: str) -> TableLocation:
        """The place of a table, `LOG` or `CURRENT`, whether it is there or not."""

    @abstractmethod
    def remove(self, collection: str) -> None:
        """Remove the tables of a collection with all their files. Does nothing where there are none."""


StoreUri: TypeAlias = "str | PathLike[str]"


def open_tables(uri: StoreUri) -> TableStore:
    """The store of tables at a path, a `file:` URL, or a prefix of a bucket (`s3://bucket/prefix`, `gs:`, `az:`), which
    is not asked yet.

    Raises `ConfigError` (`key`) for any other URL, for one that holds credentials, and where the environment has
    options under which commits are not safe; `Unsupported` where the extra `objects` is not installed.
    """
    path = _local_path(uri)
    if path is None:
        from .object_store import ObjectTableStore

        return ObjectTableStore(fspath(uri))
    from .local_store import LocalTableStore

    return LocalTableStore(path)


def table_at(uri: StoreUri | TableLocation) -> TableLocation:
    """The place of the one table at a path or URL. Raises as `open_tables` does."""
    if isinstance(uri, TableLocation):
        return uri
    path = _local_path(uri)
    if path is None:
        parts = _is_object_table.fullmatch(fspath(uri))
        if parts is None:
            raise ConfigError(
                f"{shown_url(fspath(uri))!r} is no place of a table, like s3://bucket/prefix/collection/log",
                key="tables",
            )
        store, collection, name = parts.groups()
        return open_tables(store).table(collection, name)
    from .local_store import LocalTableLocation

    return LocalTableLocation(path)


def _local_path(uri: StoreUri) -> str | None:
    """The path that this is, or that a `file:` URL names; None for another URL. Raises `ConfigError` for a path of
    another machine."""
    text = fspath(uri)
    if not _is_url.match(text):
        return text
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc:
        raise ConfigError(f"{text!r} is no path of this machine", key="tables")
    return parts.path
