"""Executors that are processes of their own, as in a cluster: each reads the log by itself, and one that is killed in
the middle of a query is replaced without a row lost or doubled. (RocksMQ is read and written there in test_kills.py.)
"""

from __future__ import annotations

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
from kill_kit import CLUSTER, Child, assert_each_row_is_there_once, running

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.broker
def test_an_executor_that_is_killed_loses_and_doubles_nothing(kafka: Any, tmp_path: Path, rng: random.Random) -> None:
    with running(log_url("kafka", kafka), tmp_path, rng, queries=["sums"]) as (node, driver):
        child = driver.start(master=CLUSTER)
        try:
            assert driver.reach("random", child)
            before = executors(child)
            assert len(before) == 2
            os.kill(rng.choice(sorted(before)), signal.SIGKILL)
            assert driver.reach("random", child), "the query ended with its executor"
            assert executors(child) - before, "no other executor came"
        finally:
            child.kill()
        assert_each_row_is_there_once(node, driver)


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
