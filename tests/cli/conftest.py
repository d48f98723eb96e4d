from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends import log_url
from tests.commands import Command, Start, as_processes, in_this_process
from tidewal.cli.main import app


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `tidewal` with some arguments in this process."""
    return in_this_process(app, capsys)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start `tidewal` with some arguments as a process, which is gone after the test. What it prints and what it logs
    come in one pipe, so it logs from warnings on."""
    monkeypatch.setenv("TIDEWAL__LOG__LEVEL", "warn")
    with as_processes("-c", "from tidewal.cli.main import main; main()", cwd=tmp_path) as run:
        yield run


@pytest.fixture(params=["kafka", "pulsar"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of a log of its own on each kind of broker."""
    return log_url(request.param, request.getfixturevalue(request.param))
