"""Take the rows above given times out of a log table, as it goes back to what it had then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from ...runtime.tables.table_store import TableLocation
from .delta_files import write_parquet


def rows_upto(
    location: TableLocation,
    table: DeltaTable,
    schema: pa.Schema,
    ends: Mapping[str, int],
    statistics: Sequence[str],
) -> list[AddAction | RemoveAction]:
    """Write each file of the snapshot that has rows of a vchannel above its time in `ends` without these; returns the
    actions that put the new files in the place of the others. Holds the rows of one file in memory."""
    files = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", "max._ts"]).to_pylist()
    now_ms = time.time_ns() // 1_000_000
    actions: list[AddAction | RemoveAction] = []
    for file in files:
        if file["max._ts"] <= min(ends.values()):
            continue
        with location.open(file["path"]) as stored:
            rows = pq.read_table(stored, page_checksum_verification=True).cast(schema)
        left = rows
        for vchannel, end in ends.items():
            left = left.filter((pc.field("_vchannel") != vchannel) | (pc.field("_ts") <= end))
        if left.num_rows < rows.num_rows:
            actions.append(RemoveAction(file["path"], True, now_ms, file["size_bytes"], {}))
            if left.num_rows:
                actions.append(write_parquet(location, left, statistics=statistics))
    return actions
