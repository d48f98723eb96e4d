"""`memory://`: the testing kit's WAL as a backend, for first steps and for tests of whole nodes."""

from __future__ import annotations

from ..runtime.testing.memory import MemoryWal


async def open_wal(url: str, **_: object) -> MemoryWal:
    """A fresh, empty log that lives as long as the returned WAL."""
    return MemoryWal()
