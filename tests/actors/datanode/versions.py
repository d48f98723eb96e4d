"""Row versions for the tests of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from tidewal.actors.datanode.current_table import CurrentTable
from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.streams.messages import Position

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("embedding", pa.list_(pa.float32(), 4)),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)
KEY = "id"
V0, V1 = "ch_0_7v0", "ch_1_7v1"


def versions(
    stamps: Sequence[int],
    *,
    keys: Sequence[int] | None = None,
    ops: Sequence[str] | None = None,
    vchannel: str = V0,
    names: Sequence[str | None] | None = None,
) -> pa.Table:
    """One row version per timestamp; the key is the timestamp unless `keys` says otherwise."""
    count = len(stamps)
    keys = list(stamps) if keys is None else keys
    ops = ["insert"] * count if ops is None else ops
    gone = [op == "delete" for op in ops]
    names = [f"row {ts}" for ts in stamps] if names is None else names
    moment = datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=UTC)
    return pa.table(
        {
            "id": pa.array(keys, pa.int64()),
            "name": pa.array([None if dead else name for dead, name in zip(gone, names, strict=True)], pa.string()),
            "embedding": pa.array(
                [None if dead else [ts, 0.5, -1.0, 2.0] for dead, ts in zip(gone, stamps, strict=True)],
                pa.list_(pa.float32(), 4),
            ),
            "at": pa.array([None if dead else moment for dead in gone], pa.timestamp("us", tz="UTC")),
            "_ts": pa.array(stamps, pa.int64()),
            "_op": pa.array(ops, pa.string()),
            "_vchannel": pa.array([vchannel] * count, pa.string()),
            "_term": pa.array([1] * count, pa.int64()),
            "_cseq": pa.array(stamps, pa.int64()),
            "_row": pa.array([0] * count, pa.int32()),
        }
    )


def position(t: int) -> Position:
    return Position("ch_0", b"\x00\xff" + t.to_bytes(8), term=1, cseq=t, timestamp=t, wal="rocksmq")


def folder_of(table: LogTable | CurrentTable) -> Path:
    """The folder in which a table lies."""
    return Path(table.location.uri)
