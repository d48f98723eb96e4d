"""A row of the table of metrics, and short forms to write one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "tidewal_"

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["count", "bytes", "seconds", "milliseconds", "info"]


def _exponential(first: float, last: float, count: int) -> tuple[float, ...]:
    factor = (last / first) ** (1 / (count - 1))
    return tuple(float(f"{first * factor**step:.3g}") for step in range(count))


SECONDS_BUCKETS = _exponential(0.001, 5.0, 10)
COMMIT_SECONDS_BUCKETS = _exponential(0.0001, 2.0, 14)  # an fsync is well below Milvus' first bucket of 1 ms
BATCH_BUCKETS = _exponential(0.05, 600.0, 12)  # seconds: a micro-batch costs Spark 0.1 s, and may take minutes
MILLISECONDS_BUCKETS = _exponential(1.0, 5000.0, 10)
BYTES_BUCKETS = _exponential(64, 8 * 1024 * 1024, 10)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `name` is without the prefix; `labels` are without `node_id`."""

    name: str
    kind: Kind
    unit: Unit
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as Prometheus shows it."""
        return PREFIX + self.name


def counter(name: str, meaning: str, *labels: str, unit: Unit = "count") -> Metric:
    """A counter; its name ends in `_total`."""
    return Metric(name, "counter", unit, labels, meaning)


def gauge(name: str, unit: Unit, meaning: str, *labels: str) -> Metric:
    """A gauge."""
    return Metric(name, "gauge", unit, labels, meaning)


def seconds(name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Metric:
    """A histogram of durations in seconds."""
    return Metric(name, "histogram", "seconds", labels, meaning, buckets)


def milliseconds(name: str, meaning: str, *labels: str) -> Metric:
    """A histogram of durations in milliseconds."""
    return Metric(name, "histogram", "milliseconds", labels, meaning, MILLISECONDS_BUCKETS)


def sizes(name: str, meaning: str, *labels: str) -> Metric:
    """A histogram of sizes in bytes."""
    return Metric(name, "histogram", "bytes", labels, meaning, BYTES_BUCKETS)
