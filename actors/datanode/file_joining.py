"""Join the small files that flushes leave into large ones, so that reading a log table opens few of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from ...runtime.tables.table_store import TableLocation
from .delta_files import write_parquet

SMALL_FILE_BYTES: Final = 16 * 1024 * 1024
JOINED_FILE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One Parquet file of a snapshot, with the lowest `_ts` in it."""

    name: str
    size_bytes: int
    lowest_ts: int


def files_of(table: DeltaTable) -> list[StoredFile]:
    """The files of the snapshot, in the order of their lowest `_ts`."""
    actions = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", "min._ts"])
    files = [StoredFile(*cast("tuple[str, int, int]", tuple(row.values()))) for row in actions.to_pylist()]
    return sorted(files, key=lambda file: file.lowest_ts)


def groups_to_join(files: Sequence[StoredFile]) -> list[list[StoredFile]]:
    """The small files, neighbours in time together, in groups of two or more that make up a joined file."""
    return [group for group in _groups(files) if len(group) > 1]


def _groups(files: Sequence[StoredFile]) -> Iterator[list[StoredFile]]:
    group: list[StoredFile] = []
    size_bytes = 0
    for file in files:
        if file.size_bytes >= SMALL_FILE_BYTES:
            continue
        if size_bytes + file.size_bytes > JOINED_FILE_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(file)
        size_bytes += file.size_bytes
    yield group


def join(
    location: TableLocation, group: Sequence[StoredFile], schema: pa.Schema, *, statistics: Sequence[str]
) -> list[AddAction | RemoveAction]:
    """Write the rows of a group as one synced file, and return the actions that put it in the place of the group.

    Holds the rows of the group in memory: `JOINED_FILE_BYTES`, decompressed.
    """
    parts: list[pa.Table] = []
    for file in group:
        with location.open(file.name) as stored:
            parts.append(pq.read_table(stored, page_checksum_verification=True))
    rows = pa.concat_tables([part.cast(schema) for part in parts])
    added = write_parquet(location, rows, statistics=statistics)
    added.data_change = False
    now_ms = time.time_ns() // 1_000_000
    return [added, *(RemoveAction(file.name, False, now_ms, file.size_bytes, {}) for file in group)]
