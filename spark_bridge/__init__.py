"""The Spark bridge: a data source over consistent cuts of the log.

The names below are imported at their first use: each of Spark's workers imports this package to find its data source,
and must not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .helpers.latest_rows import latest
    from .helpers.packs import foreach_pack, pack_schema
    from .helpers.progress import ProgressEndpoint, observe, progress, stop_observing
    from .helpers.spark_session import session
    from .source import TidewalSource

_HOME = {
    "ProgressEndpoint": ".helpers.progress",
    "TidewalSource": ".source",
    "foreach_pack": ".helpers.packs",
    "latest": ".helpers.latest_rows",
    "observe": ".helpers.progress",
    "pack_schema": ".helpers.packs",
    "progress": ".helpers.progress",
    "session": ".helpers.spark_session",
    "stop_observing": ".helpers.progress",
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
