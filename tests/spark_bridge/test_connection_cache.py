"""Logs kept open from task to task: used again, never when broken, and never too many."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidewal.runtime.errors import ChannelNotFound, Unavailable
from tidewal.spark_bridge import connection_cache
from tidewal.spark_bridge.connection_cache import IDLE_MAX, cached_log, close_idle

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Owner


@pytest.fixture(autouse=True)
def _none_are_left() -> Iterator[None]:
    close_idle()
    yield
    close_idle()


def names(url: str) -> list[str]:
    with cached_log(url) as log:
        return log.channels()


def test_the_next_task_uses_the_same_connection(owner: Owner) -> None:
    owner.append("a", b"1", 1)
    with cached_log(owner.url) as first:
        assert first.channels() == ["a"]
        with cached_log(owner.url) as other:
            assert other is not first
            assert other.channels() == ["a"]
    with cached_log(owner.url) as again:
        assert again is first
    with cached_log(owner.url) as again:
        assert again is first


def test_what_failed_is_not_used_again(owner: Owner) -> None:
    owner.append("a", b"1", 1)
    with pytest.raises(ChannelNotFound), cached_log(owner.url) as log:
        log.latest_id("no such channel")
    with cached_log(owner.url) as other:
        assert other is not log
        assert other.channels() == ["a"]


def test_a_task_that_is_given_up_in_the_middle_leaves_nothing(owner: Owner) -> None:
    owner.append("a", b"1", 1)

    def task() -> Iterator[object]:
        with cached_log(owner.url) as log:
            yield from log.read("a", None, None)

    reading = task()
    next(reading)
    reading.close()
    assert connection_cache._idle == []


@pytest.mark.slow
def test_when_the_owner_is_gone_the_advice_comes_at_once_and_its_successor_is_found(tmp_path: Path) -> None:
    first = Owner(tmp_path / "log")
    first.append("a", b"1", 1)
    assert names(first.url) == ["a"]
    first.close()
    with pytest.raises(Unavailable, match="start one"):  # and not after the 30 s that a known owner is waited for
        names(first.url)
    second = Owner(tmp_path / "log")
    try:
        second.append("b", b"2", 2)
        assert names(second.url) == ["a", "b"]
        second.close()
        second = Owner(tmp_path / "log")
        assert names(second.url) == ["a", "b"]
    finally:
        second.close()


@pytest.mark.slow
def test_only_so_many_are_kept(tmp_path: Path) -> None:
    owners = [Owner(tmp_path / str(number)) for number in range(IDLE_MAX + 2)]
    try:
        for each in owners:
            names(each.url)
        assert [url for url, *_ in connection_cache._idle] == [each.url for each in owners[2:]]
    finally:
        for each in owners:
            each.close()


def test_what_is_not_used_for_a_while_is_closed(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.append("a", b"1", 1)
    timers: list[Callable[[], None]] = []

    class Timer:
        def __init__(self, after_s: float, then: Callable[[], None]) -> None:
            assert after_s == connection_cache.IDLE_S
            timers.append(then)

        def start(self) -> None:
            pass

    clock = FakeClock()
    monkeypatch.setattr(connection_cache, "_sweeping", False)
    monkeypatch.setattr(connection_cache, "time", clock)
    monkeypatch.setattr(connection_cache.threading, "Timer", Timer)
    with cached_log(owner.url) as first, cached_log(owner.url) as second:
        assert first.channels() == second.channels()
    clock.now = connection_cache.IDLE_S / 2
    with cached_log(owner.url) as used:
        assert used is first
    assert len(timers) == 1
    clock.now = connection_cache.IDLE_S
    timers.pop()()
    assert not second.alive()
    assert first.alive()
    clock.now = 2 * connection_cache.IDLE_S
    timers.pop()()
    assert not first.alive()
    assert timers == []


class FakeClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


FORKING = """
import os, sys
from tidewal.spark_bridge import connection_cache
with connection_cache.cached_log(sys.argv[1]) as log:
    log.channels()
if os.fork() == 0:
    print("child", len(connection_cache._idle), flush=True)
    os._exit(0)
os.wait()
with connection_cache.cached_log(sys.argv[1]) as again:
    print("parent", again is log, again.channels())
"""


def test_a_forked_process_leaves_them_to_its_parent(owner: Owner) -> None:
    owner.append("a", b"1", 1)
    told = subprocess.run([sys.executable, "-c", FORKING, owner.url], capture_output=True, text=True, check=False)
    assert told.stdout.splitlines() == ["child 0", "parent True ['a']"], told.stderr


COLLECTING = """
import gc, sys
if sys.argv[2] == "worker":
    import pyspark.worker
from tidewal.spark_bridge.connection_cache import cached_log
for _ in range(2):
    with cached_log(sys.argv[1]) as log:
        log.channels()
print(gc.get_freeze_count() > 10_000, gc.isenabled())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("process", "told"), [("worker", "True True"), ("driver", "False True")])
def test_a_worker_of_spark_does_not_collect_modules_after_each_task(owner: Owner, process: str, told: str) -> None:
    pytest.importorskip("pyspark")
    command = [sys.executable, "-c", COLLECTING, owner.url, process]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == told, done.stderr
