"""An operation that waits too long is reported once, and once when it is over; one that makes progress is not."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tidewal.runtime.log import stalls as stalls_module
from tidewal.runtime.log.stalls import STALLED_AFTER_S, StallWatch
from tidewal.runtime.metrics.metrics import Metrics


@pytest.fixture
def metrics():
    return Metrics("test")


@pytest.fixture
def watch(metrics):
    return StallWatch(metrics)


def counted(metrics, operation, name="wal_backend_stall_total"):
    return metrics.value(name, channel_name="a", operation=operation)


@pytest.mark.parametrize("operation", ["append", "read"])
def test_a_stall_is_reported_once_and_once_when_it_is_over(watch, metrics, caplog, operation):
    waiting = watch.begin(operation, "a")
    watch.look(waiting.since_s + STALLED_AFTER_S[operation] - 0.01)
    assert counted(metrics, operation) == 0
    watch.retry(waiting, OSError("nobody there"))
    for later_s in (0.0, 1.0, 100.0):
        watch.look(waiting.since_s + STALLED_AFTER_S[operation] + later_s)
    assert counted(metrics, operation) == 1
    assert counted(metrics, operation, "wal_backend_stalled") == 1
    assert counted(metrics, operation, "wal_backend_retry_total") == 1
    with caplog.at_level(logging.WARNING):
        watch.end(waiting)
        watch.end(waiting)
    watch.look(waiting.since_s + 1000)
    assert counted(metrics, operation) == 1
    assert counted(metrics, operation, "wal_backend_stalled") == 0
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "nobody there" in messages[0]
    assert "over" in messages[1]


def test_what_makes_progress_is_no_stall(watch, metrics):
    answered = [0]
    waiting = watch.begin("append", "a", lambda: answered[0])
    now_s = waiting.since_s
    for _ in range(10):
        answered[0] += 1
        now_s += 0.9 * STALLED_AFTER_S["append"]
        watch.look(now_s)
    assert counted(metrics, "append") == 0
    watch.look(now_s + STALLED_AFTER_S["append"])
    assert counted(metrics, "append") == 1


def test_without_metrics_it_only_logs(caplog):
    watch = StallWatch()
    waiting = watch.begin("read", "a")
    watch.retry(waiting, "silent")
    watch.outcome_unknown("a")
    watch.look(waiting.since_s + 60)
    watch.end(waiting)
    assert len(caplog.records) == 2


def test_its_thread_checks_until_it_is_closed(metrics, monkeypatch):
    monkeypatch.setattr(stalls_module, "LOOK_S", 0.001)
    watch = StallWatch(metrics)
    waiting = watch.begin("append", "a")
    waiting.since_s -= 100
    watch.start()
    deadline_s = time.monotonic() + 10
    while counted(metrics, "append") == 0:
        assert time.monotonic() < deadline_s
    watch.close()
    assert not any(thread.name == "tidewal-stalls" for thread in threading.enumerate())
    watch.outcome_unknown("a", 3)
    assert metrics.value("wal_backend_outcome_unknown_total", channel_name="a") == 3
