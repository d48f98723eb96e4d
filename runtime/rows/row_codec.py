"""Row bodies: one Arrow record batch, written as an IPC message without its schema (records name the schema by
version). Reading shares the record's memory: the same columns flow without a copy from Proxy to Spark.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ..arguments import checked
from ..errors import BadRecord, InvalidRows
from ..log.wal import Payload

_ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, struct.error)

_CONTINUED = 0xFFFFFFFF  # before the length of a header, since Arrow 0.15
_U16, _I32, _U32 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")


@checked
def encode_rows(batch: pa.RecordBatch) -> memoryview:
    """The body of `batch`, without its schema."""
    return memoryview(batch.serialize())


@checked
def decode_rows(body: Payload, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """The record batch in `body`, its buffers views into it; with `columns` those only. Raises `BadRecord` unless every
    offset, length and string in it is sound: bytes that Arrow decodes may still crash it later (measured: 6 % of random
    damage). Columns that are left out are not checked. A body that does not lie at a multiple of 8 bytes, as in a
    block read from a file, is copied. A compressed body is refused unread: `encode_rows` writes none, and 31 KB of it
    may be 1 GB."""
    try:
        batch = _unchecked(body, schema)
        if columns is not None:
            batch = batch.select(columns)
        batch.validate(full=True)
    except _ARROW_ERRORS as error:
        raise BadRecord(f"unreadable rows: {error}", reason="rows") from error
    return batch


def is_compact(body: Payload, rows: pa.RecordBatch) -> bool:
    """Whether `body`, of which `rows` are decoded, is no larger than what `encode_rows` makes of them. Columns keep all
    of the body they lie in, so a reader's memory would not be bounded by the size of its rows otherwise."""
    return len(body) <= pa.ipc.get_record_batch_size(rows)


def count_rows(body: Payload, schema: pa.Schema) -> int:
    """How many rows `decode_rows` would return, from the head of `body` alone. Raises `BadRecord`."""
    try:
        return _unchecked(body, schema).num_rows
    except _ARROW_ERRORS as error:
        raise BadRecord(f"unreadable rows: {error}", reason="rows") from error


def _unchecked(body: Payload, schema: pa.Schema) -> pa.RecordBatch:
    buffer = pa.py_buffer(body)
    if buffer.address % 8:
        buffer = pa.py_buffer(bytes(body))
    if _is_compressed(memoryview(buffer)):
        raise ValueError("compressed")
    return pa.ipc.read_record_batch(buffer, schema)


def _is_compressed(message: memoryview) -> bool:
    """Whether a record batch is compressed, from its header, a flatbuffer (format/Message.fbs): pyarrow finds it out
    only by unpacking. A header that is not sound is refused here or by Arrow, which checks the same offsets."""
    begin = 8 if _U32.unpack_from(message)[0] == _CONTINUED else 4
    table = begin + _U32.unpack_from(message, begin)[0]
    at = table + _field(message, table, 2)  # header
    batch = at + _U32.unpack_from(message, at)[0]
    return _field(message, batch, 3) != 0  # compression


def _field(message: memoryview, table: int, number: int) -> int:
    """How far behind the beginning of a table its field lies, 0 where it has none."""
    fields = table - _I32.unpack_from(message, table)[0]
    slot = 4 + 2 * number
    return _U16.unpack_from(message, fields + slot)[0] if slot < _U16.unpack_from(message, fields)[0] else 0


def vectors(lists: pa.Array[Any], dim: int) -> pa.Array[Any]:
    """Lists of numbers as vectors of `dim` floats; a list may be null. Arrow's own cast reads behind the numbers where
    lists are null (seen to crash in 26.0). Raises `InvalidRows` for lists that do not have `dim` numbers each."""
    numbers = cast(Any, lists).flatten()
    given = lists.is_valid().to_numpy(zero_copy_only=False)
    if numbers.null_count or len(numbers) != np.count_nonzero(given) * dim:
        raise InvalidRows(f"a vector has not {dim} numbers, or null among them")
    values = np.zeros((len(lists), dim), np.float32)
    values[given] = numbers.to_numpy().reshape(-1, dim)
    return cast(Any, pa.FixedSizeListArray).from_arrays(pa.array(values.ravel()), dim, mask=pa.array(~given))
