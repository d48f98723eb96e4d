"""A collection read by Spark, beside the synthetic source: rows per second into the sink that does nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import pyarrow as pa

from tidewal.spark_bridge.source import TidewalSource

from ..report import Rounds, figure, interleaved, per_second
from .cpu import cpu_seconds
from .data import KINDS, SHARDS
from .owner import Owner

ROUNDS = 5


def measure(spark: Any, directory: str) -> None:
    for kind in KINDS:
        with Owner(f"rocksmq://{os.path.join(directory, kind)}", kind) as owner:
            beside_others(spark, f"spark.read.{kind}", kind, owner.options, ROUNDS)


def beside_others(
    spark: Any, name: str, kind: str, options: dict[str, str], rounds: int, others: Mapping[str, Any] | None = None
) -> None:
    """Print how fast the collection is read, as ratio to the synthetic source with batches of the same size, and
    beside it what `others` reach.

    `all_columns` is the same with the log's own columns, as a frame without a schema has them.
    """
    chosen = KINDS[kind]
    ours = spark.read.format("tidewal").options(**options)
    frame = ours.schema(chosen.columns).load()
    synthetic = spark.read.format("synthetic").options(
        kind=kind, rows=chosen.rows, batchRows=batch_rows(options, frame), tasks=SHARDS
    )
    frames = {"tidewal": frame, "synthetic": synthetic.load(), "all_columns": ours.load(), **(others or {})}
    used_s: dict[str, list[float]] = {each: [] for each in frames}
    measured = interleaved({each: reader(frames[each], chosen.rows, used_s[each]) for each in frames}, rounds)
    ratios = ratios_of(measured["tidewal"], measured["synthetic"])
    beside = {f"{each}_rows_per_s": rates.median for each, rates in measured.items()}
    beside |= {f"{each}_cpu_s_per_1m": Rounds(tuple(used_s[each])).median / chosen.rows * 1e6 for each in frames}
    figure(name, ratios.median, "ratio to a synthetic source", ratios.spread, beside)


def ratios_of(ones: Rounds, others: Rounds) -> Rounds:
    """What came of `ones` for each of `others`, round by round."""
    return Rounds(tuple(one / other for one, other in zip(ones.values, others.values, strict=True)))


def batch_rows(options: dict[str, str], frame: Any) -> int:
    """The rows of the first batch that a task hands to Spark."""
    reader = TidewalSource(options).reader(frame.schema)
    batches = reader.read(reader.partitions()[0])
    return cast(pa.RecordBatch, next(batches)).num_rows


def reader(frame: Any, rows: int, used_s: list[float]) -> Callable[[], float]:
    """A candidate of `interleaved` that also notes the CPU of each round."""

    def read() -> float:
        before_s = cpu_seconds()
        rate = per_second(rows, lambda: frame.write.format("noop").mode("overwrite").save())
        used_s.append(cpu_seconds() - before_s)
        return rate

    return read
