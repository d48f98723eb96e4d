"""Which log the tables of a directory come from: the positions stored with their rows mean nothing in another one."""

from __future__ import annotations

from ...runtime.errors import PositionMismatch, TidewalError
from ...runtime.tables.table_store import LOG, TableStore
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
            found = _wals(LogTable.open(table))
        except TidewalError:  # a reader of that table raises what is wrong with it
            continue
        if found:
            return min(found)
    return None


def check_origin(log: LogTable, wal: str) -> None:
    """Raise `PositionMismatch` unless the rows of `log` came from the backend `wal`. Blocks."""
    for found in _wals(log) - {wal}:
        raise PositionMismatch(
            f"{log.location} was filled from {found}, this log is {wal}: go on with {found}, or take another directory",
            expected=wal,
            found=found,
        )


def _wals(log: LogTable) -> set[str]:
    return {position.wal for position in log.positions().values()}
