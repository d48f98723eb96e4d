"""The tables of a log that is migrated, which go on with the new one: `NodeTables`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial

from ...runtime.clock import MAX_TIMESTAMP
from ...runtime.errors import InvalidRequest
from ...runtime.streams.messages import Position
from ...runtime.tables.table_store import CURRENT, LOG, TableStore
from ..node import RunBlocking, in_thread
from .current_table import CurrentTable
from .delta_errors import storage_errors
from .log_table import LogTable


class MovedTables:
    """The tables in one store. No node may use them meanwhile."""

    def __init__(self, tables: TableStore, blocking: RunBlocking = in_thread) -> None:
        self._tables, self._blocking = tables, blocking

    @property
    def latest(self) -> int:
        """`NodeTables.latest`."""
        return MAX_TIMESTAMP

    async def collections(self) -> Set[str]:
        """`NodeTables.collections`."""
        return await self._blocking(self._collections)

    async def positions(self, collection: str) -> Mapping[str, Position]:
        """`NodeTables.positions`."""
        return await self._blocking(lambda: self._log(collection).positions())

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """`NodeTables.move`."""
        await self._blocking(partial(self._move, collection, before, after))

    def _collections(self) -> Set[str]:
        with storage_errors(self._tables):
            if not self._tables.exists():
                raise InvalidRequest(f"no node has tables in {self._tables}: say where they are", argument="tables")
            return {table.collection for table in self._tables.tables() if table.name == LOG and table.exists()}

    def _move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        log, place = self._log(collection), self._tables.table(collection, CURRENT)
        if log.positions() == before and place.exists():
            current, end = CurrentTable.open(place), min((at.timestamp for at in after.values()), default=0)
            if current.t > end:
                current.begin_anew()  # it has rows that the log's table is to have no more
        log.move(before, after)

    def _log(self, collection: str) -> LogTable:
        return LogTable.open(self._tables.table(collection, LOG))
