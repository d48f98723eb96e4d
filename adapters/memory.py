"""`memory://`: the testing kit's WAL as a backend, for first steps and for tests of whole nodes."""

from __future__ import annotations

from ..runtime.log.backend import WalBackend
from ..runtime.log.wal import Capabilities, Wal


class MemoryBackend(WalBackend):
    """A log in memory, which ends with the `Wal` that opened it."""

    name = "memory"
    schemes: tuple[str, ...] = ("memory",)
    url_form = "memory://"
    shared = False

    async def open(self, url: str, **_: object) -> Wal:
        """Open a new, empty log. `url` and the options mean nothing here."""
        from ..runtime.testing.memory import MemoryWal

        return MemoryWal()

    def capabilities(self) -> Capabilities:
        from ..runtime.testing.memory import MemoryWal

        return MemoryWal.capabilities


BACKEND = MemoryBackend()
