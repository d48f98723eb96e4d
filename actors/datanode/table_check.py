"""Read every page of every file of the tables, as `tidewal verify tables` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from ...runtime.errors import TidewalError
from ...runtime.tables.digests import digest_in, digest_of
from ...runtime.tables.table_metadata import newest_own_commit
from ...runtime.tables.table_store import TableLocation, TableStore
from .delta_errors import storage_errors
from .delta_files import open_delta


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a table. `damage` says what is wrong with it, "" when nothing is; with `file` "" of the table."""

    collection: str
    table: str
    file: str
    rows: int
    bytes: int
    damage: str = ""


def check_tables(store: TableStore) -> Iterator[FileReport]:
    """Check the files of the newest snapshot of each table in `store`: that they are there, that each page can be read
    and has its checksum, that their bytes have the digest in their name, that they have the rows that their commit
    says, and that no other tool has changed the rows of the table. May run beside a node.

    Files that another tool joined, and those of before Tidewal wrote checksums, have neither: of these only what cannot
    be decoded is found."""
    for location in store.tables():
        yield from _check_table(location)


def _check_table(location: TableLocation) -> Iterator[FileReport]:
    try:
        with storage_errors(location):
            table = open_delta(location)
            named = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", "num_records"])
    except TidewalError as error:
        yield FileReport(location.collection, location.name, "", 0, 0, error.message)
        return
    try:
        newest_own_commit(location, table.version())
    except TidewalError as error:
        yield FileReport(location.collection, location.name, "", 0, 0, error.message)
    for file, size, rows in zip(*(cast("list[object]", column.to_pylist()) for column in named.columns), strict=True):
        yield _check_file(location, str(file), cast(int, size), cast("int | None", rows))


def _check_file(location: TableLocation, file: str, size: int, expected: int | None) -> FileReport:
    rows, damage = 0, ""
    try:
        with storage_errors(f"{location}/{file}"), location.open(file) as stored:
            found, digest = stored.size(), digest_in(file)
            if digest and digest_of(stored) != digest:
                damage = "its bytes are not those that were written"
            with pq.ParquetFile(stored, page_checksum_verification=True) as opened:
                for batch in opened.iter_batches():
                    batch.validate(full=True)
                    rows += batch.num_rows
        if found != size or (expected is not None and rows != expected):
            damage = f"{found} bytes and {rows} rows, where the commit says {size} and {expected}"
    except TidewalError as error:
        return FileReport(location.collection, location.name, file, rows, size, error.message)
    return FileReport(location.collection, location.name, file, rows, size, damage)
