from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from examples.flights import flights
from examples.flights.command import app
from tests.commands import Command, Start, as_processes, in_this_process

ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the demo with some arguments in this process."""
    return in_this_process(app, capsys)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the demo with some arguments as a process, which is gone after the test."""
    with as_processes("-m", "examples.flights", cwd=ROOT) as run:
        yield run


@pytest.fixture(scope="session")
def loaded() -> pa.Table:
    return flights.load()


@pytest.fixture(scope="session")
def every_event(loaded: pa.Table) -> pa.Table:
    return flights.events(loaded)
