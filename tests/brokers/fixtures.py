"""The fixtures `kafka`, `kafka3` and `pulsar`, for tests in any folder: brokers that are started once per run.

A test that uses one is marked `broker`. All share the brokers, so each takes topics of its own; nodes that a test has
killed, paused or stopped are brought back after it. Where no broker can be started the tests are skipped, and the
reason says what is missing; in CI they fail once Tidewal has an adapter for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import pytest

from . import jars
from .given import GivenKafka, GivenPulsar, given_kafka, given_pulsar
from .kafka import KafkaCluster
from .pulsar import PulsarStandalone

_kept_logs = pytest.StashKey[list[Path]]()
_Broker = TypeVar("_Broker", KafkaCluster, PulsarStandalone)
_started: list[KafkaCluster | PulsarStandalone] = []


@pytest.fixture(autouse=True)
def _brokers_brought_back() -> Iterator[None]:
    yield
    for broker in _started:
        broker.recover()


@pytest.fixture(scope="session")
def kafka(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaCluster | GivenKafka]:
    """One node of Kafka, or the Kafka that TIDEWAL_TEST_KAFKA names."""
    given = given_kafka()
    if given:
        yield given
        return
    require("kafka")
    with logs_kept_on_failure(request, tmp_path_factory, "kafka") as directory:
        yield from _shared(KafkaCluster(directory))


@pytest.fixture(scope="session")
def kafka3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three nodes of Kafka: three copies, two of them in sync or no write. Always our own, since tests kill them."""
    if given_kafka():
        pytest.skip("needs three nodes of its own to kill")
    require("kafka")
    with logs_kept_on_failure(request, tmp_path_factory, "kafka3") as directory:
        yield from _shared(KafkaCluster(directory, 3))


@pytest.fixture(scope="session")
def pulsar(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PulsarStandalone | GivenPulsar]:
    """One node of Pulsar with deduplication, or the Pulsar that TIDEWAL_TEST_PULSAR names."""
    given = given_pulsar()
    if given:
        yield given
        return
    require("pulsar")
    with logs_kept_on_failure(request, tmp_path_factory, "pulsar") as directory:
        yield from _shared(PulsarStandalone(directory))


def require(kind: jars.Kind) -> None:
    """Skip the test where brokers of this kind cannot be started; fail in CI where there is an adapter to test."""
    try:
        jars.find(kind)
    except jars.Missing as missing:
        if os.environ.get("CI") == "true" and entry_points(group="tidewal.wal", name=kind):
            pytest.fail(f"CI needs {kind}: {missing}", pytrace=False)
        pytest.skip(str(missing))


@contextmanager
def logs_kept_on_failure(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, name: str
) -> Iterator[Path]:
    """Give a folder for a broker; it stays where a test failed meanwhile, and the summary says where it is."""
    directory = tmp_path_factory.mktemp(name)
    failed_before = request.session.testsfailed
    try:
        yield directory
    except BaseException:
        _keep(request.config, directory)
        raise
    if request.session.testsfailed > failed_before:
        _keep(request.config, directory)
    else:
        shutil.rmtree(directory)


def _shared(broker: _Broker) -> Iterator[_Broker]:
    with broker:
        _started.append(broker)
        yield broker
        _started.remove(broker)


def _keep(config: pytest.Config, directory: Path) -> None:
    config.stash.setdefault(_kept_logs, []).append(directory)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In one of several processes: tell the first one, which prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kept_logs"] = [str(each) for each in session.config.stash.get(_kept_logs, [])]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for directory in getattr(node, "workeroutput", {}).get("kept_logs", []):
        _keep(node.config, Path(directory))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for directory in config.stash.get(_kept_logs, []):
        for log in sorted(directory.glob("*.log")):
            terminalreporter.write_line(f"log of a broker: {log}")
