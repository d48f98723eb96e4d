"""`memory://`: the testing kit's WAL as a backend, for first steps and for tests of whole nodes."""

from __future__ import annotations

from ..runtime.testing.memory import MemoryWal


async def open_wal(url: str, **_: object) -> MemoryWal:
    """Open a new, empty log in memory, which ends with the returned WAL. `url` and the options mean nothing here."""
    return MemoryWal()
