"""Pulsar: `pulsar://host:port/tenant/namespace`, a log on Apache Pulsar."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...runtime.lazy import lazy_names
from .backend import BACKEND

if TYPE_CHECKING:
    from ...runtime.log.wal import Wal
    from .wal import Pulsar as Pulsar
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {".wal": "Pulsar"})
    __all__ += ["open_wal"]

open_wal: Callable[..., Awaitable[Wal]] = BACKEND.open
