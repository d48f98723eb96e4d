"""Clusters under random faults: one term at a time, nothing acknowledged is lost, and all have the same state."""

from __future__ import annotations

import os

import pytest

from tidewal.runtime.testing import ClusterPlan, simulate_cluster

SEEDS = int(os.environ.get("TIDEWAL_TEST_CLUSTERS", "12"))  # of each plan; a hundred take half a minute of CPU
PLANS = {
    "three nodes": ClusterPlan(),
    "mixed leases": ClusterPlan(nodes=4, leases_s=(2.0, 10.0)),
    "many clients": ClusterPlan(nodes=2, channels=2, clients=3, interval_s=0.1),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("round", range(4))
def test_whatever_fails_one_term_acknowledges_at_a_time_and_nothing_is_lost(seed: int, round: int, plan: str) -> None:
    simulate_cluster(seed + round, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_many_clusters(seed: int, plan: str) -> None:
    for number in range(SEEDS):
        simulate_cluster(seed + 100 + number, PLANS[plan])


def test_one_seed_is_one_run(seed: int) -> None:
    histories = [[event.to_json() for event in simulate_cluster(number).events] for number in (seed, seed, seed + 1)]
    assert histories[0] == histories[1] != histories[2]
