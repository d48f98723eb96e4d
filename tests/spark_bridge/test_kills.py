"""Source → aggregation → Parquet, source → collection → source and source → topic → source, side by side, with the
driver killed (its Python and its JVM), the log's owner, the broker, and an executor (a process of its own, as in a
cluster): in the end counts and checksums are those of what was acknowledged, each row once.

`TIDEWAL_CRASH_KILLS` says how often (5; 3 on Kafka).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tests.backends import log_url
from tests.kill_demo import descendants

sys.path.insert(0, str(Path(__file__).parent))
from kill_kit import CLUSTER, UNSERIALIZED, Child, Driver, Node, assert_each_row_is_there_once, running

KILLS = os.environ.get("TIDEWAL_CRASH_KILLS")
QUERIES = ["sums", "rows", "messages"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.kills,
    pytest.mark.timeout(1800 + 120 * int(KILLS or 5)),
]


def some_moments(rng: random.Random, kinds: list[str], kills: int) -> list[str]:
    """Of each kind equally many, in any order."""
    moments = list(itertools.islice(itertools.cycle(kinds), int(KILLS or kills)))
    rng.shuffle(moments)
    return moments


def kill_driver(driver: Driver, moment: str) -> None:
    child = driver.start()
    try:
        if driver.reach(moment, child):
            return
        told = " ".join(child.until("failed"))
        print(told)
        assert UNSERIALIZED in told, f"the driver ended by itself: {told}"
    finally:
        child.kill()


def kill_owner(node: Node, driver: Driver) -> None:
    """The queries go on where nothing was asked meanwhile, or fail with words that say what to do; then the driver."""
    child = driver.start()
    try:
        assert driver.reach("random", child)
        node.die_and_come_back()
        if not driver.reach("planned", child):
            told = " ".join(child.until("failed"))
            print(told)
            assert "start one (tidewal run --" in told or "start the query again" in told
    finally:
        child.kill()


def kill_broker(own_kafka: Any, driver: Driver) -> None:
    """The queries go on when it is back, or fail and go on when they are started again; then the driver."""
    child = driver.start()
    try:
        assert driver.reach("random", child)
        own_kafka.kill()
        own_kafka.restart()
        driver.reach("planned", child)
    finally:
        child.kill()


def kill_executor(driver: Driver, rng: random.Random) -> None:
    """Another one takes its place, and the queries go on; then the driver."""
    child = driver.start(master=CLUSTER)
    try:
        assert driver.reach("random", child)
        before = executors(child)
        assert len(before) == 2
        os.kill(rng.choice(sorted(before)), signal.SIGKILL)
        assert driver.reach("random", child), "a query ended with its executor"
        assert driver.wait(child, lambda: bool(executors(child) - before)), "no other executor came"
    finally:
        child.kill()


def executors(child: Child) -> set[int]:
    """The processes of a driver's executors."""
    found: set[int] = set()
    for pid in descendants(child.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if b"CoarseGrainedExecutorBackend" in command:
            found.add(pid)
    return found


@pytest.mark.in_turn(0, 2)
def test_drivers_and_owners_that_are_killed_lose_and_double_nothing(tmp_path: Path, rng: random.Random) -> None:
    moments = some_moments(rng, ["written", "planned", "random", "owner", "planned"], kills=5)
    with running(f"rocksmq://{tmp_path}/log", tmp_path, rng, QUERIES) as (node, driver):
        for moment in moments:
            if moment == "owner":
                kill_owner(node, driver)
            else:
                kill_driver(driver, moment)
        assert_each_row_is_there_once(node, driver, CLUSTER)  # executors elsewhere read and write the rest
    assert driver.interrupted


@pytest.mark.broker
@pytest.mark.in_turn(1, 2)
def test_drivers_executors_and_brokers_that_are_killed_lose_and_double_nothing(
    own_kafka: Any, tmp_path: Path, rng: random.Random
) -> None:
    moments = some_moments(rng, ["broker", "executor", "planned", "written", "random"], kills=3)
    with running(log_url("kafka", own_kafka), tmp_path, rng, QUERIES) as (node, driver):
        for moment in moments:
            if moment == "broker":
                kill_broker(own_kafka, driver)
            elif moment == "executor":
                kill_executor(driver, rng)
            else:
                kill_driver(driver, moment)
        assert_each_row_is_there_once(node, driver)
    assert driver.interrupted
