"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from ...runtime.errors import ConfigError, DirectoryInUse
from ...runtime.wal import Wal
from .recovery import RecoveryReport
from .remote import RemoteRocksMQ
from .store import RocksMQ


async def open_wal(url: str, *, own: bool = False, **options: Any) -> Wal:
    """Open `rocksmq:///absolute/path` or `rocksmq://./relative/path`.

    The first process to open a directory owns it; others get a `RemoteRocksMQ`, which reads only, or with `own` the
    error `DirectoryInUse`. Options are those of `RocksMQ.open`.
    """
    directory = directory_of(url)
    try:
        return await RocksMQ.open(directory, **options)
    except DirectoryInUse:
        if own:
            raise
        return await RemoteRocksMQ.connect(directory)


def directory_of(url: str) -> str:
    """The directory that a URL names. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme != "rocksmq" or parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"{url!r}: write rocksmq:///absolute/path or rocksmq://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


__all__ = ["RecoveryReport", "RemoteRocksMQ", "RocksMQ", "directory_of", "open_wal"]
