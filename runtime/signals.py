"""End a program in good order on SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

INTERRUPTED = 130  # exit status of a program that Ctrl-C ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")


class Interrupted(Exception):
    """A signal asked the program to end, and its work has ended in good order."""


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
