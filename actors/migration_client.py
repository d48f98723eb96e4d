"""What an operator asks of the node whose log is to be migrated while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..runtime.errors import DeadlineExceeded, TidewalError, Unavailable, from_wire
from ..runtime.rpc.protocol import Params
from .client import Client

LOOK_S = 0.2  # between two looks at how far it is
CALL_S = 5.0  # for one answer: while the roles are stopped there is none
SILENT_S = 120.0  # without any, until the node is given up
CANCEL_S = 120.0

_UNDER_WAY = ("copying", "switching")


class MigrationClient:
    """The methods of the node that has the log open, over an open `client`, which follows the log."""

    def __init__(self, client: Client) -> None:
        self._rpc = client._rpc  # pyright: ignore[reportPrivateUsage] -- it asks in the client's name, beside it

    async def migrate(self, to: str, *, on_line: Callable[[str], object] = lambda line: None) -> None:
        """Have the log migrated to that at the URL `to`, without credentials, and return when the node works on it.
        `on_line` is called with each line of progress. Raises the error with which that has failed, and `Unavailable`
        where the node has not answered for `SILENT_S` seconds."""
        status = (await self._rpc.call("mixcoord", "migrate", {"target": to})).values
        seen = 0
        while True:
            seen = _tell(status, seen, on_line)
            if status["phase"] not in _UNDER_WAY:
                break
            await asyncio.sleep(LOOK_S)
            status = await self.status()
        if status["error"] is not None:
            raise from_wire(status["error"])
        if status["phase"] != "migrated":
            raise Unavailable("the migration was taken back, or the node was started anew: see --status")

    async def status(self) -> Params:
        """How far it is (`LogMigration.status`). While the roles are stopped this waits for them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SILENT_S
        while True:
            try:
                return (await self._rpc.call("mixcoord", "migration", deadline_s=CALL_S)).values
            except TidewalError as error:
                if not (error.retryable or isinstance(error, DeadlineExceeded)):
                    raise
                if loop.time() >= until:
                    raise Unavailable(
                        "the node has stopped answering: look at its log, and at --status, which says how far it is"
                    ) from error
            await asyncio.sleep(LOOK_S)

    async def cancel(self, to: str) -> None:
        """Take the migration to the log at `to` back. Raises as `LogMigration.cancel` does."""
        await self._rpc.call("mixcoord", "cancel_migration", {"target": to}, deadline_s=CANCEL_S)


def _tell(status: Params, seen: int, on_line: Callable[[str], object]) -> int:
    """Call `on_line` with the lines behind the first `seen`. Returns how many there are."""
    lines: list[str] = status["lines"]
    new = min(status["said"] - seen, len(lines))
    for line in lines[len(lines) - new :] if new > 0 else ():
        on_line(line)
    return int(status["said"])
