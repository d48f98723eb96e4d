"""A Spark driver made to be killed: python kill_driver.py URL FOLDER run|drain MASTER QUERY…

From the collection `numbers` three queries read, each on a checkpoint FOLDER/QUERY:

    sums       counts and checksums per second of log time, into Parquet files in FOLDER/out
    rows       every row, into the collection `copies`
    messages   every row, into topics

`run` goes on until it is killed, or tells `failed TEXT` and ends. `drain` ends them at the newest cut, tells `drained`,
waits for a line of input, and tells what it finds: `window MS COUNT SUM SUM` each, `rows COUNT SUM SUM`, `messages …`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from kill_facts import COPIES, MODULUS, NUMBERS, TOPICS, WINDOW_S
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tidewal.spark_bridge import session

LIMITS = {"run": "4000", "drain": "100000"}  # rows of a micro-batch
AWAY_S = "10s"  # how long a write waits for a node that is gone


def tell(*words: object) -> None:
    """Write a line in one piece and at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def checksums() -> list[Column]:
    return [F.count("id"), F.sum("id"), F.sum(F.col("id") * F.col("id") % MODULUS)]


class Queries:
    """The three queries of one session."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, max_rows: str) -> None:
        self._spark, self._url, self._folder, self._max_rows = spark, url, folder, max_rows

    def start(self, name: str, trigger: dict[str, Any]) -> Any:
        numbers = (
            self._spark.readStream.format("tidewal")
            .options(
                wal=self._url, collection=NUMBERS.name, startingOffsets="earliest", maxRowsPerTrigger=self._max_rows
            )
            .load()
        )
        writer = {"sums": self._sums, "rows": self._rows, "messages": self._messages}[name](numbers)
        return writer.option("checkpointLocation", str(self._folder / name)).trigger(**trigger).start()

    def _sums(self, numbers: DataFrame) -> Any:
        windows = numbers.withWatermark("_time", "0 seconds").groupBy(F.window("_time", f"{WINDOW_S} second"))
        sums = windows.agg(*checksums()).toDF("window", "rows", "ids", "squares")
        return sums.writeStream.outputMode("append").format("parquet").option("path", str(self._folder / "out"))

    def _rows(self, numbers: DataFrame) -> Any:
        writer = numbers.select("id").writeStream.format("tidewal")
        return writer.options(wal=self._url, collection=COPIES.name, operation="insert", deadline=AWAY_S)

    def _messages(self, numbers: DataFrame) -> Any:
        writer = numbers.select(F.col("id").cast("string").alias("value")).writeStream.format("tidewal")
        return writer.options(wal=self._url, topic=",".join(TOPICS), deadline=AWAY_S)

    def found(self, name: str) -> None:
        """Tell what a query has written."""
        if name == "sums":
            for row in self._spark.read.parquet(str(self._folder / "out")).collect():
                tell("window", int(row["window"]["start"].timestamp() * 1000), row["rows"], row["ids"], row["squares"])
            return
        where = {"collection": COPIES.name} if name == "rows" else {"topic": ",".join(TOPICS)}
        found = self._spark.read.format("tidewal").options(wal=self._url, **where).load()
        ids = (
            found.select("id")
            if name == "rows"
            else found.select(F.col("value").cast("string").cast("long").alias("id"))
        )
        tell(name, *ids.agg(*checksums()).first())


def causes(error: BaseException | None) -> Iterator[str]:
    """What Spark says of an error, and of each error behind it."""
    while error is not None:
        yield str(error)
        error = getattr(error, "_cause", None) or error.__cause__


def main(url: str, folder: Path, mode: str, master: str, names: list[str]) -> None:
    os.environ["SPARK_WORKER_DIR"] = str(folder / "workers")  # of a cluster in this process
    folders = {"spark.local.dir": str(folder / "local"), "spark.sql.warehouse.dir": str(folder / "w")}
    spark = session("kills", master=master, **folders)
    spark.sparkContext.setLogLevel("OFF")
    queries = Queries(spark, url, folder, LIMITS[mode])
    drains = mode == "drain"
    running = [
        queries.start(name, {"availableNow": True} if drains else {"processingTime": "0 seconds"}) for name in names
    ]
    tell("started")
    try:
        if not drains:
            spark.streams.awaitAnyTermination()
        for query in running:
            query.awaitTermination()
    except StreamingQueryException as error:
        tell("failed", " caused by ".join(causes(error)).replace("\n", " "))
        raise SystemExit(3) from None
    tell("drained")
    sys.stdin.readline()
    for name in names:
        queries.found(name)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
