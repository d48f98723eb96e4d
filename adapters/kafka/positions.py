"""Ids and timestamps of entries as Kafka keeps them.

An id is the channel's incarnation (where its creation is recorded in the catalog) and the offset of the record, so that
a channel that is dropped and created again never uses an id twice.

A record's native timestamp is the physical part of the entry's, and what that leaves out is in the header `ts`. An
entry that was not stamped lately gets the time of the append instead: Kafka's retention goes by native timestamps and
would remove it at once. So the native one is never below the physical part, and seeking by time may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ...runtime.clock import LOGICAL_BITS
from ...runtime.groups.positions import just_before

ID_BYTES = 16
HALF_BYTES = ID_BYTES // 2
HEADER = "ts"
STAMP_BYTES = 8
FRESH_MS = 3600 * 1000  # older stamps do not become native timestamps

Headers: TypeAlias = list[tuple[str, bytes | None]]
Row: TypeAlias = tuple[int | None, bytes | None, bytes | None, Headers]
"""A record: native timestamp in ms (None: now), key, value and headers."""


def prefix(incarnation: int) -> bytes:
    """The prefix of all ids of a channel. Never zero, so that a position exists before the first id of all."""
    return (incarnation + 1).to_bytes(HALF_BYTES, "big")


def before_all(prefix: bytes) -> bytes:
    """The last id before all ids with this prefix: the position of a reader that has read nothing yet."""
    return just_before(prefix + bytes(HALF_BYTES))


def offset_of(id: bytes, of: bytes) -> int | None:
    """The offset in an id of the channel whose ids begin with `of`; None for an id of another channel."""
    if len(id) != ID_BYTES or not id.startswith(of):
        return None
    return int.from_bytes(id[HALF_BYTES:], "big")


def to_rows(timestamps: Iterable[int], payloads: Iterable[bytes], now_ms: int) -> list[Row]:
    """The records of entries; `now_ms` is the time of the append."""
    rows: list[Row] = []
    oldest_ms = now_ms - FRESH_MS
    for timestamp, payload in zip(timestamps, payloads, strict=True):
        native_ms = timestamp >> LOGICAL_BITS
        if native_ms < oldest_ms:
            native_ms = now_ms
        if native_ms << LOGICAL_BITS == timestamp:
            rows.append((native_ms, None, payload, []))
        else:
            rows.append((native_ms, None, payload, [(HEADER, timestamp.to_bytes(STAMP_BYTES, "big"))]))
    return rows


def from_native(native_ms: int, headers: Iterable[tuple[str, bytes | None]]) -> int:
    """The timestamp of a record, also of one that another program than Tidewal wrote."""
    for name, value in headers:
        if name == HEADER and value is not None and len(value) == STAMP_BYTES:
            return int.from_bytes(value, "big")
    return max(native_ms, 0) << LOGICAL_BITS
