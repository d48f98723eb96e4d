"""Pulsar: `pulsar://host:port/tenant/namespace`, for a log that Apache Pulsar keeps."""

from __future__ import annotations

from .options import parse
from .wal import Pulsar

__all__ = ["Pulsar", "open_wal"]


async def open_wal(url: str, **options: object) -> Pulsar:
    """Open the log at `url`; options are those of `Options`, in the URL's query or here. Raises `ConfigError` for what
    is wrong in them, `Unavailable` when the broker or its web service does not answer."""
    return await Pulsar.open(parse(url, options))
