"""What all tests share: settings for hypothesis, and randomness that can be repeated."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings

pytest_plugins = ("tests.brokers.fixtures", "tests.backends")

# A deadline per example would measure how busy the machine is; pytest's own timeout ends what hangs.
settings.register_profile("tidewal", deadline=None, print_blob=True)
settings.load_profile("tidewal")


@pytest.fixture
def seed() -> int:
    """A seed that is new in each run and shown when the test fails; `TIDEWAL_TEST_SEED` repeats a run."""
    value = int(os.environ.get("TIDEWAL_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"repeat with TIDEWAL_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A random source made from `seed`."""
    return random.Random(seed)
