"""Run the subjects, or some: `python -m benchmarks.spark --only read,trigger`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.brokers.jars import Missing
from tidewal.spark_bridge import session

from ..report import chosen
from ..wal.limits import scratch
from . import kafka, reading, triggers
from .connector import connector_jars
from .synthetic import SyntheticSource

SUBJECTS: dict[str, Callable[[Any, str], None]] = {
    "read": reading.measure,
    "trigger": triggers.measure,
    "kafka": kafka.measure,
}


def main() -> None:
    names = chosen("spark", __doc__, SUBJECTS)
    settings = with_connector() if "kafka" in names else {}
    with scratch() as directory:
        spark = session("benchmarks", **settings, **{"spark.local.dir": os.path.join(directory, "local")})
        spark.sparkContext.setLogLevel("OFF")
        try:
            spark.dataSource.register(SyntheticSource)
            for name in names:
                try:
                    SUBJECTS[name](spark, directory)
                except Missing as missing:
                    print(f"{name} is left out: {missing}", file=sys.stderr)
        finally:
            spark.stop()


def with_connector() -> dict[str, str]:
    """The setting that brings Spark's own Kafka connector, where it can be had."""
    try:
        return {"spark.jars": connector_jars()}
    except Missing as missing:
        print(f"Spark's own connector is left out: {missing}", file=sys.stderr)
        return {}


if __name__ == "__main__":
    main()
