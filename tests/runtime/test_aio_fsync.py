"""Syncs by the kernel: their end is returned once, to one caller, and never as a success after a failure."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewal.runtime import aio_fsync
from tidewal.runtime.aio_fsync import KernelDisk
from tidewal.runtime.disk import Syncer

pytestmark = pytest.mark.skipif(aio_fsync.linux_aio is None, reason="the system has no asynchronous syncs")


@pytest.fixture
def syncer() -> Syncer:
    found = KernelDisk().syncer()
    assert found is not None
    return found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def wait(syncer: Syncer) -> None:
    poll = select.poll()
    poll.register(syncer.file, select.POLLIN)
    assert poll.poll(20_000)


def test_an_end_is_returned_once(syncer: Syncer, file: int) -> None:
    assert not syncer.finish()
    for _ in range(100):
        os.write(file, b"x" * 1000)
        assert syncer.start(file)
        wait(syncer)
        assert syncer.finish()
        assert not syncer.finish()


def test_of_many_callers_one_gets_the_end(syncer: Syncer, file: int) -> None:
    asking = threading.Barrier(4)

    def collect(ended: list[bool]) -> None:
        for _ in range(200):
            asking.wait(20)
            wait_until_told = syncer.finish()
            ended.append(wait_until_told)
            asking.wait(20)

    answers: list[list[bool]] = [[] for _ in range(3)]
    threads = [threading.Thread(target=collect, args=(ended,), daemon=True) for ended in answers]
    for thread in threads:
        thread.start()
    for _ in range(200):
        os.write(file, b"x")
        assert syncer.start(file)
        wait(syncer)
        asking.wait(20)
        asking.wait(20)
    for thread in threads:
        thread.join()
    assert [sum(ended) for ended in zip(*answers, strict=True)] == [1] * 200


def test_a_failed_sync_raises(syncer: Syncer) -> None:
    reading, writing = os.pipe()
    try:
        if syncer.start(writing):  # the kernel may notice at once
            wait(syncer)
            with pytest.raises(OSError, match="Invalid argument"):
                syncer.finish()
        assert not syncer.finish()
    finally:
        os.close(reading)
        os.close(writing)


def test_what_cannot_begin_says_so(syncer: Syncer, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "gone", os.O_RDWR | os.O_CREAT)
    os.close(descriptor)
    assert not syncer.start(descriptor)
    assert not syncer.finish()
