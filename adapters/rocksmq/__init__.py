"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from ...runtime.errors import ConfigError
from ...runtime.wal import Wal
from .recovery import RecoveryReport
from .store import RocksMQ


async def open_wal(url: str, **options: Any) -> Wal:
    """Open `rocksmq:///absolute/path` or `rocksmq://./relative/path`.

    The first process to open a directory owns it. Options are those of `RocksMQ.open`.
    """
    return await RocksMQ.open(directory_of(url), **options)


def directory_of(url: str) -> str:
    """The directory that a URL names. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme != "rocksmq" or parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"{url!r}: write rocksmq:///absolute/path or rocksmq://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


__all__ = ["RecoveryReport", "RocksMQ", "directory_of", "open_wal"]
