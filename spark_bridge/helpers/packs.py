"""Micro-batches as `MsgPack`s, as a reader of a `TtMsgStream` gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ...runtime.errors import InvalidRequest
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Payload
from ...runtime.streams.messages import MsgPack

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

PACK_BYTES: Final = 64 * 1024 * 1024

Handler: TypeAlias = Callable[[MsgPack, int], object]


def foreach_pack(
    frame: DataFrame, handler: Handler, *, checkpoint: str, max_bytes: int = PACK_BYTES
) -> DataStreamWriter:
    """Call `handler(pack, batch_id)` on the driver for the packs of a stream of one collection:

        def handle(pack, batch_id):
            for record in pack.messages:
                rows = decode_rows(record.body, schema)
                ...

        schema = pack_schema(frame)
        query = foreach_pack(frame, handle, checkpoint="/data/cp").trigger(processingTime="1 second").start()

    As from a `TtMsgStream`, a pack holds exactly the messages with `begin_ts < ts <= end_ts` of all channels, in the
    order (ts, channel, cseq), each pack begins where the one before has ended, also after a restart, and one without
    messages only moves time. A message is one record of the log, its body the rows of `frame` that came from it, as
    the log has them (`pack_schema`). `frame` may leave out rows and columns of the source, but `_ts`, `_op`,
    `_channel`, `_cseq` and `_row` must stay, and rows in their order: no shuffle before.

    A stream of topics works too, with `consistency=tick` and the columns `_ts`, `_channel`, `_id`, `key` and `value`,
    which is the body. What a frame does not carry is empty in a message: term, producer, tags, trace, schema version,
    and of a collection's id and key. Positions are Spark's checkpoint.

    The driver holds one pack at a time: a micro-batch of more than `max_bytes` comes in several packs, divided
    between two timestamps, so that only a timestamp with more than that makes a larger one. Beside it there are some
    20 bytes for each record of the micro-batch, whose bodies wait in Spark's storage, on disk where memory is short.
    What a micro-batch may hold is said by the source's options (`maxRowsPerTrigger`).

    Each pack is handled at least once: after a failure the micro-batch is repeated, in the same packs as long as
    `frame` and `max_bytes` are the same. Store `end_ts` with the results in one transaction, and skip packs whose
    `end_ts` is not beyond what is stored: that is exactly once. An error of the handler ends the query.

    With Spark Connect the handler is pickled and runs at the server. Raises `InvalidRequest` for a frame that is not
    a stream or lacks a column.
    """
    if not frame.isStreaming:
        raise InvalidRequest("foreach_pack takes a stream: spark.readStream, not spark.read")
    if max_bytes < 1:
        raise InvalidRequest(f"max_bytes is {max_bytes}; it must be 1 or more")
    schema = None if _is_of_topics(frame) else pack_schema(frame)
    packs = _Packs(handler, schema, checkpoint, max_bytes)
    return frame.writeStream.foreachBatch(packs).option("checkpointLocation", checkpoint)


def pack_schema(frame: DataFrame) -> pa.Schema:
    """The Arrow schema of the bodies that `foreach_pack` makes of `frame`: the columns whose names do not begin with _,
    then `_op` (an `Op`). With all columns of a collection it is the schema of its rows in the log.

    Raises `InvalidRequest` for a frame that lacks a column of the source.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    from ...runtime.rows.schema import OP_COLUMN
    from ..scan.columns import DIM_METADATA
    from .records import NEEDED

    _check_columns(frame, NEEDED)
    dims: dict[str, int] = {each.name: (each.metadata or {}).get(DIM_METADATA, 0) for each in frame.schema.fields}
    types: dict[str, pa.DataType] = {
        each.name: pa.list_(each.type.value_type, dims[each.name]) if dims[each.name] else each.type
        for each in cast("Iterable[Any]", to_arrow_schema(frame.schema, timezone="UTC"))
        if not each.name.startswith("_")
    }
    return pa.schema([*types.items(), (OP_COLUMN, pa.int8())])


def _is_of_topics(frame: DataFrame) -> bool:
    if "_id" not in frame.columns:
        return False
    _check_columns(frame, ("_ts", "_channel", "key", "value"))
    return True


def _check_columns(frame: DataFrame, needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise InvalidRequest(f"packs need the columns {', '.join(missing)} too")


class _Packs:
    """The function that Spark calls with each micro-batch."""

    def __init__(self, handler: Handler, schema: pa.Schema | None, checkpoint: str, max_bytes: int) -> None:
        self._handler = handler
        self._schema = schema
        self._checkpoint = checkpoint.rstrip("/")
        self._max_bytes = max_bytes
        self._last: tuple[int, int] | None = None  # number and end of the last micro-batch of this run

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        from pyspark.sql import functions as F

        begin, end = self._interval(frame.sparkSession, batch_id)
        records = self._records(frame).persist()
        try:
            sizes = records.select("ts", F.coalesce(F.length("body"), F.lit(0)).alias("size")).toArrow()
            for upto in _ends(sizes, begin, end, self._max_bytes):
                found = records.where((F.col("ts") > begin) & (F.col("ts") <= upto)).toArrow()
                self._handler(MsgPack(begin, upto, _messages(found)), batch_id)
                begin = upto
        finally:
            records.unpersist()
        self._last = (batch_id, end)

    def _records(self, frame: DataFrame) -> DataFrame:
        """A row for each message."""
        from pyspark.sql import functions as F

        from .records import COLUMNS, encode_records

        if self._schema is not None:
            return frame.mapInArrow(partial(encode_records, schema=self._schema), COLUMNS)
        names = {"ts": "_ts", "channel": "_channel", "id": "_id", "key": "key", "body": "value"}
        return frame.select(F.lit(0).alias("cseq"), *(F.col(name).alias(alias) for alias, name in names.items()))

    def _interval(self, spark: SparkSession, batch_id: int) -> tuple[int, int]:
        """The times between which a micro-batch lies, from Spark's log of offsets: the batch may have no rows."""
        end = self._offset(spark, batch_id)
        if self._last is not None and self._last[0] == batch_id - 1:
            begin = self._last[1]
        else:
            begin = (end["from"] if "from" in end else self._offset(spark, batch_id - 1))["t"]
        return begin, end["t"]

    def _offset(self, spark: SparkSession, batch_id: int) -> dict[str, Any]:
        path = f"{self._checkpoint}/offsets/{batch_id}"
        lines = [row.value for row in spark.read.text(path).collect()]  # a version, what Spark needs, one per source
        offset: Any = json.loads(lines[2]) if len(lines) == 3 else None
        if not isinstance(offset, dict) or "t" not in offset:
            raise InvalidRequest(
                "packs are made of one stream, of a collection or of topics with consistency=tick; this query reads "
                f"{lines[2:]}"
            )
        return cast("dict[str, Any]", offset)


def _ends(sizes: pa.Table, begin: int, end: int, max_bytes: int) -> Iterator[int]:
    """The times at which packs end between `begin` and `end`, so that each holds whole timestamps and, where these
    allow it, at most `max_bytes`. Raises `InvalidRequest` for messages of other times, which no pack could hold."""
    import numpy as np

    times, places = np.unique(sizes["ts"].to_numpy(), return_inverse=True)
    if len(times) and not begin < times[0] <= times[-1] <= end:
        raise InvalidRequest(
            f"rows of {times[0]} to {times[-1]} in a micro-batch from {begin} to {end}: leave column _ts as it is"
        )
    if begin == end:
        return
    held = 0
    before: int | None = None
    for time, size in zip(times.tolist(), np.bincount(places, sizes["size"].to_numpy()).tolist(), strict=True):
        if before is not None and held + size > max_bytes:
            yield before
            held = 0
        held += size
        before = time
    yield end


def _messages(found: pa.Table) -> list[Record]:
    """The records in their order, bodies as views. Raises `InvalidRequest` when the rows of one came apart."""
    columns = [found[name].to_pylist() for name in ("ts", "channel", "cseq", "id", "key")]
    bodies = [_view(body) for chunk in found["body"].chunks for body in cast(Any, chunk)]
    messages = [
        Record(RecordType.ROWS, ts, cseq=cseq, vchannel=channel, key=key or b"", body=body, id=id or b"")
        for ts, channel, cseq, id, key, body in zip(*columns, bodies, strict=True)
    ]
    name = attrgetter("ts", "vchannel", "cseq", "id")
    messages.sort(key=name)
    if len(set(map(name, messages))) < len(messages):
        raise InvalidRequest("rows of one record lie apart: make packs before anything that shuffles")
    return messages


def _view(body: Any) -> Payload:
    return memoryview(body.as_buffer()) if body.is_valid else b""
