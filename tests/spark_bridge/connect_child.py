"""Spark Connect, server and client of one machine: python connect_child.py URL FOLDER

Reads the collection in a batch and through a stream, and tells `batch VCHANNEL CSEQ ROW` and `stream …` for each row.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tidewal.spark_bridge.local import SETTINGS, make_source_findable


def main(url: str, folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    make_source_findable()
    builder = SparkSession.builder.remote("local[2]")
    for name, value in (
        SETTINGS | {"spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "w")}
    ).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    options = {"wal": url, "collection": "flights"}
    columns = ("_channel", "_cseq", "_row")
    for row in spark.read.format("tidewal").options(**options).load().select(*columns).collect():
        print("batch", *row, flush=True)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest").load()
    query = (
        stream.select(*columns)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "out"))
    )
    query.awaitTermination()
    for row in spark.read.parquet(str(folder / "out")).collect():
        print("stream", *row, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
