"""What waits for a backend: bounded in bytes, refused when closed, and known to be answered."""

from __future__ import annotations

from functools import partial

import pytest

from tidewal.runtime.errors import Closed, Overloaded
from tidewal.runtime.log.admission import PendingBytes


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def pending() -> PendingBytes:
    return PendingBytes(100, "kafka://here")


def test_over_the_limit_nothing_is_admitted_until_something_is_answered(pending, events):
    with pending.lock:
        pending.admit(60)
        pending.admit(40)
        with pytest.raises(Overloaded, match="kafka://here") as caught:
            pending.admit(1)
    assert caught.value.limit == "pending_bytes"
    pending.release(60, partial(events.append, "answered"))
    assert events == ["answered"]
    with pending.lock:
        pending.admit(60)
    assert pending.bytes == 100


def test_a_call_over_the_limit_is_admitted_alone(pending):
    with pending.lock:
        pending.admit(500)
        with pytest.raises(Overloaded):
            pending.admit(1)
    pending.release(500, lambda: None)
    with pending.lock:
        pending.admit(1)
        with pytest.raises(Overloaded):
            pending.admit(500)


def test_closing_refuses_calls_and_waits_for_the_last_answer(pending, events):
    with pending.lock:
        pending.admit(1)
        pending.admit(0)  # a call without bytes is waited for, too
    pending.close(partial(events.append, "drained"))
    with pending.lock, pytest.raises(Closed, match="kafka://here"):
        pending.admit(1)
    pending.release(1, partial(events.append, "first"))
    assert events == ["first"]
    pending.release(0, partial(events.append, "second"))
    assert events == ["first", "second", "drained"]


def test_closing_without_calls_is_done_at_once(pending, events):
    pending.close(partial(events.append, "drained"))
    assert events == ["drained"]


def test_a_callback_that_fails_is_logged_and_nothing_else(pending, events, caplog):
    with pending.lock:
        pending.admit(1)
    pending.close(partial(events.append, "drained"))

    def answer() -> None:
        raise ValueError("of the caller")

    pending.release(1, answer)
    assert events == ["drained"]
    assert "of the caller" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_answer_that_ends_the_process_is_counted_all_the_same(pending, events, error):
    with pending.lock:
        pending.admit(1)
    pending.close(partial(events.append, "drained"))

    def answer() -> None:
        raise error

    with pytest.raises(error):
        pending.release(1, answer)
    assert events == ["drained"]


def test_an_answer_may_come_while_the_call_is_being_made(pending, events):
    with pending.lock:
        pending.admit(1)
        pending.release(1, partial(events.append, "at once"))
    assert events == ["at once"]
    assert pending.bytes == 0


def test_a_call_counts_as_answered_once_its_answer_has_returned(pending, events):
    def answer() -> None:
        pending.release(1, partial(events.append, "another, meanwhile"))
        events.append("answered")

    with pending.lock:
        pending.admit(1)
        pending.admit(1)
    pending.close(partial(events.append, "drained"))
    pending.release(1, answer)
    assert events == ["another, meanwhile", "answered", "drained"]
