"""A Spark query that copies the collection `numbers` into a topic: python -m tests.torture.spark_copy URL FOLDER"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from pyspark.sql import functions as F

from tidewal.cli.kills.checked_client import NUMBERS
from tidewal.spark_bridge import session

from .inside import COPIES

AWAY_S = "30s"  # how long a write waits for a node that is gone


def main(url: str, folder: str) -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    home = Path(folder)
    spark = session(
        "torture",
        master="local[2]",
        **{"spark.local.dir": str(home / "local"), "spark.sql.warehouse.dir": str(home / "warehouse")},
    )
    spark.sparkContext.setLogLevel("ERROR")
    numbers = spark.readStream.format("tidewal").options(wal=url, collection=NUMBERS.name, startingOffsets="earliest")
    ids = numbers.load().select(F.col("id").cast("string").alias("value"))
    writer = ids.writeStream.format("tidewal").options(wal=url, topic=COPIES, deadline=AWAY_S)
    query = writer.option("checkpointLocation", str(home / "checkpoint")).trigger(processingTime="1 second").start()
    print("ready", file=sys.stderr, flush=True)
    query.awaitTermination()


def _end_with_stdin() -> None:
    for line in sys.stdin:
        if line.strip() == "stop":
            break
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
