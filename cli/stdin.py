"""Standard input, and slow reading of any kind, beside the event loop: a signal ends the command meanwhile."""

from __future__ import annotations

import asyncio
import io
import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, BinaryIO, TypeVar, cast

from ..runtime.errors import InvalidRequest

STDIN = 0

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """What `call` returns or raises. A daemon thread makes it: the end of this process does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            settled(outcome)

    def make() -> None:
        try:
            outcome = partial(settle, done.set_result, call())
        except Exception as error:  # raised where it is awaited
            outcome = partial(settle, done.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(outcome)

    Thread(target=make, daemon=True).start()
    return await done


def read_stdin(size: int) -> bytes:
    """The next bytes of standard input, at most `size`; none at its end. Waits also where another program has made it
    non-blocking. Raises `InvalidRequest` where it cannot be read."""
    while True:
        try:
            return os.read(STDIN, size)
        except BlockingIOError:
            select.select([STDIN], [], [])
        except OSError as error:
            raise InvalidRequest(f"standard input cannot be read: {error.strerror}") from None


class _Pipe(io.RawIOBase):
    """Standard input that is no file."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = read_stdin(len(buffer))
        buffer[: len(found)] = found
        return len(found)


def stdin_file() -> BinaryIO:
    """Standard input as a file, which is not `sys.stdin`: a thread that still reads that one at the end of the process
    ends it with an error of Python's."""
    try:
        file = io.FileIO(STDIN, closefd=False)
    except OSError as error:
        raise InvalidRequest(f"standard input cannot be read: {error.strerror}") from None
    return cast("BinaryIO", io.BufferedReader(file if file.seekable() else _Pipe()))
