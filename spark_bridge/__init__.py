"""The Spark bridge: a data source over consistent cuts of the log.

The names below are imported when they are first used: each of Spark's workers imports this package to look for its
data source, and must not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .local import session
    from .newest import latest
    from .observing import Progress, observe, progress, stop_observing
    from .packs import foreach_pack, pack_schema
    from .source import TidewalSource

_HOME = {
    "Progress": ".observing",
    "TidewalSource": ".source",
    "foreach_pack": ".packs",
    "latest": ".newest",
    "observe": ".observing",
    "pack_schema": ".packs",
    "progress": ".observing",
    "session": ".local",
    "stop_observing": ".observing",
}

__all__ = [
    "Progress",
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
