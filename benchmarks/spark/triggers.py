"""What a micro-batch of one row costs beside Spark's rate source and the synthetic one: milliseconds from its begin to
its end, trigger after trigger.

Most of a micro-batch is Spark's writing into its checkpoint, which `session()` makes cheaper for all sources alike. So
there are two figures: with Spark's own way to write it, and with `session()` as it is.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ..report import figure, interleaved
from .data import KINDS
from .owner import Owner
from .reading import ratios_of

ROUNDS = 3
WARMING = 10
TRIGGERS = 25
WITHIN_S = 120.0
KIND = "narrow"
PHASES = ("latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"


class Streams:
    """Queries into the sink that does nothing, and where their triggers spent their time."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._phases: dict[str, list[dict[str, int]]] = {}

    def trigger_ms(self, name: str, frame: Any) -> float:
        """The median over `TRIGGERS` micro-batches of a new query."""
        checkpoint = tempfile.mkdtemp(dir=self._directory)
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(processingTime="0 seconds")
            .start()
        )
        try:
            until_s = time.monotonic() + WITHIN_S
            while len(done := _with_rows(query)) < WARMING + TRIGGERS:
                assert query.isActive, query.exception()
                assert time.monotonic() < until_s, f"{name} made {len(done)} micro-batches in {WITHIN_S} s"
                time.sleep(0.1)
        finally:
            query.stop()
        durations = [progress["durationMs"] for progress in done[WARMING:]]
        self._phases.setdefault(name, []).extend(durations)
        return statistics.median(each["triggerExecution"] for each in durations)

    def phases_of(self, name: str) -> str:
        """The medians of `PHASES`, which are most of a trigger."""
        return " ".join(
            f"{phase} {statistics.median(each.get(phase, 0) for each in self._phases[name]):g}" for phase in PHASES
        )


def _with_rows(query: Any) -> list[dict[str, Any]]:
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def measure(spark: Any, directory: str) -> None:
    with Owner(f"rocksmq://{os.path.join(directory, 'triggers')}", KIND) as owner, owner.trickling():
        ours = spark.readStream.format("tidewal").options(**owner.options, startingOffsets="latest")
        frames = {
            "rate": spark.readStream.format("rate-micro-batch").options(rowsPerBatch=1, numPartitions=1).load(),
            "synthetic": spark.readStream.format("synthetic").options(kind=KIND).load(),
            "tidewal": ours.schema(KINDS[KIND].columns).load(),
        }
        cheaper = spark.conf.get(CHECKPOINTS)
        spark.conf.unset(CHECKPOINTS)
        beside_first(directory, "spark.trigger_ms", frames, ROUNDS)
        spark.conf.set(CHECKPOINTS, cheaper)
        beside_first(directory, "spark.trigger_ms.session", frames, ROUNDS)


def beside_first(directory: str, name: str, frames: Mapping[str, Any], rounds: int) -> None:
    """Print what a micro-batch of the last of `frames` takes, as ratio to the first."""
    streams = Streams(directory)
    measured = interleaved({each: lambda each=each: streams.trigger_ms(each, frames[each]) for each in frames}, rounds)
    first, *_, ours = frames
    ratios = ratios_of(measured[ours], measured[first])
    beside: dict[str, float | str] = {f"{each}_ms": values.median for each, values in measured.items()}
    for each in frames:
        if each not in (first, ours):
            beside[f"{each}_ratio"] = ratios_of(measured[each], measured[first]).median
        beside[f"{each}_phases_ms"] = streams.phases_of(each)
    figure(name, ratios.median, f"ratio to source {first}", ratios.spread, beside)
