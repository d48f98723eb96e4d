"""`tidewal verify cluster`: the parts of Tidewal by which many nodes share a log, simulated under faults."""

from __future__ import annotations

import json
import logging
from time import perf_counter
from typing import Annotated

import typer

from .results import AsJson

VIOLATED = 1  # exit status
SEEDS = 100
FAULTS_S = 20.0


def cluster(
    seeds: Annotated[int, typer.Option(min=1, help="How many clusters are simulated, one for each seed.")] = SEEDS,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=100, help="Nodes of each cluster.")] = 3,
    channels: Annotated[int, typer.Option(min=1, max=256, help="Channels of each cluster.")] = 4,
    faults_s: Annotated[
        float, typer.Option("--faults", min=1.0, help="For how many seconds of virtual time faults happen.")
    ] = FAULTS_S,
    as_json: AsJson = False,
) -> None:
    """Simulate clusters in this process, on virtual time, and check what came of them.

    Membership, leases, evictions, grants and channel owners are the real ones; the log is in memory. Nodes are killed,
    stopped for longer than their leases, and leave; clocks are set and run at other rates; appends fail, land late, or
    have an unknown outcome; the channels of the state stand still. Checked is that at each instant one owner
    acknowledges, that what was acknowledged is read once and in order, and that all have the same state. The same seed
    gives the same run. Exits with 0 when all held, with 1 at the first violation, which is printed with what happened
    before it.
    """
    from rich.console import Console

    from ..runtime.testing import ClusterPlan, ClusterViolation, simulate_cluster

    logging.getLogger("tidewal").setLevel(logging.CRITICAL)  # each fault is meant, and the history has it
    plan = ClusterPlan(nodes=nodes, channels=channels)
    began_s, acknowledged, faults, violation, done = perf_counter(), 0, 0, "", 0
    with Console(stderr=True).status("the first cluster") as progress:  # prints nothing where that is no terminal
        for seed in range(first, first + seeds):
            try:
                history = simulate_cluster(seed, plan, faults_s=faults_s)
            except ClusterViolation as found:
                violation = f"seed {seed}: {found}"
                break
            done += 1
            acknowledged += len(list(history.of("acked")))
            faults += len(list(history.of("fault")))
            progress.update(f"{done} of {seeds} clusters, {acknowledged:,} appends acknowledged, {faults:,} faults")
    took_s = perf_counter() - began_s
    verdict = {
        "held": not violation,
        "clusters": done,
        "acknowledged": acknowledged,
        "faults": faults,
        "took_s": round(took_s, 1),
        "violation": violation,
    }
    if as_json:
        typer.echo(json.dumps(verdict))
    else:
        if violation:
            typer.echo(violation)
        outcome = "violated" if violation else "held"
        typer.echo(
            f"{outcome}; {done} clusters of {nodes} nodes, {acknowledged:,} appends acknowledged, {faults:,} faults, "
            f"{took_s:.1f} s"
        )
    if violation:
        raise typer.Exit(VIOLATED)
