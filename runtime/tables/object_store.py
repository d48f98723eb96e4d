"""Tables in a bucket of S3, of Google's or of Azure's store: the only module that reads, writes, lists and removes
their objects, beside what the Delta library does.

An object is there as a whole or not at all, and durable with the answer to its PUT, so there are no folders and nothing
to sync. Keys and endpoint come from where the clients of these stores look for them (`object_options.py`), and are in
no text that this module makes.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Final
from uuid import uuid4

import pyarrow as pa

from ..errors import ConfigError, DirectoryUnwritable, Unavailable
from .digests import digest_of
from .object_options import client_of, is_refusal, shown_failure, storage_options
from .table_store import CURRENT, LOG, CreatedFile, TableLocation, TableStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore

IDENTITY_OBJECT: Final = ".store"
PART_BYTES: Final = 16 << 20  # of an object that is written in parts
IDENTITY_ATTEMPTS: Final = 5


class ObjectTableStore(TableStore):
    """The keys below one prefix of a bucket, `s3://bucket/prefix`, with a prefix for each collection."""

    def __init__(self, uri: str) -> None:
        """Asks the store for nothing. Raises `ConfigError` (`key`) for options of the environment under which two nodes
        could overwrite each other's commits, `Unsupported` where `obstore` is not installed."""
        super().__init__(uri.rstrip("/"))
        self.options: dict[str, str] = storage_options(self.uri)
        self._client = client_of(self.uri, self.options)

    def exists(self) -> bool:
        try:
            with _os_errors():
                self._client.get(IDENTITY_OBJECT)
        except FileNotFoundError:
            return False
        return True

    def prepare(self) -> None:
        self.identity()

    def identity(self) -> str:
        try:
            return self._identity()
        except PermissionError as error:
            raise DirectoryUnwritable(f"{self} cannot be written: {error.strerror}", path=self.uri) from error
        except FileNotFoundError as error:  # of a PUT: there is no such bucket
            raise DirectoryUnwritable(f"{self} cannot be written: {shown_failure(error)}", path=self.uri) from error
        except OSError as error:
            raise Unavailable(f"{self}: {error.strerror}", path=self.uri) from error

    def tables(self) -> list[TableLocation]:
        with _os_errors():
            collections = sorted(self._folders(""))
            found = {name: self._folders(f"{name}/") for name in collections}
        return [self.table(each, name) for each in collections for name in (LOG, CURRENT) if name in found[each]]

    def table(self, collection: str, name: str) -> TableLocation:
        return ObjectTableLocation(self, self._client, f"{collection}/{name}")

    def remove(self, collection: str) -> None:
        with _os_errors():
            for objects in self._client.list(f"{collection}/"):
                self._client.delete([each["path"] for each in objects])

    def _folders(self, prefix: str) -> set[str]:
        return {each.rsplit("/", 1)[-1] for each in self._client.list_with_delimiter(prefix)["common_prefixes"]}

    def _identity(self) -> str:
        for _ in range(IDENTITY_ATTEMPTS):
            try:
                return self._read(IDENTITY_OBJECT).decode()
            except FileNotFoundError:
                self._check_creates_once()
                self._create(IDENTITY_OBJECT, uuid4().hex.encode())
        raise OSError(errno.EIO, f"{IDENTITY_OBJECT} is neither created nor there")

    def _check_creates_once(self) -> None:
        """Raise `ConfigError` where the store creates an object twice: it takes no notice of the condition, and would
        let two nodes make the same commit. That it is true of two PUTs at the same moment this cannot show."""
        name = f"{IDENTITY_OBJECT}-{uuid4().hex}"
        created = [self._create(name, b"") for _ in range(2)]
        with _os_errors():
            self._client.delete(name)
        if all(created):
            raise ConfigError(
                f"the store of {self} creates an object that is there already (it ignores If-None-Match), so two nodes "
                "could overwrite each other's commits: tables need a store with conditional PUT",
                key="tables",
            )

    def _create(self, name: str, content: bytes) -> bool:
        """Whether the object was not there. False also where the first answer was lost and the client tried again."""
        from obstore.exceptions import AlreadyExistsError

        try:
            with _os_errors():
                self._client.put(name, content, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def _read(self, name: str) -> bytes:
        with _os_errors():
            return bytes(self._client.get(name).bytes())


class ObjectTableLocation(TableLocation):
    """The keys of one table."""

    # Readers are far away, and slow; and a list of commits begins behind the last checkpoint, however many there are.
    retention_h: ClassVar[int] = 7 * 24
    log_retention_h: ClassVar[int] = 7 * 24

    def __init__(self, store: ObjectTableStore, client: ObjectStore, key: str) -> None:
        super().__init__(f"{store.uri}/{key}", store.options)
        self._client = client
        self._key = key

    def exists(self) -> bool:
        with _os_errors():
            return any(
                each["path"].endswith((".json", ".parquet"))
                for objects in self._client.list(f"{self._key}/")
                for each in objects
            )

    def prepare(self) -> None:
        """Nothing to do: there are no folders."""

    def created(self) -> None:
        """Nothing to do: names are durable with their objects."""

    def sync(self, names: Iterable[str]) -> None:
        """Nothing to do: an object is durable with its PUT."""

    def has(self, name: str) -> bool:
        try:
            with _os_errors():
                self._client.get(f"{self._key}/{name}")  # not `head`: an answer without a body does not say why
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        with _os_errors():
            return bytes(self._client.get(f"{self._key}/{name}").bytes())

    def open(self, name: str) -> pa.NativeFile:
        return pa.PythonFile(_ObjectFile(self._client, f"{self._key}/{name}"), "r")

    def create(self, stem: str, write: Callable[[BinaryIO], None]) -> CreatedFile:
        content = io.BytesIO()
        write(content)
        content.seek(0)
        name = f"{stem}-{digest_of(content)}.parquet"
        with _os_errors():
            self._client.put(f"{self._key}/{name}", content.getbuffer(), chunk_size=PART_BYTES)
        return CreatedFile(name, content.tell())


class _ObjectFile(io.RawIOBase):
    """One object as a file: each read is one GET of its range."""

    def __init__(self, client: ObjectStore, path: str) -> None:
        self._client = client
        self._path = path
        with _os_errors():
            self._size = client.head(path)["size"]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with _os_errors():
            found = self._client.get_range(self._path, start=self._at, end=end)
        count = len(found)
        buffer[:count] = memoryview(found)
        self._at += count
        return count


@contextmanager
def _os_errors() -> Generator[None]:
    """Raise what the client raises as Python's file functions would; `AlreadyExistsError` and `FileNotFoundError` as
    they are. An `OSError` of a PUT does not say that nothing was stored."""
    from obstore.exceptions import AlreadyExistsError, BaseError

    try:
        yield
    except AlreadyExistsError:
        raise
    except BaseError as error:
        why = shown_failure(error)
        raise OSError(errno.EACCES if is_refusal(why) else errno.EIO, why) from None
