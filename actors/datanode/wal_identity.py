"""Which log the tables of a directory come from: the positions stored with their rows mean nothing in another one."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import PositionMismatch, TidewalError
from ...runtime.streams.messages import Position
from ...runtime.tables.table_store import LOG, TableLocation, TableStore
from .delta_errors import storage_errors
from .log_table import LogTable


def wal_of(tables: TableStore) -> str | None:
    """The backend that the positions in `tables` are of; None where nothing is stored. All tables come from one log, so
    the first with positions is enough. Blocks. Raises `DirectoryUnwritable`, `Unavailable` where the tables cannot be
    listed."""
    with storage_errors(tables):
        logs = [table for table in tables.tables() if table.name == LOG and table.exists()]
    for table in logs:
        try:
            found = {position.wal for position in LogTable.open(table).positions().values()}
        except TidewalError:  # a reader of that table raises what is wrong with it
            continue
        if found:
            return min(found)
    return None


class OwnTable(NamedTuple):
    """The table of a collection. In one snapshot of it, all shards are there up to `time`, and these are the positions
    stored with them, as far as there are any."""

    log: LogTable
    time: int
    positions: list[Position]


def open_own_table(location: TableLocation, collection: Collection, wal: str) -> OwnTable:
    """Open the table of `collection`, created when absent. Raises `PositionMismatch` unless its rows came from that
    collection, in a log of the backend `wal`, and what `LogTable.open` raises. Blocks.

    Two logs of one backend differ by what they hold: a table with shards that the collection lacks, or that was filled
    before the collection was created, is another log's. One that was filled later under the same names passes.
    """
    log = LogTable.open(location, collection.schema.arrow(), collection.schema.primary_key)
    time, positions = log.stored(collection.vchannels)
    for found in {position.wal for position in positions.values()} - {wal}:
        raise PositionMismatch(
            f"{log.location} was filled from {found}, this log is {wal}: go on with {found}, or take another directory",
            expected=wal,
            found=found,
        )
    strange = sorted(positions.keys() - set(collection.vchannels))
    if strange or 0 < time < collection.created_ts:
        why = f"has shards that it lacks: {', '.join(strange)}" if strange else "was filled before it was created"
        raise foreign_tables(log.location, collection.name, why)
    return OwnTable(log, time, list(positions.values()))


def foreign_tables(location: TableLocation, collection: str, why: str) -> PositionMismatch:
    """The error for a table of another log at the place of the collection's own."""
    return PositionMismatch(
        f"{location} is not of this log's collection {collection}: it {why}. Stop the node and move that folder away, "
        "or use the log that it was filled from",
        expected=collection,
        found=location.uri,
    )
