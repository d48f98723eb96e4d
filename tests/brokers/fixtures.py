"""Brokers for tests in any folder; a test that uses one is marked `broker`.

`kafka` and `pulsar` are started once per run, and all processes of the run share them, so each test takes topics of its
own. `own_kafka`, `own_pulsar` and `kafka3` belong to one process: tests may kill, pause and stop them, and nodes are
brought back after each test. Where no broker can be started the tests are skipped, and the reason says what is missing;
in CI they fail once Tidewal has an adapter for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import pytest

from . import jars
from .given import GivenKafka, GivenPulsar, given_kafka, given_pulsar
from .kafka import KafkaCluster
from .pulsar import PulsarStandalone
from .sharing import SharedBroker

_kept_logs = pytest.StashKey[list[Path]]()
_Broker = TypeVar("_Broker", KafkaCluster, PulsarStandalone)
_own_brokers: list[KafkaCluster | PulsarStandalone] = []
# This process's uses of the run's brokers, each with the folder of the broker if this process has started it.
_shared_brokers = pytest.StashKey[list[tuple[SharedBroker, list[Path]]]]()


@pytest.fixture(autouse=True)
def _brokers_brought_back() -> Iterator[None]:
    yield
    for broker in _own_brokers:
        broker.recover()


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GivenKafka:
    """One node of Kafka, or the Kafka that TIDEWAL_TEST_KAFKA names."""

    def start(directory: Path) -> tuple[KafkaCluster, dict[str, str]]:
        cluster = KafkaCluster(directory)
        cluster.start()
        return cluster, {"bootstrap": cluster.bootstrap}

    given = given_kafka()
    return given or GivenKafka(**_joined("kafka", start, request.config, tmp_path_factory))


@pytest.fixture(scope="session")
def pulsar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GivenPulsar:
    """One node of Pulsar with deduplication, or the Pulsar that TIDEWAL_TEST_PULSAR names."""

    def start(directory: Path) -> tuple[PulsarStandalone, dict[str, str]]:
        broker = PulsarStandalone(directory)
        broker.start()
        return broker, {"url": broker.url, "web_url": broker.web_url}

    given = given_pulsar()
    return given or GivenPulsar(**_joined("pulsar", start, request.config, tmp_path_factory))


@pytest.fixture(scope="session")
def own_kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One node of Kafka that the test may kill, pause and stop."""
    yield from _own(KafkaCluster, "kafka", request, tmp_path_factory)


@pytest.fixture(scope="session")
def own_pulsar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PulsarStandalone]:
    """One node of Pulsar with deduplication that the test may kill, pause and stop."""
    yield from _own(PulsarStandalone, "pulsar", request, tmp_path_factory)


@pytest.fixture(scope="session")
def kafka3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three nodes of Kafka that the test may kill, pause and stop: three copies, two of them in sync or no write."""
    yield from _own(partial(KafkaCluster, nodes=3), "kafka", request, tmp_path_factory)


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


def _own(
    make: Callable[[Path], _Broker],
    kind: jars.Kind,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[_Broker]:
    require(kind)
    with logs_kept_on_failure(request, tmp_path_factory, kind) as directory, make(directory) as broker:
        _own_brokers.append(broker)
        yield broker
        _own_brokers.remove(broker)


def _joined(
    kind: jars.Kind,
    start: Callable[[Path], tuple[KafkaCluster | PulsarStandalone, dict[str, str]]],
    config: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """The address of the run's broker."""
    require(kind)
    shared = SharedBroker(_folder_of_run(tmp_path_factory), kind)
    directories: list[Path] = []

    def start_here() -> tuple[KafkaCluster | PulsarStandalone, dict[str, str]]:
        directories.append(tmp_path_factory.mktemp(kind))
        return start(directories[-1])

    address = shared.join(start_here)
    config.stash.setdefault(_shared_brokers, []).append((shared, directories))
    return address


def _folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of this run have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _keep(config: pytest.Config, directory: Path) -> None:
    config.stash.setdefault(_kept_logs, []).append(directory)


@pytest.hookimpl(tryfirst=True)  # pytest's own removes the directories of a run that passed
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the shared brokers, once no process of the run uses them. In one of several processes: tell the first one,
    which prints the summary, where the logs of brokers are."""
    brokers = session.config.stash.get(_shared_brokers, [])
    for shared, _ in brokers:
        shared.leave(failed=bool(session.testsfailed))
    for shared, directories in brokers:
        failed = shared.end()
        for directory in directories:
            if failed:
                _keep(session.config, directory)
            else:
                shutil.rmtree(directory)
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
