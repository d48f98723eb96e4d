"""Spark Connect, server and client of one machine: URL FOLDER ROWS are the arguments.

Reads the collection in a batch and through a stream, and tells `batch VCHANNEL CSEQ ROW` and `stream …` for each row.
Then the bridge's helpers: `pack BEGIN END MESSAGES` for each pack that the server's process has handled, what the
client was told of the query's progress once it knew of ROWS rows, and the number of rows that exist.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tidewal.spark_bridge import foreach_pack, latest, progress
from tidewal.spark_bridge.helpers.spark_session import SETTINGS, make_source_findable

COLUMNS = ("_channel", "_cseq", "_row")
DEADLINE_S = 60.0
HANGS_S = 200.0  # then it says where, and ends
POLL_S = 0.05


def session(folder: Path) -> Any:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    make_source_findable()
    builder = SparkSession.builder.remote("local[2]")
    for name, value in (
        SETTINGS | {"spark.local.dir": str(folder), "spark.sql.warehouse.dir": str(folder / "w")}
    ).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def read(spark: Any, options: dict[str, str], folder: Path) -> None:
    for row in spark.read.format("tidewal").options(**options).load().select(*COLUMNS).collect():
        print("batch", *row, flush=True)
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest").load()
    query = (
        stream.select(*COLUMNS)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "out"))
    )
    query.awaitTermination()
    for row in spark.read.parquet(str(folder / "out")).collect():
        print("stream", *row, flush=True)


def try_helpers(spark: Any, options: dict[str, str], folder: Path, rows: int) -> None:
    stream = spark.readStream.format("tidewal").options(**options, startingOffsets="earliest", maxRowsPerTrigger="20")
    told_by_handler = folder / "packs"

    def handle(pack, batch_id):
        with open(told_by_handler, "a") as file:
            file.write(f"pack {pack.begin_ts} {pack.end_ts} {len(pack.messages)}\n")

    with progress(spark) as told:
        packs = foreach_pack(stream.load(), handle, checkpoint=str(folder / "packs-checkpoint"), max_bytes=2000)
        query = packs.queryName("packs").start()
        query.processAllAvailable()
        deadline = time.monotonic() + DEADLINE_S
        while told.metrics.value("spark_input_rows_total", query_name="packs") < rows and time.monotonic() < deadline:
            time.sleep(POLL_S)  # Connect tells the client of progress when it likes
        print(
            "progress",
            *(told.metrics.value(f"spark_{name}", query_name="packs") for name in ("input_rows_total", "cut_lag_ms")),
        )
        query.stop()
    print(told_by_handler.read_text())
    print("latest", latest(spark.read.format("tidewal").options(**options).load()).count(), flush=True)


def main(url: str, folder: Path, rows: int) -> None:
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    spark = session(folder)
    options = {"wal": url, "collection": "flights"}
    read(spark, options, folder)
    try_helpers(spark, options, folder, rows)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
