"""From the log to Delta tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .datanode import DataNode as DataNode
else:
    from ...runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__, {".datanode": "DataNode"})
