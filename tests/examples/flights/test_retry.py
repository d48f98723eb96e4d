"""A node that refuses for a moment does not end the demo."""

from __future__ import annotations

import pytest

from examples.flights.retry import RETRY_S, retry_until
from tidewal.runtime.errors import InvalidRequest, Overloaded, TidewalError, Unavailable
from tidewal.runtime.testing.clock import run_virtual


class Node:
    def __init__(self, *errors: TidewalError) -> None:
        self.errors = list(errors)
        self.asked = 0

    async def answer(self) -> str:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "yes"


def test_a_refusal_for_a_moment_is_asked_again() -> None:
    node = Node(Unavailable("the lease is over and not renewed yet"), Overloaded("wait"))
    assert run_virtual(retry_until(node.answer)) == "yes"
    assert node.asked == 3


def test_other_errors_pass_through() -> None:
    node = Node(InvalidRequest("no"))
    with pytest.raises(InvalidRequest):
        run_virtual(retry_until(node.answer))
    assert node.asked == 1


def test_a_refusal_that_lasts_is_told() -> None:
    node = Node(*[Unavailable("nobody there")] * int(2 * RETRY_S / 0.1))
    with pytest.raises(Unavailable, match="nobody there"):
        run_virtual(retry_until(node.answer))
    assert node.errors
