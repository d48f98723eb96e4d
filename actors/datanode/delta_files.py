"""How Tidewal's Delta tables lie on disk: their properties, their Parquet files, and what is synced when.

delta-rs syncs nothing. So Tidewal writes the Parquet files of the log itself and syncs them before the commit, then the
commit file, which delta-rs makes visible under its name in one step.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import xxhash
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from ...runtime.errors import CorruptLog, InvalidRequest, InvalidSchema
from ...runtime.tables.delta_table import FORMAT, FORMAT_KEY, PRIMARY_KEY, RESTORE_HINT, SCHEMA_KEY, check_format
from .row_versions import stored_schema

ROWS_PER_GROUP: Final = 65_536
LOG_RETENTION: Final = "interval 1 hours"
RETENTION_H: Final = 24
MIN_RETENTION_H: Final = 1
INTERVAL_KEY: Final = "delta.checkpointInterval"

DIGEST_BYTES: Final = 1 << 20  # at a time
_DIGEST = re.compile(r"-([0-9a-f]{16})\.parquet$")

# For every scan of a table: a page whose checksum is wrong is an error, not an answer.
CHECKED: Final = ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=True)

# A longer string would have to be cut, and a cut maximum is no maximum.
_STATISTICS_CHARACTERS = 64


def open_table(
    path: Path,
    schema: pa.Schema | None,
    primary_key: str | None,
    columns: Callable[[pa.Schema], pa.Schema],
    *,
    checkpoint_every_commits: int,
) -> tuple[DeltaTable, pa.Schema, str]:
    """Open the Delta table at `path`, created with `columns(schema)` when absent, and a checkpoint every
    `checkpoint_every_commits` commits; returns it with its user schema and its key. Raises `CorruptLog` (absent without
    a `schema`, or damaged), `InvalidSchema` (another schema or key), `FormatTooNew`."""
    if not DeltaTable.is_deltatable(str(path)):
        if schema is None or primary_key is None:
            raise CorruptLog(f"there is no table at {path}", path=str(path))
        _create(path, schema, primary_key, columns(schema), checkpoint_every_commits)
    table = DeltaTable(path)
    properties = table.metadata().configuration
    check_format(properties, path)
    found, key = _user_schema(properties, path)
    if schema is not None and not found.equals(schema):
        raise InvalidSchema(f"{path} holds columns {found.to_string()}, not {schema.to_string()}", path=str(path))
    if primary_key is not None and key != primary_key:
        raise InvalidSchema(f"{path} has the key {key!r}, not {primary_key!r}", path=str(path))
    return table, found, key


def _user_schema(properties: Mapping[str, str], path: Path) -> tuple[pa.Schema, str]:
    """The user's schema and its key. Raises `CorruptLog` where the properties lack them or are damaged."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(properties[SCHEMA_KEY])))
        key = properties[PRIMARY_KEY]
        if key not in schema.names:
            raise ValueError(f"{PRIMARY_KEY} is {key!r}, which is no column")
        if int(properties[INTERVAL_KEY]) < 1:
            raise ValueError(f"{INTERVAL_KEY} is {properties[INTERVAL_KEY]!r}")
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptLog(
            f"the properties of the table {path}, in a commit of its _delta_log, are damaged "
            f"({type(error).__name__}: {error}): {RESTORE_HINT}",
            path=str(path),
        ) from error
    return schema, key


def _create(path: Path, schema: pa.Schema, primary_key: str, columns: pa.Schema, checkpoint_every_commits: int) -> None:
    if primary_key not in schema.names:
        raise InvalidSchema(f"the primary key {primary_key!r} is not among the columns {schema.names}")
    statistics = ("_ts", "_vchannel", primary_key)
    path.mkdir(parents=True, exist_ok=True)
    try:
        DeltaTable.create(
            path,
            stored_schema(columns),
            mode="ignore",
            configuration={
                FORMAT_KEY: str(FORMAT),
                SCHEMA_KEY: base64.b64encode(schema.serialize()).decode(),
                PRIMARY_KEY: primary_key,
                INTERVAL_KEY: str(checkpoint_every_commits),
                "delta.enableExpiredLogCleanup": "true",
                "delta.logRetentionDuration": LOG_RETENTION,
                "delta.dataSkippingStatsColumns": ",".join(name for name in statistics if name in columns.names),
            },
            raise_if_key_not_exists=False,
        )
    except (CommitFailedError, DeltaError):
        # Another process created it at the same moment.
        if not DeltaTable.is_deltatable(str(path)):
            raise
    sync_commit(path / "_delta_log" / f"{0:020}.json")
    sync_directory(path)
    sync_directory(path.parent)


def write_parquet(directory: Path, rows: pa.Table, *, statistics: Sequence[str]) -> AddAction:
    """Write `rows` as a new Parquet file in `directory` and sync it; returns the action that adds it to the table.

    The file is no part of the table until a commit names it. `statistics` are the columns whose range the action holds.
    The file's name ends in the digest of its bytes, see `digest_in`.
    """
    path = directory / f"part-{uuid.uuid4()}.parquet"
    # Columns of numbers gain nothing from a dictionary, and vectors lose time trying.
    strings = [column for column in rows.column_names if rows.schema.field(column).type == pa.string()]
    with path.open("wb") as file:
        pq.write_table(
            rows,
            file,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            write_page_checksum=True,  # the only copy of a row, once retention has removed it from the log
            use_dictionary=strings,  # pyright: ignore[reportArgumentType] -- the stubs know only of bool
        )
        file.flush()
        os.fsync(file.fileno())
    path = path.rename(path.with_name(f"{path.stem}-{digest_of(path)}.parquet"))
    sync_directory(directory)
    return AddAction(
        path=path.name,
        size=path.stat().st_size,
        partition_values={},
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=_statistics(rows, statistics),
    )


def digest_of(path: Path) -> str:
    """The digest of the bytes of the file at `path`: pages have checksums of their own, headers and the footer have
    not."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(DIGEST_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def digest_in(name: str) -> str:
    """The digest in the name of a file, "" where it has none."""
    found = _DIGEST.search(name)
    return found[1] if found else ""


def _statistics(rows: pa.Table, columns: Sequence[str]) -> str:
    least: dict[str, int | str] = {}
    most: dict[str, int | str] = {}
    for name in columns:
        span = cast("dict[str, int | str]", cast(object, pc.min_max(rows[name]).as_py()))
        low, high = span["min"], span["max"]
        if max(len(str(low)), len(str(high))) <= _STATISTICS_CHARACTERS:
            least[name], most[name] = low, high
    nulls = {name: rows[name].null_count for name in columns}
    return json.dumps({"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls})


def vacuum_table(table: DeltaTable, retention_h: int, commit: CommitProperties) -> list[str]:
    """Remove files that the table does not name and has not named for `retention_h` hours; return their names. Raises
    `InvalidRequest` below `MIN_RETENTION_H`."""
    if retention_h < MIN_RETENTION_H:
        raise InvalidRequest(f"a vacuum keeps at least {MIN_RETENTION_H} h, not {retention_h}")
    return table.vacuum(
        retention_h, dry_run=False, enforce_retention_duration=False, full=True, commit_properties=commit
    )


def sync_added_files(directory: Path, commit_file: Path) -> None:
    """Sync the files in `directory` that a commit of delta-rs added, then the commit."""
    for line in commit_file.read_bytes().splitlines():
        added = json.loads(line).get("add")
        if added:
            _sync(directory / added["path"])
    sync_directory(directory)
    sync_commit(commit_file)


def sync_commit(commit_file: Path) -> None:
    """Make a commit durable: its file and its name."""
    _sync(commit_file)
    sync_directory(commit_file.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
