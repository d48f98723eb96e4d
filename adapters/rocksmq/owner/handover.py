"""Hand a directory over to a process that requires ownership, from an owner that does not.

The process holds an ownership request (`directory.py`) until it owns the directory or gives up. Meanwhile no process
that does not require ownership takes the directory over, and its owner, asked through the socket to yield, closes it,
unless the owner requires ownership as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from ....runtime.clock import Clock, SystemClock
from ....runtime.errors import DirectoryInUse, Overloaded, TidewalError, Unavailable
from ..address import Address
from ..client.owner_connection import OwnerConnection
from .dedup import CLIENT_ID_BYTES
from .directory import OwnershipRequest
from .store import RocksMQ

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.1  # between two attempts to own
ANSWER_S = 2.0  # for the owner's answer, before it is asked again

_log = logging.getLogger(__name__)


async def force_own(address: Address, wait_s: float, options: dict[str, Any]) -> RocksMQ:
    """Own the directory at `address`, with `options` of `RocksMQ.open`, as soon as its owner yields it.

    Raises `DirectoryInUse` when the owner requires ownership as well, or has not yielded after `wait_s` seconds (0: it
    is asked once), and what `RocksMQ.open` raises.
    """
    try:
        return await open_store(address.directory, options)
    except DirectoryInUse as in_use:
        _log.info("%s: asked to yield", in_use.message)
    clock: Clock = options.get("clock") or SystemClock()
    deadline, pause_s = clock.monotonic() + wait_s, FIRST_PAUSE_S
    request = OwnershipRequest(address.directory)
    try:
        while True:
            request.make()
            may_let_go = await _ask(address)
            try:
                return await open_store(address.directory, options)
            except DirectoryInUse:
                if not may_let_go or clock.monotonic() >= deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
    finally:
        request.release()


async def _ask(address: Address) -> bool:
    """Ask the owner to yield; whether it makes sense to wait for that."""
    try:
        async with asyncio.timeout(ANSWER_S):
            connection = await OwnerConnection.open(address, os.urandom(CLIENT_ID_BYTES), on_lost=lambda _: None)
            try:
                await connection.ask("stand_down")
            finally:
                await connection.close()
    except (Unavailable, Overloaded, TimeoutError):  # it is just opening or closing the directory
        return True
    except TidewalError as error:
        _log.info("the owner of %s does not yield: %s", address, error.message)
        return False
    return True


async def open_store(directory: str, options: dict[str, Any]) -> RocksMQ:
    """`RocksMQ.open` with these options, but a cancelled call leaves nothing open."""
    opening = asyncio.ensure_future(RocksMQ.open(directory, **options))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread that opens cannot be stopped: wait, and close the log
        await asyncio.wait([opening])
        if opening.exception() is None:
            await opening.result().close()
        raise
