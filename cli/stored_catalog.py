"""The catalogs in an embedded log that no process has open: whether a node can go on with them, and which collections
they have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapters.rocksmq.check.channel_entries import channel_entries
from ..adapters.rocksmq.journal.channels import ChannelTable, JournalledChannel
from ..adapters.rocksmq.journal.losses import before_loss
from ..runtime.catalog.catalog import catalog_fold
from ..runtime.catalog.flush_events import FlushEvent
from ..runtime.errors import CorruptLog, TidewalError
from ..runtime.log.names import Names
from ..runtime.log.record import decode
from ..runtime.log.wal import Entry

if TYPE_CHECKING:
    from ..runtime.tables.table_store import StoreUri


@dataclass(frozen=True, slots=True)
class DamagedCatalog:
    """The catalog of one cluster, of which records are lost. `refusal`: why no node can go on with it, even where the
    loss is accepted; "" where one can. `collections` are those that it still has. `missing` are those that it has not,
    though they have tables (`tables`), or events of flushes in the log (`written`): these may also have been
    dropped."""

    channel: str
    refusal: str
    collections: list[str]
    tables: list[str]
    written: list[str]


def catalog_refusal(directory: str, table: ChannelTable) -> str:
    """Why a node refuses the log in `directory`, as far as that is its catalog; "" where it does not. `table` has the
    channels as of the journal's end. Raises `OSError`."""
    for state in _catalogs(table):
        try:
            before_loss(state.losses, state.name, max(state.floor + 1, state.truncated_to), state.last_id + 1, [])
            fold = catalog_fold()
            for _, entry in channel_entries(directory, table, state.name.__eq__):
                fold.read(entry)
            fold.finish()
        except TidewalError as error:
            return _refusal(state, error)
    return ""


def damaged_catalogs(directory: str, table: ChannelTable, tables: StoreUri = "") -> list[DamagedCatalog]:
    """The catalogs in the log in `directory` of which records are lost, by the losses in `table`. The node's tables are
    at `tables`, by default beside the log, as they are where the directory is a node's. Raises `OSError`, and what
    `open_tables` raises."""
    place = tables or Path(directory).parent / "tables"
    return [
        _damaged(directory, table, state, place)
        for state in _catalogs(table)
        if any(loss.last >= state.truncated_to for loss in state.losses)
    ]


def _damaged(directory: str, table: ChannelTable, state: JournalledChannel, place: StoreUri) -> DamagedCatalog:
    names, fold = _names_of(state.name), catalog_fold()
    written: set[str] = set()
    refusal = ""
    try:
        for channel, entry in channel_entries(directory, table, {names.catalog, names.insert_events}.__contains__):
            if channel == names.catalog:
                fold.read(entry)
            else:
                written |= _collection_of(entry)
        fold.finish()
    except TidewalError as error:
        refusal = _refusal(state, error)
    known = fold.state.collections
    tables = _collections_with_tables(place) - known.keys()
    return DamagedCatalog(state.name, refusal, sorted(known), sorted(tables), sorted(written - known.keys() - tables))


def _catalogs(table: ChannelTable) -> list[JournalledChannel]:
    return [state for state in table.by_number.values() if _names_of(state.name).catalog == state.name]


def _names_of(catalog: str) -> Names:
    return Names(catalog.removesuffix(Names("").catalog))


def _refusal(state: JournalledChannel, error: TidewalError) -> str:
    return f"{state.name}: {error.message}" if isinstance(error, CorruptLog) else error.message


def _collection_of(event: Entry) -> set[str]:
    try:
        return {FlushEvent.from_record(decode(event.payload, event.id)).collection}
    except TidewalError:  # what cannot be read tells nothing
        return set()


def _collections_with_tables(place: StoreUri) -> set[str]:
    """The collections that have tables there."""
    from ..runtime.tables.table_store import LOG, open_tables

    store = open_tables(place)
    return {location.collection for location in store.tables() if location.name == LOG and location.exists()}
