"""Sum up a table's rows so that two readers can compare what they hold without agreeing on an order.

Each row becomes a 64-bit hash over all its user columns; the checksum is the sum of those modulo 2^64. A row more,
less, twice or changed anywhere gives another sum (but for one chance in 2^64); another order of rows or columns gives
the same one.
Needs numpy, pyarrow and xxhash only, so that an expectation can use it without anything else of Tidewal.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

Hashes: TypeAlias = npt.NDArray[np.uint64]
Column: TypeAlias = Any  # an array of pyarrow, whose stubs know too little of it


def checksum(table: pa.Table) -> int:
    """Return the order-free checksum of `table`, 0 when it has no rows; what `row_hashes` says of columns holds."""
    return int(row_hashes(table).sum(dtype=np.uint64))


def row_hashes(table: pa.Table) -> Hashes:
    """Hash each row over its columns in the order of their names; the log's own (`_ts`, `_op`) are left out.

    Values count, not how a reader stores them: integers of any width are 64 bits, floats are doubles, timestamps are
    microseconds since the epoch (naive ones are taken as UTC), strings are UTF-8. Null differs from every value, 0 and
    the empty string included. NaN is null, because pandas knows no other null among doubles and a collection holds no
    NaN. Raises TypeError for a column of another type.
    """
    hashes = np.zeros(table.num_rows, dtype=np.uint64)
    for name in sorted(table.column_names):
        if name.startswith("_"):
            continue
        column: Column = table.column(name).combine_chunks()
        seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
        values = _mix(_bits(name, column) + seed)
        absent = np.asarray(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False), dtype=bool)
        values[absent] = _mix(~np.atleast_1d(seed))[0]
        hashes = _mix(hashes ^ values)
    return hashes


def _bits(name: str, column: Column) -> Hashes:
    """The canonical 64 bits of each value; what stands where the column is null means nothing."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), dtype=np.uint64)
    if pa.types.is_timestamp(kind):
        integers = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        integers = column.cast(pa.int64())
    elif pa.types.is_floating(kind):
        doubles = np.asarray(column.cast(pa.float64()).fill_null(0.0).to_numpy(), dtype=np.float64)
        return (doubles + 0.0).view(np.uint64)  # adding 0.0 makes -0.0 and 0.0, which are equal, the same bits
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _text_bits(column)
    else:
        raise TypeError(f"column {name!r} of type {kind} has no canonical form for a checksum")
    return np.asarray(integers.fill_null(0).to_numpy(), dtype=np.int64).view(np.uint64)


def _text_bits(column: Column) -> Hashes:
    """The hash of each string; a string that occurs often is hashed once."""
    encoded = column.cast(pa.large_string()).dictionary_encode()
    distinct = cast("list[bytes]", encoded.dictionary.cast(pa.large_binary()).to_pylist())
    # One more than the distinct strings, for the nulls of a column that holds nothing else.
    hashes = np.zeros(len(distinct) + 1, dtype=np.uint64)
    hashes[:-1] = np.fromiter(map(xxhash.xxh3_64_intdigest, distinct), dtype=np.uint64, count=len(distinct))
    return hashes[np.asarray(encoded.indices.fill_null(len(distinct)).to_numpy())]


def _mix(words: Hashes) -> Hashes:
    """Spread every bit of each word over all 64 (the finalizer of SplitMix64); arithmetic wraps modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
