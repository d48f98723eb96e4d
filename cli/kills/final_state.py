"""What there is at the end of a run: by strong reads, and in the tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...actors.client import Client
from ...runtime.tables.table_store import CURRENT, LOG, TableLocation, TableStore
from ...runtime.testing.histories.client_history import ClientCall
from .checked_client import NUMBERS, ROWS_PER_CLIENT, THINGS, TRANSACTED_FROM, read_keys

READ_S = 60.0
LOG_ORDER = ("_vchannel", "_ts", "_cseq", "_row")


@dataclass(frozen=True, slots=True)
class FinalState:
    """`reads` are strong reads of each client's keys; `ids` are the numbers that a strong read has, `stored_ids` those
    of their table's versions and `present_ids` those of the compacted one. `stored_ts` has the timestamps of stored
    numbers. `number_order` and `stored_versions` are in the order of each shard's log: a client in a shard and its
    number; a key and its version. `disagreements` says where counts differ."""

    reads: list[ClientCall]
    ids: list[int]
    stored_ids: list[int]
    present_ids: list[int]
    stored_ts: dict[int, int]
    number_order: list[tuple[str, int]]
    stored_versions: list[tuple[str, int]]
    collections: list[str]
    disagreements: list[str]


async def read_final_state(client: Client, tables: TableStore, owners: Sequence[str]) -> FinalState:
    """Read everything; nothing is written meanwhile. Raises what the client raises."""
    answer = await client.query(NUMBERS.name, columns=["id"], consistency="strong", deadline_s=READ_S)
    ids = [int(row["id"]) for row in answer.table.to_pylist()]
    counted = await client.count(NUMBERS.name, consistency="strong", deadline_s=READ_S)
    reads = [await _keys_of(client, owner) for owner in owners]
    compacted: dict[str, int] = {}
    for name in (NUMBERS.name, THINGS.name):
        await client.flush(name, deadline_s=READ_S)
        compacted[name] = (await client.compact(name, deadline_s=READ_S))["rows"]
    present = _rows(tables.table(NUMBERS.name, CURRENT), ["id"])
    numbers = _in_log_order(tables.table(NUMBERS.name, LOG), ["id"])
    things = _in_log_order(tables.table(THINGS.name, LOG), ["id", "version", "_op"])
    found = FinalState(
        reads=reads,
        ids=ids,
        stored_ids=[row["id"] for row in numbers],
        present_ids=[row["id"] for row in present],
        stored_ts={row["id"]: row["_ts"] for row in numbers},
        number_order=[(_line(owners, row["id"], row["_vchannel"]), row["id"]) for row in numbers],
        stored_versions=[(row["id"], row["version"]) for row in things if row["_op"] != "delete"],
        collections=await client.list_collections(),
        disagreements=[],
    )
    keys = sum(len(read.result["rows"]) for read in reads)
    counts = {"count": counted, "rows of a query": len(ids), "compacted": compacted[NUMBERS.name]}
    if len({*counts.values(), len(numbers)}) > 1:
        found.disagreements.append(f"{NUMBERS.name}: {counts}, versions: {len(numbers)}")
    if keys != compacted[THINGS.name]:
        found.disagreements.append(f"{THINGS.name}: a strong read has {keys} keys, compacted: {compacted[THINGS.name]}")
    return found


async def _keys_of(client: Client, owner: str) -> ClientCall:
    began = time.monotonic_ns()
    rows = await read_keys(client, owner, "strong", READ_S)
    about = {"owner": owner, "consistency": "strong"}
    return ClientCall("the end", "read", about, began, time.monotonic_ns(), "ok", {"rows": rows})


def _line(owners: Sequence[str], id: int, shard: str) -> str:
    """To which line of writes, made one after another, a number belongs."""
    owner, number = owners[id // ROWS_PER_CLIENT], id % ROWS_PER_CLIENT
    return f"{owner} in {shard}{', in transactions' if number >= TRANSACTED_FROM else ''}"


def _in_log_order(table: TableLocation, columns: list[str]) -> list[dict[str, Any]]:
    """The versions of a table, those of each shard in the order of its log."""
    return sorted(_rows(table, [*columns, *LOG_ORDER]), key=lambda row: [row[name] for name in LOG_ORDER])


def _rows(table: TableLocation, columns: list[str]) -> list[dict[str, Any]]:
    from deltalake import DeltaTable

    opened = DeltaTable(table.uri, storage_options=table.storage_options)
    return opened.to_pyarrow_table(columns=columns).to_pylist()
