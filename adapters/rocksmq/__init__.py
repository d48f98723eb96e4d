"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB, for all processes of a machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...runtime.lazy import lazy_names
from .backend import BACKEND

if TYPE_CHECKING:
    from ...runtime.log.wal import Wal
    from .client.shared import SharedRocksMQ as SharedRocksMQ
    from .owner.store import RocksMQ as RocksMQ
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {".client.shared": "SharedRocksMQ", ".owner.store": "RocksMQ"})
    __all__ += ["open_wal"]

open_wal: Callable[..., Awaitable[Wal]] = BACKEND.open
