"""An event's file, on systems with eventfd and without."""

from __future__ import annotations

import os
import select
import threading

import pytest

from tidewal.runtime.event_file import EventFile
from tidewal.runtime.loop_bridge import EventSignal

BOUND_S = 20.0


@pytest.fixture(params=["eventfd", "pipe"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("the system has no eventfd")
    return request.param


def readable(event: EventFile) -> bool:
    poll = select.poll()
    poll.register(event.file, select.POLLIN)
    return bool(poll.poll(0))


def test_it_is_readable_from_set_until_take(kind: str) -> None:
    event = EventFile(blocking=False)
    for _ in range(3):
        assert not readable(event)
        with pytest.raises(BlockingIOError):
            event.take()
        event.set()
        event.set()
        assert readable(event)
        event.take()
    event.close()


def test_setting_it_never_blocks_and_one_take_takes_all(kind: str) -> None:
    event = EventFile(blocking=False)
    for _ in range(20_000):  # a pipe is full long before
        event.set()
    event.take()
    assert not readable(event)
    event.close()


def test_closing_it_closes_every_file(kind: str) -> None:
    before = set(os.listdir("/dev/fd"))
    event = EventFile()
    event.close()
    assert set(os.listdir("/dev/fd")) == before


def test_a_signal_wakes_the_thread_that_waits(kind: str) -> None:
    signal, woken = EventSignal(), threading.Event()

    def wait() -> None:
        signal.wait()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert signal.set()
    assert woken.wait(BOUND_S)
    thread.join(BOUND_S)
    signal.close()
    assert not signal.set()
