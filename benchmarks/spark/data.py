"""What is read: collections in two channels, written as the owner of the channels would write them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from tests.spark_bridge.story import Story
from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.rows.schema import CollectionSchema, Field

T = TypeVar("T")

SHARDS = 2
DIM = 128


@dataclass(frozen=True, slots=True)
class Kind:
    """A collection: its schema as Tidewal and as Spark write it, and how many rows a record and the whole have."""

    schema: CollectionSchema
    columns: str
    record_rows: int
    rows: int


KINDS = {
    "narrow": Kind(
        CollectionSchema("narrow", (Field("ts", "timestamp"), Field("pk", "int64"), Field("value", "double")), "pk"),
        "ts timestamp, pk bigint, value double",
        record_rows=4_000,
        rows=4_000_000,
    ),
    "vec128": Kind(
        CollectionSchema("vec128", (Field("pk", "int64"), Field("vector", "float_vector", dim=DIM)), "pk"),
        "pk bigint, vector array<float>",
        record_rows=1_000,
        rows=400_000,
    ),
}


def columns_of(kind: str, rows: int) -> dict[str, pa.Array[Any]]:
    """The users' columns of `rows` rows."""
    random = np.random.default_rng(6)
    keys = pa.array(np.arange(rows))
    if kind == "narrow":
        return {"ts": keys.cast(pa.timestamp("us", "UTC")), "pk": keys, "value": pa.array(random.random(rows))}
    floats = pa.array(random.random(rows * DIM, dtype=np.float32))
    return {"pk": keys, "vector": pa.FixedSizeListArray.from_arrays(floats, DIM)}


class Writer:
    """Writes into an open log what its roles would write, from synchronous code."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Wal]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="writer")
        self._thread.start()
        self._channels: set[str] = set()
        self._wal = self._run(opening())
        self._story = Story(self._append)
        self._collection: Collection | None = None

    def fill(self, kind: str) -> None:
        """Create the collection and write its rows, the channels in turn; then a cut."""
        chosen = KINDS[kind]
        self._collection = self._story.create(schema=chosen.schema, shards=SHARDS)
        for number in range(chosen.rows // chosen.record_rows):
            self._write(kind, number % SHARDS, chosen.record_rows)
        self._story.cut(self._collection)

    def write_one_row(self, kind: str) -> None:
        """A row more in one channel, and a cut behind it."""
        assert self._collection is not None
        self._write(kind, 0, 1)
        self._story.cut(self._collection)

    def _write(self, kind: str, shard: int, rows: int) -> None:
        assert self._collection is not None
        columns = {**columns_of(kind, rows), "_op": pa.array(np.zeros(rows, np.int8))}
        batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=self._collection.schema.row_arrow())
        vchannel = self._collection.vchannels[shard]
        body = bytes(encode_rows(batch))
        self._story.record(pchannel_of(vchannel), Record(RecordType.ROWS, vchannel=vchannel, body=body))

    def _append(self, channel: str, payload: bytes, timestamp: int) -> bytes:
        if channel not in self._channels:
            self._run(self._wal.create_channel(channel, ChannelPolicy()))
            self._channels.add(channel)
        return self._run(self._wal.append(channel, payload, timestamp))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._run(self._wal.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
