"""How Tidewal's Delta tables are stored: their properties, their Parquet files, and what is made durable when.

delta-rs syncs nothing. So Tidewal writes the Parquet files of the log itself, durable before the commit, and then syncs
the commit file, which delta-rs makes visible under its name in one step.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, PostCommitHookProperties

from ...runtime.errors import CorruptLog, InvalidRequest, InvalidSchema
from ...runtime.tables.table_metadata import (
    FORMAT,
    FORMAT_KEY,
    PRIMARY_KEY,
    RESTORE_HINT,
    SCHEMA_KEY,
    check_format,
    commit_name,
)
from ...runtime.tables.table_store import TableLocation
from .row_versions import stored_schema

ROWS_PER_GROUP: Final = 65_536
MIN_RETENTION_H: Final = 1
INTERVAL_KEY: Final = "delta.checkpointInterval"

# For every commit: the library's own checkpoints list the whole log each time (twice the time at 500 commits), and are
# not durable when the commits that they replace are cleaned up.
NO_HOOKS: Final[PostCommitHookProperties] = PostCommitHookProperties(
    create_checkpoint=False, cleanup_expired_logs=False
)

# For every scan of a table: a page whose checksum is wrong is an error, not an answer.
CHECKED: Final = ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=True)

# A longer string would have to be cut, and a cut maximum is no maximum.
_STATISTICS_CHARACTERS = 64


def open_delta(location: TableLocation) -> DeltaTable:
    """The Delta table at `location`, at its newest version."""
    return DeltaTable(location.uri, storage_options=location.storage_options)


def open_table(
    location: TableLocation,
    schema: pa.Schema | None,
    primary_key: str | None,
    columns: Callable[[pa.Schema], pa.Schema],
    *,
    checkpoint_every_commits: int,
) -> tuple[DeltaTable, pa.Schema, str]:
    """Open the Delta table at `location`, created with `columns(schema)` when absent, and a checkpoint every
    `checkpoint_every_commits` commits; returns it with its user schema and its key. Raises `CorruptLog` (absent without
    a `schema`, or damaged), `InvalidSchema` (another schema or key), `FormatTooNew`."""
    try:
        table = open_delta(location)  # not `is_deltatable`, which keeps all threads of Python from running meanwhile
    except TableNotFoundError:
        if schema is None or primary_key is None:
            raise CorruptLog(f"there is no table at {location}", path=location.uri) from None
        _create(location, schema, primary_key, columns(schema), checkpoint_every_commits)
        table = open_delta(location)
    properties = table.metadata().configuration
    check_format(properties, location)
    found, key = _user_schema(properties, location)
    if schema is not None and not found.equals(schema):
        raise InvalidSchema(
            f"{location} holds columns ({_columns(found)}), not ({_columns(schema)}): these are tables of another "
            "collection of that name; stop the node and move them away, or use the log that they were filled from",
            path=location.uri,
        )
    if primary_key is not None and key != primary_key:
        raise InvalidSchema(f"{location} has the key {key!r}, not {primary_key!r}", path=location.uri)
    return table, found, key


def _columns(schema: pa.Schema) -> str:
    fields = cast("Iterable[Any]", schema)
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in fields)


def _user_schema(properties: Mapping[str, str], location: TableLocation) -> tuple[pa.Schema, str]:
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
            f"the properties of the table {location}, in a commit of its _delta_log, are damaged "
            f"({type(error).__name__}: {error}): {RESTORE_HINT}",
            path=location.uri,
        ) from error
    return schema, key


def _create(
    location: TableLocation, schema: pa.Schema, primary_key: str, columns: pa.Schema, checkpoint_every_commits: int
) -> None:
    if primary_key not in schema.names:
        raise InvalidSchema(f"the primary key {primary_key!r} is not among the columns {schema.names}")
    statistics = ("_ts", "_vchannel", primary_key)
    location.prepare()
    try:
        DeltaTable.create(
            location.uri,
            stored_schema(columns),
            mode="ignore",
            configuration={
                FORMAT_KEY: str(FORMAT),
                SCHEMA_KEY: base64.b64encode(schema.serialize()).decode(),
                PRIMARY_KEY: primary_key,
                INTERVAL_KEY: str(checkpoint_every_commits),
                "delta.enableExpiredLogCleanup": "true",
                "delta.logRetentionDuration": f"interval {location.log_retention_h} hours",
                "delta.dataSkippingStatsColumns": ",".join(name for name in statistics if name in columns.names),
            },
            storage_options=location.storage_options,
            raise_if_key_not_exists=False,
        )
    except (CommitFailedError, DeltaError) as error:
        try:
            open_delta(location)  # another process created it at the same moment
        except TableNotFoundError:
            raise error from None
    location.sync([commit_name(0)])
    location.created()


def write_parquet(location: TableLocation, rows: pa.Table, *, statistics: Sequence[str]) -> AddAction:
    """Write `rows` as a new, durable Parquet file of the table; returns the action that adds it.

    The file is no part of the table until a commit names it. `statistics` are the columns whose range the action holds.
    """
    # Columns of numbers gain nothing from a dictionary, and vectors lose time trying.
    strings = [column for column in rows.column_names if rows.schema.field(column).type == pa.string()]

    def write(file: BinaryIO) -> None:
        pq.write_table(
            rows,
            file,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            write_page_checksum=True,  # the only copy of a row, once retention has removed it from the log
            use_dictionary=strings,  # pyright: ignore[reportArgumentType] -- the stubs know only of bool
        )

    name, size = location.create(f"part-{uuid.uuid4()}", write)
    return AddAction(
        path=name,
        size=size,
        partition_values={},
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=_statistics(rows, statistics),
    )


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


def vacuum_table(location: TableLocation, table: DeltaTable, retention_h: int, commit: CommitProperties) -> list[str]:
    """Remove files that the table does not name and has not named for `retention_h` hours; return their names. Raises
    `InvalidRequest` below `MIN_RETENTION_H`."""
    if retention_h < MIN_RETENTION_H:
        raise InvalidRequest(f"a vacuum keeps at least {MIN_RETENTION_H} h, not {retention_h}")
    before = table.version()
    removed = table.vacuum(
        retention_h, dry_run=False, enforce_retention_duration=False, full=True, commit_properties=commit
    )
    table.update_incremental()
    location.sync(map(commit_name, range(before + 1, table.version() + 1)))
    return removed


def checkpoint(location: TableLocation, table: DeltaTable) -> None:
    """Write a checkpoint at the version of `table`, durable before the commits that it replaces are cleaned up."""
    table.create_checkpoint()
    location.sync([f"_delta_log/{table.version():020}.checkpoint.parquet", "_delta_log/_last_checkpoint"])
    table.cleanup_metadata()
