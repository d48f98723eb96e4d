"""What QueryNodes ask each other: a question about some vchannels of a collection, as of one time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgpack
import pyarrow as pa
import pyarrow.compute as pc

from ...runtime.errors import BadRecord
from ...runtime.log.record import DECODE_ERRORS
from ...runtime.log.wal import Payload
from ...runtime.replicated.records import typed
from ...runtime.rows.schema import CollectionSchema, Op
from .merging import merged, part_of
from .query import Request, from_wire, run
from .row_store import RowStore
from .view import ShardView

ROWS_COLUMN = "rows"
OPS = tuple(op.name.lower() for op in Op)


@dataclass(frozen=True, slots=True)
class GetRequest:
    """The rows of these keys. `columns` of None are all."""

    keys: Sequence[object]
    columns: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """How many row versions were applied, by operation, and how many rows there are: one row with a column for each
    operation, and `rows`. Versions are those that were applied when it is answered."""


AnyRequest: TypeAlias = Request | GetRequest | StatsRequest


def packed(asked: AnyRequest) -> bytes:
    """The wire form."""
    match asked:
        case GetRequest(keys, columns):
            wire: object = {"kind": "get", "keys": list(keys), "columns": columns and list(columns)}
        case StatsRequest():
            wire = {"kind": "stats"}
        case _:
            wire = asked.to_wire()
    return cast(bytes, msgpack.packb(wire))


def unpacked(body: Payload) -> AnyRequest:
    """The question of a wire form. Raises `BadRecord`."""
    try:
        wire = cast("dict[str, Any]", msgpack.unpackb(body))
        if wire["kind"] == "get":
            columns: list[Any] | None = wire["columns"]
            keys = cast("list[object]", typed(wire["keys"], list))
            return GetRequest(keys, columns and [typed(name, str) for name in columns])
        return StatsRequest() if wire["kind"] == "stats" else from_wire(wire)
    except (*DECODE_ERRORS, LookupError, AttributeError) as error:
        raise BadRecord(f"a question that cannot be read: {error!r}", reason="request") from error


def question_of(asked: AnyRequest, schema: CollectionSchema) -> AnyRequest:
    """What each vchannel is to be asked. Raises `InvalidRequest` for a column that is not there."""
    return asked if isinstance(asked, GetRequest | StatsRequest) else part_of(asked, schema)


def run_each(views: Mapping[str, ShardView], asked: Request) -> dict[str, pa.Table]:
    """The result for each vchannel. Callable from any thread on snapshots."""
    return {vchannel: run([view], asked) for vchannel, view in views.items()}


def looked_up(stores: Mapping[str, RowStore], asked: GetRequest | StatsRequest, at: int | None) -> dict[str, pa.Table]:
    """The result for each vchannel, at once."""
    if isinstance(asked, GetRequest):
        return {vchannel: store.get(asked.keys, asked.columns, at) for vchannel, store in stores.items()}
    counts = {name: {**store.versions, ROWS_COLUMN: store.view(at).count()} for name, store in stores.items()}
    return {name: pa.table({op: pa.array([n], pa.int64()) for op, n in each.items()}) for name, each in counts.items()}


def merged_answers(asked: AnyRequest, schema: CollectionSchema, parts: Sequence[pa.Table]) -> pa.Table:
    """The result over all rows, from those of all vchannels."""
    if isinstance(asked, GetRequest):
        return pa.concat_tables(parts)
    if isinstance(asked, StatsRequest):
        found = pa.concat_tables(parts)
        return pa.table({name: [pc.sum(found.column(name)).as_py()] for name in (*OPS, ROWS_COLUMN)})
    return merged(asked, schema, parts)


# ---- results on the wire --------------------------------------------------------------------------------------------


def encoded_table(table: pa.Table) -> memoryview:
    """A table as a stream of Arrow's."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def encoded_tables(tables: Mapping[str, pa.Table]) -> tuple[dict[str, int], bytes]:
    """The tables one behind the other, and how many bytes each has."""
    bodies = {name: encoded_table(table) for name, table in tables.items()}
    return {name: len(body) for name, body in bodies.items()}, b"".join(bodies.values())


def decoded_tables(sizes: Mapping[str, int], body: memoryview) -> dict[str, pa.Table]:
    """What `encoded_tables` has encoded."""
    found: dict[str, pa.Table] = {}
    start = 0
    for name, size in sizes.items():
        with pa.ipc.open_stream(pa.py_buffer(body[start : start + size])) as reader:
            found[name] = reader.read_all()
        start += size
    return found
