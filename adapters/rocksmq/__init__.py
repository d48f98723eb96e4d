"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB, for all processes of a machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .backend import BACKEND, directory_of

if TYPE_CHECKING:
    from .client.shared import SharedRocksMQ
    from .owner.store import RocksMQ

__all__ = ["RocksMQ", "SharedRocksMQ", "directory_of", "open_wal"]

_MODULES = {"RocksMQ": ".owner.store", "SharedRocksMQ": ".client.shared"}

open_wal = BACKEND.open


def __getattr__(name: str) -> object:
    """The classes, which load RocksDB."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
