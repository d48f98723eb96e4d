"""The same from Kafka, beside Spark's own connector on the same topics.

`connector` is what it hands out, the records as bytes; `decoded` is the same rows as ours, made of these bytes in
Python. Our micro-batches end at a cut of all channels, the connector's at the end of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.brokers.kafka import KafkaCluster
from tidewal.runtime.log.record import RecordType, decode
from tidewal.runtime.rows.row_codec import decode_rows

from .data import KINDS
from .owner import Owner
from .reading import beside_others
from .triggers import KIND, beside_first

ROUNDS = 3
TRIGGER_ROUNDS = 3
RECORDS_A_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"


def measure(spark: Any, directory: str) -> None:
    """Raises `Missing` where no broker can be started."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch, KafkaCluster(Path(scratch)) as cluster:
        for kind in KINDS:
            with Owner(f"{cluster.url}/{kind}", kind) as owner:
                read(spark, cluster.bootstrap, kind, owner)
                if kind == KIND:
                    trigger(spark, directory, cluster.bootstrap, owner)


def read(spark: Any, bootstrap: str, kind: str, owner: Owner) -> None:
    others: dict[str, Any] = {}
    if has_connector(spark):
        connector = of_topics(spark.read, bootstrap, kind).load().select("value")
        spark.conf.set(RECORDS_A_BATCH, "16")  # a record is a batch of rows
        others = {"connector": connector, "decoded": connector.mapInArrow(Decoder(kind), KINDS[kind].columns)}
    beside_others(spark, f"spark.kafka.read.{kind}", kind, owner.options, ROUNDS, others)


def trigger(spark: Any, directory: str, bootstrap: str, owner: Owner) -> None:
    ours = spark.readStream.format("tidewal").options(**owner.options, startingOffsets="latest")
    frames = {"tidewal": ours.schema(KINDS[KIND].columns).load()}
    if has_connector(spark):
        frames = {"connector": of_topics(spark.readStream, bootstrap, KIND).load(), **frames}
    else:
        frames = {"synthetic": spark.readStream.format("synthetic").options(kind=KIND).load(), **frames}
    with owner.trickling():
        beside_first(directory, "spark.kafka.trigger_ms", frames, TRIGGER_ROUNDS)


def of_topics(reader: Any, bootstrap: str, kind: str) -> Any:
    topics = rf"{kind}\..*-rootcoord-dml_\d+\..*"
    return reader.format("kafka").options(**{"kafka.bootstrap.servers": bootstrap, "subscribePattern": topics})


def has_connector(spark: Any) -> bool:
    return "spark-sql-kafka" in spark.conf.get("spark.jars", "")


class Decoder:
    """From records to rows, in Spark's workers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = KINDS[self._kind].schema
        for batch in batches:
            for value in batch.column("value"):
                record = decode(value.as_buffer())
                if record.type is RecordType.ROWS:
                    yield in_sparks_types(decode_rows(record.body, schema.row_arrow(), schema.arrow().names))


def in_sparks_types(rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = {name: rows.column(name) for name in rows.schema.names}
    if "vector" in columns:
        columns["vector"] = columns["vector"].cast(pa.list_(pa.float32()))
    return pa.RecordBatch.from_pydict(columns)
