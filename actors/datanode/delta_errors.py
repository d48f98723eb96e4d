"""Translation of the exceptions of Delta Lake and the file system into Tidewal's."""

from __future__ import annotations

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from ...runtime.errors import (
    CorruptLog,
    DirectoryUnwritable,
    DiskFull,
    FormatTooNew,
    InvalidSchema,
    TidewalError,
    Unavailable,
)
from ...runtime.tables.object_options import is_refusal, without_queries

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}

# delta-rs passes on the error number of the operating system only inside its messages, in two forms.
_number = re.compile(r"(?:os error |Os \{ code: )(\d+)")
# What it says of an object store, too, is in the message only.
_store_failed = re.compile(r"Generic (?!LocalFileSystem)\w+ error|The operation lacked ")
_colour = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def storage_errors(path: object) -> Generator[None]:
    """Raise what fails inside as a Tidewal error. The text of `path` says where: a table, a file, the store.

    `DiskFull`: no space, quota or file size left. `DirectoryUnwritable`: permissions, a read-only mount, a path that
    is no directory. `CorruptLog`: files of the table are missing or cannot be read. `FormatTooNew`: the table needs
    a Delta protocol that this version does not know. `InvalidSchema`: rows or fields that Delta cannot hold.
    `Unavailable`: every other failure of the operating system or the object store, which may be tried again. What was
    being stored may be there or not (`outcome_unknown`).
    """
    try:
        yield
    except TidewalError:
        raise
    except (OSError, DeltaError, pa.ArrowException) as error:
        raise _translated(error, path) from error


def _translated(error: Exception, path: object) -> TidewalError:
    number, why = _number_of(error), without_queries(_in_one_line(str(error)))
    if number in _FULL:
        return DiskFull(f"no space for {path}: {why}", path=str(path))
    if number in _UNWRITABLE or is_refusal(why):
        return DirectoryUnwritable(f"{path} cannot be read or written: {why}", path=str(path))
    if isinstance(error, DeltaProtocolError):
        return FormatTooNew(f"{path} needs a newer Delta protocol: {why}", path=str(path))
    if isinstance(error, SchemaMismatchError):
        return InvalidSchema(f"Delta cannot hold these columns: {why}", path=str(path))
    missing = number == errno.ENOENT or isinstance(error, FileNotFoundError | TableNotFoundError)
    # A commit that failed and is not there: the store was busy with another of that name, or did not answer.
    passing = isinstance(error, CommitFailedError) or _store_failed.search(why)
    # an OSError without a number is not the operating system's: Arrow's readers raise it for damaged pages
    if missing or (number is None and not passing):
        return CorruptLog(f"the table {path} cannot be read: {why}", path=str(path))
    return Unavailable(f"{path}: {why}", path=str(path), outcome_unknown=True)


def _in_one_line(text: str) -> str:
    """What delta-rs says, without colours and the backtrace behind it: the first line, and those that it marks with an
    arrow, which are its causes."""
    first, *others = _colour.sub("", text).strip().splitlines() or [""]
    causes = [line.strip().removeprefix("↳").strip() for line in others if line.strip().startswith("↳")]
    return ": ".join([first.strip(), *causes])


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _number.search(str(error))
    return int(found.group(1)) if found else None
