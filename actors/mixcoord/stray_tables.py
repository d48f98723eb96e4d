"""Tables of collections that the catalog does not have: those of another log, or what a damaged log has left."""

from __future__ import annotations

import logging
from collections.abc import Container

from ...runtime.tables.table_store import LOG, TableStore
from ..datanode.delta_errors import storage_errors

SHOWN = 10  # names in the warning

_log = logging.getLogger("tidewal.mixcoord")


def warn_of_stray_tables(tables: TableStore, collections: Container[str]) -> None:
    """Log the names of those that have tables and are not among `collections`. Blocks. Raises `DirectoryUnwritable`,
    `Unavailable` where the tables cannot be listed."""
    with storage_errors(tables):
        found = [table.collection for table in tables.tables() if table.name == LOG and table.exists()]
    stray = [name for name in found if name not in collections]
    if stray:
        more = f" and {len(stray) - SHOWN:,} more" if len(stray) > SHOWN else ""
        _log.warning(
            "%s has tables of collections that this log does not have, so they are not served: %s%s. Use the log that"
            " they come from; docs/how-to/back-up.md says how to create them anew and insert their rows again",
            tables,
            ", ".join(stray[:SHOWN]),
            more,
        )
