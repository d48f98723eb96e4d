"""Pulsar: `pulsar://host:port/tenant/namespace`, a log on Apache Pulsar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backend import BACKEND

if TYPE_CHECKING:
    from .wal import Pulsar

__all__ = ["Pulsar", "open_wal"]

open_wal = BACKEND.open


def __getattr__(name: str) -> object:
    """`Pulsar`, which loads the client library."""
    if name != "Pulsar":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .wal import Pulsar

    return Pulsar
