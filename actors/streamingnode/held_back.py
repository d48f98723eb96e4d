"""An acknowledgement that comes later than it could."""

from __future__ import annotations

import asyncio
from functools import partial

from ...runtime.ownership import Appended


def held_back(appended: asyncio.Future[Appended], delay_s: float) -> asyncio.Future[Appended]:
    """The outcome of `appended`, not before `delay_s` seconds from now; an error at once."""
    loop = appended.get_loop()
    held: asyncio.Future[Appended] = loop.create_future()
    appended.add_done_callback(partial(_settle, held, loop.time() + delay_s))
    return held


def _settle(held: asyncio.Future[Appended], at_s: float, appended: asyncio.Future[Appended]) -> None:
    error = None if appended.cancelled() else appended.exception()
    if held.done():
        return
    if appended.cancelled():
        held.cancel()
    elif error is not None:
        held.set_exception(error)
    else:
        held.get_loop().call_at(at_s, _acknowledge, held, appended.result())


def _acknowledge(held: asyncio.Future[Appended], outcome: Appended) -> None:
    if not held.done():
        held.set_result(outcome)
