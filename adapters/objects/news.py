"""Wake readers when there may be more to read."""

from __future__ import annotations

import asyncio


class News:
    """What the readers of an open log wait for, on its loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # who came first is woken first

    @property
    def awaited(self) -> bool:
        """Whether any reader waits."""
        return bool(self._waiting)

    async def wait(self) -> None:
        """Return after the next `tell`, or raise the error of the next `fail`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            del self._waiting[waiting]

    def tell(self) -> None:
        """Let all that wait look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def fail(self, error: Exception) -> None:
        """End all that wait with an error."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
