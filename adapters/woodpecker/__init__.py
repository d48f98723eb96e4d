"""Woodpecker, the log that Milvus has by default: a library for Go, reached through a sidecar (`sidecars/woodpecker/`).

The sidecar owns the log, and speaks the protocol of RocksMQ's owner (`adapters/rocksmq/protocol.py`) at a socket in a
folder. In addition to what every WAL guarantees (`runtime/log/wal.py`):

- One sidecar has a log: the newest. The processes of its machine append and read through it; one that another sidecar
  has taken over from refuses every append with `Fenced`.
- An append that was on its way when the sidecar ended has an unknown outcome, and is not sent again.
- `acks` of a channel means nothing: each append is acknowledged once it is in the storage.
- Ephemeral channels live in the sidecar's memory.
- A batch over several channels is not atomic; when a part of it fails the error says `outcome_unknown`.
- An id is the segment, the entry, and the place among the records that share the entry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...runtime.lazy import lazy_names
from .backend import BACKEND

if TYPE_CHECKING:
    from ...runtime.log.wal import Wal
    from .wal import WoodpeckerWal as WoodpeckerWal
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {".wal": "WoodpeckerWal"})
    __all__ += ["open_wal"]

open_wal: Callable[..., Awaitable[Wal]] = BACKEND.open
