"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB, for all processes of a machine."""

from __future__ import annotations

from typing import Any

from ...runtime.errors import ConfigError, DirectoryInUse
from ...runtime.remote import Address
from ...runtime.wal import Wal
from .recovery import RecoveryReport
from .shared import FAILOVER_S, SharedRocksMQ
from .store import RocksMQ


async def open_wal(url: str, *, own: bool | None = None, failover_s: float = FAILOVER_S, **options: Any) -> Wal:
    """Open `rocksmq:///absolute/path`, `rocksmq://./relative/path`, or `rocksmq://127.0.0.1:PORT?token_file=/path`.

    The first process to open a directory owns it, with `options` of `RocksMQ.open`. Others get a `SharedRocksMQ`, which
    does all that the owner does, through it, and may take the directory over when the owner goes. `own` True:
    raise `DirectoryInUse` instead. `own` False, or a port: never own the directory. `failover_s` is how long calls wait
    for an owner before they raise `Unavailable`; with 0 this opening tries once.
    """
    address = Address.parse(url)
    if own is not False and address.directory:
        try:
            return await RocksMQ.open(address.directory, **options)
        except DirectoryInUse:
            if own:
                raise
    elif own:
        raise ConfigError(f"{url!r}: a directory is owned by its path, not through a port", key="wal")
    return await SharedRocksMQ.connect(address, may_own=own is None, failover_s=failover_s, **options)


def directory_of(url: str) -> str:
    """The directory that a URL names. Raises `ConfigError`."""
    directory = Address.parse(url).directory
    if not directory:
        raise ConfigError(f"{url!r}: write rocksmq:///absolute/path or rocksmq://./relative/path", key="wal")
    return directory


__all__ = ["RecoveryReport", "RocksMQ", "SharedRocksMQ", "directory_of", "open_wal"]
