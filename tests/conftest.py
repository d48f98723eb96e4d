"""What all tests share: settings for hypothesis, and randomness that can be repeated."""

from __future__ import annotations

import faulthandler
import os
import random
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.logging_restored import logging_restored

pytest_plugins = (
    "tests.brokers.fixtures",
    "tests.brokers.woodpecker_fixtures",
    "tests.objects.fixtures",
    "tests.backends",
    "tests.shared_spark",
    "tests.first_hour.report",
    "tests.turns",
)

HEAVY_S = 600  # on a busy machine a start of Spark, part of the first test's time, takes a minute, one of a broker half
PAST_LIMIT_S = 60  # how long after its time limit a test that goes on ends the process
HEAVY = ("spark", "broker", "slow", "long", "kills")
SHARED = ("own_kafka", "kafka3", "own_pulsar", "spark")  # fixtures and parameters of what each process would start

SEED = "TIDEWAL_TEST_SEED"
CI = os.environ.get("CI") == "true"
SEED_OF_CI = 1

# A deadline per example would measure how busy the machine is; pytest's own timeout ends what hangs.
settings.register_profile("tidewal", deadline=None, print_blob=True, derandomize=CI)
settings.load_profile("tidewal")


TERMINAL = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the run, for all of its processes: CI's is always the same, so that a change fails by itself
    and not by another draw. Keep where errors are shown, before a test's own are caught."""
    config.stash[TERMINAL] = os.dup(2)
    os.environ.setdefault(SEED, str(SEED_OF_CI if CI else random.SystemRandom().randrange(2**32)))


def pytest_report_header() -> str:
    return f"seed: {os.environ[SEED]} ({SEED} repeats a run)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that do not name the marker `kills` where a run wants no other tests: each of its processes
    would take ten seconds of CPU to collect 10,000 tests, for 20."""
    if config.getoption("markexpr") != "kills" or not collection_path.name.startswith("test_"):
        return None
    return None if "pytest.mark.kills" in collection_path.read_text(encoding="utf-8") else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests run in one process, where several run side by side: those with one Spark, or a broker to kill, so
    that each of these is started once; the others by file. What may take longest comes first, so that no process is
    left alone with it in the end."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        uses = {*getattr(item, "fixturenames", ()), *_parameters(item)}
        group = next((name for name in SHARED if name in uses), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
        if any(map(item.get_closest_marker, HEAVY)) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HEAVY_S))
        groups[group].append(item)
    items[:] = [item for group in sorted(groups.values(), key=_weight, reverse=True) for item in group]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """End the Spark or the brokers of a group of tests behind the last of these: they would take memory, and a node of
    Kafka 3 % of a core, until this process ends."""
    try:
        return (yield)
    finally:
        group = _group_of(item)
        if group in SHARED and nextitem is not None and _group_of(nextitem) != group:
            name = "shared_spark" if group == "spark" else group
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)


def _group_of(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


def _weight(group: list[pytest.Item]) -> tuple[float, int]:
    limits = (mark.args[0] for item in group for mark in item.iter_markers("timeout"))
    return max(limits, default=0), len(group)


def _parameters(item: pytest.Item) -> list[str]:
    """What the parameters are called, those that are no text included."""
    callspec = getattr(item, "callspec", None)
    return callspec.id.split("-") if callspec else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, with what each of its threads does, where a test goes on after its time limit. The limit raises
    an error in the main thread; asyncio gives it to the task that runs just then, and where that is not the test, the
    test would hold up the whole run."""
    limits = [float(mark.args[0]) for mark in item.iter_markers("timeout")] or [float(item.config.getini("timeout"))]
    faulthandler.dump_traceback_later(limits[0] + PAST_LIMIT_S, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command under test configures writes to a stream that is closed with the test."""
    with logging_restored():
        yield


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of the run; its header names it."""
    return int(os.environ[SEED])


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A random source made from `seed`."""
    return random.Random(seed)
