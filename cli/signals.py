"""End a command in good order on SIGINT or SIGTERM, or when its node has failed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..actors.standalone import Standalone

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")


class Interrupted(Exception):
    """A signal asked the command to end, and it has ended in good order."""


async def until_stopped(work: Coroutine[object, object, T]) -> T:
    """Run `work`, cancel it at the first SIGINT or SIGTERM, wait until it has drained, and raise `Interrupted`.

    A second signal ends the process at once, without draining.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    before = {each: signal.getsignal(each) for each in SIGNALS}
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for each in SIGNALS:
        loop.add_signal_handler(each, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        raise
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)


async def while_healthy(node: Standalone, work: Coroutine[object, object, T]) -> T:
    """Run `work`; when a role of `node` fails for good before it ends, cancel it and raise the role's error."""
    task = asyncio.ensure_future(work)
    failed = asyncio.ensure_future(node.failed())
    try:
        await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise failed.result()
        return task.result()
    finally:
        for each in (task, failed):
            each.cancel()
        await asyncio.gather(task, failed, return_exceptions=True)
