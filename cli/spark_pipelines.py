"""The pipelines of `tidewal spark`: DataFrames in, DataFrames out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from ..runtime.errors import InvalidRequest
from ..spark_bridge import progress
from .spark_running import until_ended

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

ORDER = ("_ts", "_channel", "_cseq", "_row", "_id")
LAST_PROGRESS_WITHIN_S = 10.0  # the last progress comes a moment after the end


@dataclass(frozen=True, slots=True)
class Running:
    """How a pipeline that writes runs: to the present end or for ever, and what it reports meanwhile."""

    once: bool
    every: str
    metrics_port: int
    as_json: bool


def tail(spark: SparkSession, source: Mapping[str, str], *, once: bool, rows: int, as_json: bool) -> None:
    """Print micro-batches. Memory holds one partition of a micro-batch with --json, otherwise the rows that are
    shown."""
    from pyspark.sql import functions as F

    def show(frame: DataFrame, number: int) -> None:
        ordered = frame.orderBy(*(name for name in ORDER if name in frame.columns))
        texts = ordered.select(F.to_json(F.struct(*frame.columns), {"ignoreNullFields": "false"}).alias("row"))
        if as_json:
            for each in texts.toLocalIterator():
                typer.echo(each.row)
            return
        found = [each.row for each in texts.limit(rows + 1).collect()]
        typer.echo("\n".join([f"micro-batch {number}", *(f"    {row}" for row in found[:rows])]))
        if len(found) > rows:
            typer.echo("    …")

    writer = _stream(spark, source).writeStream.foreachBatch(show)
    until_ended((writer.trigger(availableNow=True) if once else writer).start())


def count(
    spark: SparkSession, source: Mapping[str, str], *, window: str, by: Sequence[str], follow: bool, as_json: bool
) -> None:
    """Print windows with their counts, in the order of time."""
    from pyspark.sql import functions as F

    frame = _stream(spark, source) if follow else spark.read.format("tidewal").options(**source).load()
    columns = list(by) or [name for name in ("_op",) if name in frame.columns]
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InvalidRequest(f"no column {missing[0]!r}; there are {', '.join(frame.columns)}")
    if follow:
        frame = frame.withWatermark("_time", "0 seconds")
    counted = frame.groupBy(F.window("_time", window), *columns).agg(F.count("*").alias("rows"))
    counts = counted.select(F.unix_millis("window.start").alias("from"), *columns, "rows")

    def show(result: DataFrame, _: int = 0) -> None:
        for row in result.orderBy("from", *columns).toLocalIterator():
            fields = row.asDict() | {"from": iso_time(row["from"])}
            typer.echo(json.dumps(fields, default=str) if as_json else "  ".join(map(str, fields.values())))

    if follow:
        until_ended(counts.writeStream.outputMode("append").foreachBatch(show).start())
    else:
        show(counts)


def iso_time(ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601, UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export(
    spark: SparkSession,
    source: Mapping[str, str],
    *,
    form: str,
    directory: str,
    checkpoint: str,
    running: Running,
) -> None:
    """Write files of `form`. The column `_watermark` stays: it identifies the rows of one micro-batch."""
    frame = _stream(spark, source)
    writer = frame.writeStream.format(form).option("path", directory).option("checkpointLocation", checkpoint)
    _run(spark, writer, running)


def copy(
    spark: SparkSession, source: Mapping[str, str], target: Mapping[str, str], *, checkpoint: str, running: Running
) -> None:
    """Write into another collection or topic, exactly once by the checkpoint's query."""
    frame = _stream(spark, source)
    if "topic" in target and "value" not in frame.columns:
        frame = _as_messages(frame)
    writer = frame.writeStream.format("tidewal").options(**target).option("checkpointLocation", checkpoint)
    _run(spark, writer, running)


def _as_messages(frame: DataFrame) -> DataFrame:
    """Rows of a collection as messages: the key as text, and the row with its `_op` as JSON."""
    from pyspark.sql import functions as F

    from ..spark_bridge.scan.columns import KEY_METADATA

    key = next(field.name for field in frame.schema.fields if (field.metadata or {}).get(KEY_METADATA))
    own = [name for name in frame.columns if not name.startswith("_")]
    return frame.select(F.col(key).cast("string").alias("key"), F.to_json(F.struct(*own, "_op")).alias("value"))


def _stream(spark: SparkSession, source: Mapping[str, str]) -> DataFrame:
    return spark.readStream.format("tidewal").options(**source).load()


def _run(spark: SparkSession, writer: DataStreamWriter, running: Running) -> None:
    """Start a query, report its micro-batches as they end, and wait until the query has ended."""
    from .spark_report import ProgressPrinter

    writer = writer.trigger(availableNow=True) if running.once else writer.trigger(processingTime=running.every)
    report = ProgressPrinter(as_json=running.as_json)
    spark.streams.addListener(report)
    try:
        with ExitStack() as stack:
            if running.metrics_port:
                stack.enter_context(progress(spark, port=running.metrics_port))
            query = writer.start()
            try:
                until_ended(query)
            except typer.Exit:  # it was told to stop; one that fails has no totals
                report.sum_up(LAST_PROGRESS_WITHIN_S)
                raise
            report.sum_up(LAST_PROGRESS_WITHIN_S)
    finally:
        spark.streams.removeListener(report)
