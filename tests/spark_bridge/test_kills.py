"""Source → aggregation → Parquet, source → collection → source and source → topic → source, with the driver killed (its
Python and its JVM), the log's owner, and the broker: in the end counts and checksums are those of what was
acknowledged, each row once.

`TIDEWAL_CRASH_KILLS` says how often (5; 2 where Spark writes, 1 on Kafka).
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tests.backends import log_url

sys.path.insert(0, str(Path(__file__).parent))
from kill_kit import CLUSTER, Driver, Node, assert_each_row_is_there_once, running

KILLS = os.environ.get("TIDEWAL_CRASH_KILLS")

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240 + 40 * int(KILLS or 5))]


def some_moments(rng: random.Random, kinds: list[str], kills: int) -> list[str]:
    """Of each kind equally many, in any order."""
    moments = list(itertools.islice(itertools.cycle(kinds), int(KILLS or kills)))
    rng.shuffle(moments)
    return moments


def kill_driver(driver: Driver, moment: str) -> None:
    child = driver.start()
    try:
        assert driver.reach(moment, child), "the driver ended by itself"
    finally:
        child.kill()


def kill_owner(node: Node, driver: Driver) -> None:
    """The queries go on where nothing was asked meanwhile, or fail with words that say what to do; then the driver."""
    child = driver.start()
    try:
        assert driver.reach("random", child)
        node.die_and_come_back()
        if not driver.reach("planned", child):
            assert "start one (tidewal run --wal rocksmq://" in " ".join(child.until("failed"))
    finally:
        child.kill()


def kill_broker(kafka: Any, driver: Driver) -> None:
    """The queries go on when it is back, or fail and go on when they are started again; then the driver."""
    child = driver.start()
    try:
        assert driver.reach("random", child)
        kafka.kill()
        kafka.restart()
        driver.reach("planned", child)
    finally:
        child.kill()


def test_a_query_whose_driver_and_whose_logs_owner_are_killed_counts_each_row_once(
    tmp_path: Path, rng: random.Random
) -> None:
    moments = some_moments(rng, ["written", "planned", "random", "owner", "planned"], kills=5)
    with running(f"rocksmq://{tmp_path}/log", tmp_path, rng, queries=["sums"]) as (node, driver):
        for moment in moments:
            if moment == "owner":
                kill_owner(node, driver)
            else:
                kill_driver(driver, moment)
        assert_each_row_is_there_once(node, driver)
    assert driver.interrupted


def test_a_driver_that_is_killed_writes_each_row_once(tmp_path: Path, rng: random.Random) -> None:
    moments = some_moments(rng, ["planned", "planned", "random"], kills=2)
    with running(f"rocksmq://{tmp_path}/log", tmp_path, rng, queries=["rows", "messages"]) as (node, driver):
        for moment in moments:
            kill_driver(driver, moment)
        assert_each_row_is_there_once(node, driver, CLUSTER)  # executors elsewhere read and write the rest
    assert driver.interrupted


@pytest.mark.broker
def test_a_query_whose_driver_and_broker_are_killed_counts_each_row_once(
    kafka: Any, tmp_path: Path, rng: random.Random
) -> None:
    moments = some_moments(rng, ["broker", "planned", "random", "written"], kills=1)
    with running(log_url("kafka", kafka), tmp_path, rng, queries=["sums"]) as (node, driver):
        for moment in moments:
            if moment == "broker":
                kill_broker(kafka, driver)
            else:
                kill_driver(driver, moment)
        assert_each_row_is_there_once(node, driver)
