"""Run the subjects, or some: `python -m benchmarks.spark --only read,trigger`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.brokers.jars import Missing
from tidewal.spark_bridge import session

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
    parser = argparse.ArgumentParser(prog="benchmarks.spark", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
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
