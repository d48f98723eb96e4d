"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB, for all processes of a machine."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from ...runtime.errors import ConfigError, DirectoryInUse
from ...runtime.wal import Wal
from .recovery import RecoveryReport
from .shared import FAILOVER_S, SharedRocksMQ
from .store import RocksMQ


async def open_wal(url: str, *, own: bool | None = None, failover_s: float = FAILOVER_S, **options: Any) -> Wal:
    """Open `rocksmq:///absolute/path` or `rocksmq://./relative/path`.

    The first process to open a directory owns it, with `options` of `RocksMQ.open`. Others get a `SharedRocksMQ`, which
    does all that the owner does, through it, and may take the directory over when the owner goes. `own` True:
    raise `DirectoryInUse` instead. `own` False: never own the directory. `failover_s` is how long calls wait for an
    owner before they raise `Unavailable`; with 0 this opening tries once.
    """
    directory = directory_of(url)
    if own is not False:
        try:
            return await RocksMQ.open(directory, **options)
        except DirectoryInUse:
            if own:
                raise
    return await SharedRocksMQ.connect(directory, may_own=own is None, failover_s=failover_s, **options)


def directory_of(url: str) -> str:
    """The directory that a URL names. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme != "rocksmq" or parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"{url!r}: write rocksmq:///absolute/path or rocksmq://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


__all__ = ["RecoveryReport", "RocksMQ", "SharedRocksMQ", "directory_of", "open_wal"]
