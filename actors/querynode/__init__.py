"""Answers to queries and searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .querynode import QueryNode as QueryNode
else:
    from ...runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__, {".querynode": "QueryNode"})
