"""Sidecars of Woodpecker for tests, on etcd and on segments in a folder or an object store.

Where Go or a network for its modules is missing the tests are skipped, in CI as well, and the last lines of the run say
so in capitals. Where both are there CI fails if a program was not built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from . import go_programs
from .fixtures import logs_kept_on_failure
from .jars import Missing
from .woodpecker import Etcd, Sidecar, VersityGateway, local

NOT_TESTED = "Woodpecker is not tested: "


def require_program(program: go_programs.Program) -> Path:
    """The program; skips the test where it is not built. Fails in CI where it could be."""
    try:
        return go_programs.find_program(program)
    except Missing as missing:
        unfetched = isinstance(missing, go_programs.Unfetched)
        if os.environ.get("CI") == "true" and go_programs.has_go() and not unfetched:
            pytest.fail(f"CI needs {program}: {missing}", pytrace=False)
        pytest.skip(f"{NOT_TESTED}{missing}")


@pytest.fixture(scope="session")
def etcd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One node of etcd for the logs of all tests of this process."""
    program = require_program("etcd")
    with logs_kept_on_failure(request, tmp_path_factory, "etcd") as directory:
        node = Etcd(program, directory)
        node.start()
        yield node
        node.stop()


@pytest.fixture
def new_sidecar(etcd: Etcd, tmp_path: Path) -> Iterator[Callable[..., Sidecar]]:
    """Make another sidecar of the test's log, not started yet, in the folder of that name; all end with the test.
    `settings` replace those of a log on local storage, `endpoint` the etcd of all tests."""
    program, prefix = require_program("sidecar"), uuid4().hex
    made: list[Sidecar] = []

    def make(name: str = "log", settings: dict[str, Any] | None = None, endpoint: str = etcd.endpoint) -> Sidecar:
        made.append(Sidecar(program, tmp_path / name, endpoint, prefix, settings or local(tmp_path)))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()


@pytest.fixture
def object_store(tmp_path: Path) -> Iterator[VersityGateway]:
    """A running S3 store that the test may kill."""
    directory = tmp_path / "s3"
    directory.mkdir()
    store = VersityGateway(require_program("versitygw"), directory)
    store.start()
    yield store
    store.process.kill()


@pytest.fixture
def sidecar(new_sidecar: Callable[..., Sidecar]) -> Sidecar:
    """A running sidecar of an empty log on local storage."""
    running = new_sidecar()
    running.start()
    return running


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = {str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])}
    missed = sorted({reason.partition(NOT_TESTED)[2] for reason in reasons if NOT_TESTED in reason})
    for reason in missed:
        terminalreporter.write_line(f"WOODPECKER WAS NOT TESTED: {reason.rstrip(')').upper()}")
