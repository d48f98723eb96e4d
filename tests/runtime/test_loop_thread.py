"""An event loop on a thread, for a process without one, and the reader over it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tidewal.runtime.errors import Closed, InvalidRequest, Unavailable
from tidewal.runtime.log.loop_thread import LoopReader, LoopThread
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.testing.memory import READ_BATCH_ENTRIES


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test-loop-thread")
    yield made
    if "test-loop-thread" in [thread.name for thread in threading.enumerate()]:
        made.end()


def test_it_runs_coroutines_and_raises_what_they_raise(loop):
    async def where() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise Unavailable("gone")

    assert loop.run(where()) == "test-loop-thread"
    with pytest.raises(Unavailable):
        loop.run(fail())
    assert loop.run(where(), timeout_s=20) == "test-loop-thread"


def test_a_fork_of_the_process_is_told_at_once_and_ends_nothing(loop, monkeypatch):
    inside = threading.Event()

    @asynccontextmanager
    async def managed() -> AsyncIterator[None]:
        inside.set()
        yield
        inside.clear()

    entered = loop.entered(managed())
    entered.__enter__()
    parent = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(InvalidRequest, match="made in another process: connect again there"):
            loop.run(asyncio.sleep(0))
        entered.__exit__(None, None, None)
    assert inside.is_set()
    loop.run(asyncio.sleep(0))
    entered.__exit__(None, None, None)
    assert not inside.is_set()


def test_what_takes_too_long_is_cancelled_with_the_loop(loop):
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.run(wait(), timeout_s=0.01)
    assert not ended.is_set()
    loop.end()
    assert ended.is_set()


def test_who_waits_as_the_loop_ends_is_told_that_it_is_closed(loop):
    waiting, told = threading.Event(), list[BaseException]()

    async def wait() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def run() -> None:
        try:
            loop.run(wait())
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(20)
    loop.end()
    thread.join(20)
    assert [type(error) for error in told] == [Closed]


def test_what_the_garbage_collector_ends_waits_for_nothing(loop):
    """It may run while its thread holds a lock that the loop waits for."""
    lock, waits, finished = threading.Lock(), threading.Event(), threading.Event()

    async def blocked() -> None:
        waits.set()
        with lock:
            pass

    async def finish() -> None:
        finished.set()

    with lock:
        blocking = threading.Thread(target=loop.run, args=(blocked(),))
        blocking.start()
        assert waits.wait(20)
        loop.finish(finish())
        assert not finished.is_set()
    assert finished.wait(20)
    blocking.join(20)
    loop.end()
    loop.finish(finish())  # nothing is left to be ended


def test_after_its_end_it_says_so(loop):
    async def nothing() -> None: ...

    loop.end()
    with pytest.raises(Closed, match="test-loop-thread has ended"):
        loop.run(nothing())


def test_a_reader_that_is_closed_begins_no_thread_again():
    reader = LoopReader("memory://")
    reader._wal = wal = reader._run(open_wal("memory://"))
    reader._run(wal.create_channel("a", ChannelPolicy()))
    reader._run(wal.append_many([Append("a", b"entry")] * (READ_BATCH_ENTRIES + 1)))
    assert reader.channels() == ["a"]
    begun = reader.read("a", None, None)
    assert next(begun)
    abandoned = reader.read("a", None, None)
    assert next(abandoned)
    reader.close()
    reader.close()
    abandoned.close()
    for call in (lambda: next(begun), reader.channels, lambda: next(reader.read("a", None, None))):
        with pytest.raises(Closed):
            call()
    assert not reader.alive()
    assert "tidewal-blocking-reader" not in [thread.name for thread in threading.enumerate()]
