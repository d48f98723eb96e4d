"""The tasks' side: from a range of one pchannel to Arrow batches in Spark's types. Does not import Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...runtime.catalog.cuts import CutEnd
from ...runtime.clock import physical_ms
from ...runtime.errors import BadRecord, CorruptLog, InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Entry
from ...runtime.rows.row_codec import decode_rows
from ...runtime.rows.schema import OP_COLUMN, OPS, CollectionSchema
from ...runtime.streams.channel_reader import ChannelReader, Granted
from .columns import TIME, arrow_schema

BATCH_ROWS = 64 * 1024
BATCH_BYTES = 16 * 1024 * 1024

Array: TypeAlias = "pa.Array[Any]"

_OP_NAMES = pa.array(list(OPS))
_logger = logging.getLogger("tidewal.spark")


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """What one task reads: the entries behind `begin` up to and including `end` of one pchannel, and of their rows
    those of one collection with `begin_ts < ts <= end_ts`. Complete in itself, for it travels to another process.

    `begin_included`: the entry of `begin` itself may hold records that were not read yet (as with positions of
    streams). `end_beyond`: `end` belongs to a later time than `end_ts`, and later records are left out."""

    wal: str = field(repr=False)  # may say how to log in
    channel: str
    vchannels: tuple[str, ...]
    begin: CutEnd
    end: CutEnd
    begin_ts: int
    end_ts: int
    fences: Mapping[int, bytes]
    schema: CollectionSchema
    fail_on_data_loss: bool
    begin_included: bool = False
    end_beyond: bool = False


class Rows(NamedTuple):
    """The rows of one record."""

    record: Record
    batch: pa.RecordBatch


def read_rows(log: BlockingReader, wanted: ChannelRange, columns: Sequence[str] | None = None) -> Iterator[Rows]:
    """The records of `wanted`, decoded (with `columns` only those and `_op`), in log order.

    A record that cannot be read is skipped with a warning; the DataNode keeps it in the dead-letter channel. Raises
    `PositionLost` unless data loss is allowed, `CorruptLog` when a record before the end of the cut is later than the
    cut.
    """
    vchannels = frozenset(wanted.vchannels)
    stored = wanted.schema.row_arrow()
    needed = None if columns is None else [name for name in stored.names if name in columns or name == OP_COLUMN]
    reader = ChannelReader(
        wanted.channel,
        fences=wanted.fences,
        after=(wanted.begin.term, wanted.begin.cseq),
        on_bad=_warn,
        granted=Granted(wanted.end.term),  # every owner's record before the end is of that term or a lower one
    )
    for entries in entries_of(log, wanted):
        for record in reader.accept(entries):
            if record.type is not RecordType.ROWS or record.vchannel not in vchannels:
                continue
            if record.ts > wanted.end_ts:
                if wanted.end_beyond:
                    return  # the log is in the order of time
                raise CorruptLog(
                    f"{wanted.channel} has a record of {record.ts} before the end of the cut at {wanted.end_ts}: going "
                    "on would lose it; this is a fault of Tidewal, please report it",
                    channel=wanted.channel,
                )
            if record.ts > wanted.begin_ts:
                rows = _decoded(wanted, record, stored, needed)
                if rows is not None:
                    yield rows


def entries_of(log: BlockingReader, wanted: ChannelRange) -> Iterator[list[Entry]]:
    """The entries of `wanted`, not decoded. Raises `PositionLost` unless data loss is allowed."""
    try:
        yield from log.read(wanted.channel, wanted.begin.id or None, wanted.end.id, inclusive=wanted.begin_included)
    except PositionLost as error:
        if wanted.fail_on_data_loss:
            raise PositionLost(
                f"retention has removed rows of {wanted.channel} that were not read yet ({error.message}). Start with "
                "a new checkpoint and startingOffsets=earliest, or set failOnDataLoss=false to go on without them",
                **error.fields,
            ) from error
        _logger.warning("%s: rows are lost, going on with what there is: %s", wanted.channel, error.message)
        yield from log.read(wanted.channel, None, wanted.end.id)


def _decoded(wanted: ChannelRange, record: Record, stored: pa.Schema, columns: Sequence[str] | None) -> Rows | None:
    if record.schema_version > wanted.schema.version:
        raise InvalidRequest(
            f"the schema of {wanted.schema.name!r} has changed (version {record.schema_version}, read as "
            f"{wanted.schema.version}): restart the query"
        )
    try:
        return Rows(record, decode_rows(record.body, stored, columns))
    except BadRecord as error:
        _warn(wanted.channel, Entry(record.id, record.ts, b""), error)
        return None


def _warn(channel: str, entry: Entry, error: BadRecord) -> None:
    _logger.warning("%s: record %s is skipped: %s", channel, entry.id.hex(), error.message)


def arrow_batches(log: BlockingReader, wanted: ChannelRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `wanted` in batches of about 64 k rows or 16 MiB, since each batch costs Spark something. They begin
    with a record where one record is not more than that: a few rows left over would be a batch, too."""
    held: list[Rows] = []
    count = size = 0
    for rows in read_rows(log, wanted, columns):
        full = count + rows.batch.num_rows > BATCH_ROWS or size + len(rows.record.body) > BATCH_BYTES
        if full and count:
            yield from _joined(held, wanted, columns)
            held, count, size = [], 0, 0
        held.append(rows)
        count += rows.batch.num_rows
        size += len(rows.record.body)
    if count:
        yield from _joined(held, wanted, columns)


def _joined(held: Sequence[Rows], wanted: ChannelRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches([rows.batch for rows in held])
    arrays = [
        _spark_array(table[name]) if wanted.schema.find(name) else _system_column(name, held, table, wanted)
        for name in columns
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(wanted.schema, columns))
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def _spark_array(column: pa.ChunkedArray[Any]) -> Array:
    array: Array = column.combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        return cast(Array, array.cast(pa.list_(array.type.value_type)))
    return array


def _system_column(name: str, held: Sequence[Rows], table: pa.Table, wanted: ChannelRange) -> Array:
    counts = [rows.batch.num_rows for rows in held]

    def repeated(values: Iterable[int]) -> Array:
        return pa.array(np.repeat(np.fromiter(values, np.int64, len(held)), counts))

    match name:
        case "_ts" | "_commit_version":
            return repeated(rows.record.ts for rows in held)
        case "_time" | "_commit_timestamp":
            return cast(Array, repeated(physical_ms(rows.record.ts) * 1000 for rows in held).view(TIME))
        case "_op" | "_change_type":
            return cast(Array, _OP_NAMES.take(_spark_array(table[OP_COLUMN])))
        case "_channel":
            places = {vchannel: place for place, vchannel in enumerate(wanted.vchannels)}
            return pa.array(wanted.vchannels).take(repeated(places[rows.record.vchannel] for rows in held))
        case "_watermark":
            return pa.array(np.full(sum(counts), wanted.end_ts, np.int64))
        case "_cseq":
            return repeated(rows.record.cseq for rows in held)
        case "_row":
            return pa.array(_places_in_records(counts))
        case _:
            raise InvalidRequest(f"no column {name!r}")


def _places_in_records(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """0, 1, … for each record anew."""
    starts = np.cumsum(counts) - counts
    return (np.arange(sum(counts)) - np.repeat(starts, counts)).astype(np.int32)
