"""What an owner reports of how much is written to its channels."""

from __future__ import annotations

from tidewal.actors.streamingnode.write_rates import WriteRates
from tidewal.runtime.testing.clock import VirtualClock


def test_a_channel_that_comes_back_is_not_reported_as_it_was_when_it_left() -> None:
    clock, written = VirtualClock(), {"channel": 0}
    rates = WriteRates(lambda: dict(written), clock)
    for _ in range(60):
        clock.advance(1)
        written["channel"] += 1_000_000
        reported = rates()
    assert reported["channel"] > 900_000
    del written["channel"]
    clock.advance(1)
    assert rates() == {}
    written["channel"] = 0
    clock.advance(1)
    assert rates() == {}
