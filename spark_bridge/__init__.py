"""The Spark bridge: a data source over consistent cuts of the log.

The names below are imported at their first use: each of Spark's workers imports this package to find its data source,
and must not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .latest_rows import latest
    from .packs import foreach_pack, pack_schema
    from .query_progress import ProgressEndpoint, observe, progress, stop_observing
    from .source import TidewalSource
    from .spark_session import session

_HOME = {
    "ProgressEndpoint": ".query_progress",
    "TidewalSource": ".source",
    "foreach_pack": ".packs",
    "latest": ".latest_rows",
    "observe": ".query_progress",
    "pack_schema": ".packs",
    "progress": ".query_progress",
    "session": ".spark_session",
    "stop_observing": ".query_progress",
}

__all__ = [
    "ProgressEndpoint",
    "TidewalSource",
    "foreach_pack",
    "latest",
    "observe",
    "pack_schema",
    "progress",
    "session",
    "stop_observing",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
