"""The tables of a log that is migrated, which go on with the new one: `NodeTables`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...runtime.streams.messages import Position
from ...runtime.tables.table_store import LOG, TableStore
from ..node import RunBlocking, in_thread
from .delta_errors import storage_errors
from .log_table import LogTable


class MovedTables:
    """The tables in one store. No node may use them meanwhile."""

    def __init__(self, tables: TableStore, blocking: RunBlocking = in_thread) -> None:
        self._tables, self._blocking = tables, blocking

    async def positions(self) -> Mapping[str, Mapping[str, Position]]:
        """`NodeTables.positions`."""
        return await self._blocking(self._positions)

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """`NodeTables.move`."""
        await self._blocking(partial(self._move, collection, before, after))

    def _positions(self) -> dict[str, Mapping[str, Position]]:
        with storage_errors(self._tables):
            there = [table for table in self._tables.tables() if table.name == LOG and table.exists()]
        return {table.collection: LogTable.open(table).positions() for table in there}

    def _move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        LogTable.open(self._tables.table(collection, LOG)).move(before, after)
