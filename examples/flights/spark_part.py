"""Spark's part: a windowed aggregation over the stream, and a batch read, both through the log's owner.

Everything here blocks and belongs on a thread of its own: the node must go on serving, for Spark reads through it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tidewal import errors
from tidewal.spark_bridge import latest, session

from .flights import COLLECTION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ROWS_PER_MICRO_BATCH = 250_000
WINDOW_COLUMNS = ["origin", "hour", "departures", "mean_dep_delay"]
WINDOW_SCHEMA = pa.schema(
    [
        ("origin", pa.string()),
        ("hour", pa.timestamp("us", "UTC")),
        ("departures", pa.int64()),
        ("mean_dep_delay", pa.float64()),
    ]
)


class Stopped(Exception):
    """`SparkPart.stop` was called, and Spark has stopped."""


@dataclass(frozen=True, slots=True)
class SparkResult:
    """What Spark saw up to the cut: row versions by `_op`, current rows, and the windows of its stream.

    `micro_batches` of this run, and how long the three parts took.
    """

    versions: dict[str, int]
    current: pa.Table
    windows: pa.Table
    micro_batches: int
    start_s: float
    stream_s: float
    batch_s: float


class SparkPart:
    """Spark with everything it keeps in `directory`: the checkpoint from which it goes on, results, scratch, its log.

    `run` blocks; `stop` may be called from any thread and makes it end with `Stopped`.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._options = {"wal": url, "collection": COLLECTION}
        self._spark: SparkSession | None = None
        self._query: StreamingQuery | None = None
        self._stopping = threading.Event()
        self.log = directory / "spark.log"

    def run(self, upto: int) -> SparkResult:
        """Read everything up to the stored cut `upto`. Raises `Stopped`, and `Unavailable` when Spark fails."""
        (self._directory / "windows").mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            with _errors_into(self.log):
                self._spark = self._start()
            ready = time.perf_counter()
            batches = self._stream()
            streamed = time.perf_counter()
            versions, current = self._read(upto)
            ended = time.perf_counter()
        except Exception as error:
            if self._stopping.is_set():
                raise Stopped from None
            raise errors.Unavailable(f"Spark failed: {_first_line(error)}; more in {self.log}") from error
        finally:
            if self._spark is not None:
                self._spark.stop()
        return SparkResult(
            versions, current, self.windows(), batches, ready - started, streamed - ready, ended - streamed
        )

    def stop(self) -> None:
        """End the work in progress."""
        self._stopping.set()
        spark, query = self._spark, self._query
        if query is not None:
            query.stop()
        if spark is not None:
            spark.sparkContext.cancelAllJobs()

    def _start(self) -> SparkSession:
        return session(
            "tidewal demo",
            **{
                "spark.local.dir": str(self._directory / "local"),
                "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
            },
        )

    def _check(self) -> SparkSession:
        if self._stopping.is_set():
            raise Stopped
        assert self._spark is not None
        return self._spark

    # ---- the stream -------------------------------------------------------------------------------------------------

    def _stream(self) -> int:
        """Aggregate what the stream has beyond the checkpoint; returns the number of micro-batches.

        Each departure is later in event time than those in earlier micro-batches, because the events were written in
        the order of event time and a micro-batch is an interval of the log. So a watermark without any delay is right:
        it never falls, and no row comes behind it.
        """
        stream = self._check().readStream.format("tidewal").options(**self._options)
        stream = stream.option("startingOffsets", "earliest").option("maxRowsPerTrigger", str(ROWS_PER_MICRO_BATCH))
        query = (
            _windowed(stream.load())
            .writeStream.outputMode("update")
            .option("checkpointLocation", str(self._directory / "checkpoint"))
            .trigger(availableNow=True)
            .foreachBatch(self._keep)
            .start()
        )
        self._query = query
        if self._stopping.is_set():
            query.stop()
        query.awaitTermination()
        self._query = None
        self._check()
        return sum(1 for each in query.recentProgress if each["numInputRows"])

    def _keep(self, frame: DataFrame, number: int) -> None:
        """Store the windows that a micro-batch has changed. A micro-batch that is repeated after a crash replaces its
        own file, so each counts once."""
        table = frame.toArrow().select(WINDOW_COLUMNS).cast(WINDOW_SCHEMA)
        path = self._directory / "windows" / f"{number:08}.parquet"
        pq.write_table(table, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def windows(self) -> pa.Table:
        """The newest state of each window, over all micro-batches so far."""
        tables = [pq.read_table(path) for path in sorted((self._directory / "windows").glob("*.parquet"))]
        newest: dict[tuple[str, object], dict[str, object]] = {}
        for table in tables:
            newest |= {(row["origin"], row["hour"]): row for row in table.to_pylist()}
        rows = pa.Table.from_pylist(list(newest.values()), WINDOW_SCHEMA)
        return rows.sort_by([("origin", "ascending"), ("hour", "ascending")])

    # ---- the batch --------------------------------------------------------------------------------------------------

    def _read(self, upto: int) -> tuple[dict[str, int], pa.Table]:
        """Row versions by operation, and the current rows, as of the cut."""
        reader = self._check().read.format("tidewal").options(**self._options)
        frame = reader.option("endingOffsets", str(upto)).load()
        counted = frame.groupBy("_op").count().collect()
        self._check()
        current = latest(frame).toArrow()
        return {row["_op"]: row["count"] for row in counted}, current


def _windowed(events: DataFrame) -> DataFrame:
    """Departures and their mean delay, by origin and hour of event time."""
    from pyspark.sql import functions as F

    departures = events.where((F.col("_op") == "upsert") & (F.col("status") == "departed"))
    hours = F.window("event_time", "1 hour")
    means = (
        departures.withWatermark("event_time", "0 seconds")
        .groupBy("origin", hours)
        .agg(F.count("*").alias("departures"), F.avg("dep_delay").alias("mean_dep_delay"))
    )
    return means.select("origin", F.col("window.start").alias("hour"), "departures", "mean_dep_delay")


@contextmanager
def _errors_into(log: Path) -> Generator[None]:
    """Make a file the standard error, which Java inherits: it writes there until it ends."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(cast(Any, error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
