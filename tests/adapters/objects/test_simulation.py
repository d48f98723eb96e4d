"""Logs on object storage under random faults: what is acknowledged is there once, in order, and all read the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.adapters.objects.simulation.driver import simulate_log

SEEDS = int(os.environ.get("TIDEWAL_TEST_OBJECT_LOGS", "0"))  # more of them; a thousand take ten to thirty minutes


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each fault is meant, and the history has it."""
    logging.getLogger("tidewal").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("tidewal").setLevel(logging.NOTSET)


@pytest.mark.parametrize("round", range(3))
def test_whatever_fails_what_was_acknowledged_is_there_once_and_all_read_the_same(seed: int, round: int) -> None:
    simulate_log(seed + round, faults_s=20)


@pytest.mark.long
@pytest.mark.timeout(10_800)
def test_many_logs(seed: int) -> None:
    for number in range(SEEDS or 25):
        simulate_log(seed + number)


def test_one_seed_is_one_run(seed: int) -> None:
    events = [simulate_log(number, faults_s=2).events for number in (seed, seed, seed + 1)]
    assert events[0] == events[1] != events[2]
