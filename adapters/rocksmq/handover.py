"""Hand a directory over to a process that insists on owning it, from one that can do without.

Who insists holds a claim (`directory.py`) until it owns the directory or gives up. Meanwhile nobody else takes the
directory over, and its owner, asked through the socket to stand down, closes it, unless that one insists as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from ...runtime.clock import Clock, SystemClock
from ...runtime.errors import DirectoryInUse, Overloaded, TidewalError, Unavailable
from ...runtime.remote import Address
from .directory import Claim
from .link import Link
from .repeats import CLIENT_ID_BYTES
from .store import RocksMQ

FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.1  # between two attempts to own
ANSWER_S = 2.0  # what the owner is given for its answer, before it is asked again

_log = logging.getLogger(__name__)


async def insist(address: Address, wait_s: float, options: dict[str, Any]) -> RocksMQ:
    """Own the directory at `address`, with `options` of `RocksMQ.open`, as soon as its owner lets go.

    Raises `DirectoryInUse` when that one insists as well, or has not let go after `wait_s` (0: it is asked once), and
    what `RocksMQ.open` raises.
    """
    try:
        return await open_store(address.directory, options)
    except DirectoryInUse as in_use:
        _log.info("%s: asked to let go", in_use.message)
    clock: Clock = options.get("clock") or SystemClock()
    deadline, pause_s = clock.monotonic() + wait_s, FIRST_PAUSE_S
    claim = Claim(address.directory)
    try:
        while True:
            claim.make()
            may_let_go = await _ask(address)
            try:
                return await open_store(address.directory, options)
            except DirectoryInUse:
                if not may_let_go or clock.monotonic() >= deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
    finally:
        claim.release()


async def _ask(address: Address) -> bool:
    """Ask the owner to stand down; whether it makes sense to wait for that."""
    try:
        async with asyncio.timeout(ANSWER_S):
            link = await Link.open(address, os.urandom(CLIENT_ID_BYTES), on_lost=lambda _: None)
            try:
                await link.ask("stand_down")
            finally:
                await link.close()
    except (Unavailable, Overloaded, TimeoutError):  # it is just coming or going
        return True
    except TidewalError as error:
        _log.info("the owner of %s does not let go: %s", address, error.message)
        return False
    return True


async def open_store(directory: str, options: dict[str, Any]) -> RocksMQ:
    """`RocksMQ.open`, which leaves nothing behind when it is cancelled."""
    opening = asyncio.ensure_future(RocksMQ.open(directory, **options))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread that opens cannot be stopped: wait, and give back
        await asyncio.wait([opening])
        if opening.exception() is None:
            await opening.result().close()
        raise
