from __future__ import annotations

import pyarrow as pa
import pytest

from tidewal.cli.demo import flights


@pytest.fixture(scope="session")
def loaded() -> pa.Table:
    return flights.load()


@pytest.fixture(scope="session")
def every_event(loaded: pa.Table) -> pa.Table:
    return flights.events(loaded)
