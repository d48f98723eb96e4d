"""Proxy: the door. It validates rows, routes them to the shards of their collection, and owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from weakref import WeakValueDictionary

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import (
    CollectionNotFound,
    InvalidRows,
    Overloaded,
    TidewalError,
)
from ...runtime.ownership import Appended
from ...runtime.rows.row_codec import decode_rows
from ...runtime.rpc.protocol import Params
from ...runtime.rpc.server import Request
from ..collection_reader import FOREIGN_TABLES
from ..local_owner import WritePart
from ..node import Node
from ..requests import Answer, Method, Nothing, OfCollection
from ..role import Role
from ..rows import check_values
from .client_order import ClientOrder
from .metrics import ProxyMetrics
from .requests import WriteParams
from .sharded_rows import ShardedRows
from .write_lines import WriteLines

DEADLINE_S = 30.0  # of a client that names none


class Proxy(Role):
    """Where clients write.

    A write is one batch: its rows go to their shards, and are acknowledged when they are durable. At one owner they get
    one timestamp, in one commit of the log. Requests are handed to the StreamingNodes that own the channels, in the
    order of their arrival; while a channel is not open they are held. What an owner leaves undecided as it ends is
    handed to the next.
    """

    role = "proxy"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._metrics = ProxyMetrics(node.metrics)
        limit_bytes = node.settings.streaming_node.max_inflight_bytes
        self._describing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by producer
        self._order = ClientOrder(node.clock.clock, limit_bytes)
        self._lines = WriteLines(self.owners, limit_bytes, while_waiting=self.set_aside)

    def handlers(self) -> dict[str, Method]:
        return {
            "write": Method(self._write, WriteParams),
            "flush": Method(self._flush, OfCollection),
            "ready": Method(self._ready, Nothing),
        }

    def due(self, request: Request) -> Sequence[Request]:
        if request.method != "write":
            return [request]
        if self.doubtful:  # the client may have given up by now, and have its next writes from another door
            request.ignore()
            return []
        return self._order.take(request)

    async def prepare(self) -> None:
        for collection in self.catalog.catalog.collections.values():
            self._metrics.watch(collection)
        self.spawn_task(self.owners.run(), name="owners")
        self.spawn_task(self._lines.run(), name="write lines")

    async def _ready(self, _: Request) -> Answer:
        """Reply once the channels of all collections are open."""
        await self.owners.until_all_open()
        return None

    async def _flush(self, request: Request) -> Answer:
        """Have all stored that was acknowledged before this."""
        return {"ts": await self.owners.flush(await self._find(request.params["collection"]))}

    # ---- writes -----------------------------------------------------------------------------------------------------

    async def _write(self, request: Request) -> Answer:
        started = perf_counter()
        try:
            appended = await self._append(request)
        except TidewalError as error:
            self._metrics.answered((perf_counter() - started) * 1000, error)
            raise
        self._metrics.answered((perf_counter() - started) * 1000, None)
        return {"ts": appended.ts, "rows": appended.rows, "digest": appended.digest}

    async def _append(self, request: Request) -> Appended:
        if self.node.settings.quota_and_limits.limit_writing.force_deny:
            key = "quotaAndLimits.limitWriting.forceDeny"
            raise Overloaded(f"all writes are refused, because {key} is set", limit=key)
        params, size = request.params, len(request.body)
        async with self._describing.setdefault(params["producer"], asyncio.Lock()):  # its writes go on in their order
            collection = await self._find_described(params)
        self._check_tables(collection)
        schema = collection.schema
        rows = decode_rows(request.body, schema.row_arrow())
        check_values(rows, schema)
        batch = ShardedRows(collection, rows, request.body)
        deadline_s = params.get("deadline_s", DEADLINE_S)
        send = partial(self._send, batch, params, asyncio.get_running_loop().time() + deadline_s)
        appended = await self._lines.write(params["producer"], batch.channels, size, send, deadline_s=deadline_s)
        if not appended.repeated:
            self._metrics.written(collection, batch.records)
        return appended

    def _send(self, batch: ShardedRows, params: Params, deadline: float) -> asyncio.Future[Appended]:
        """Hand a batch to the owners of its channels, which are open; they take it until the loop's time `deadline`."""
        collection = batch.collection
        part = WritePart(
            collection.name,
            collection.id,
            collection.schema.version,
            batch.split(self.owners.message_bytes()),
            params["producer"],
            params["pseq"],
            batch.rows.num_rows,
            params.get("digest", 0),
            len(batch.channels),
        )
        left_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
        return self.owners.append(part, batch.channels, deadline_s=left_s)

    async def _find(self, name: str) -> Collection:
        """The collection `name`, after catching up where the catalog read so far does not have it. Raises
        `CollectionNotFound`."""
        try:
            return self.catalog.catalog.collection(name)
        except CollectionNotFound:
            return (await self.catalog.catch_up()).collection(name)

    async def _find_described(self, params: Params) -> Collection:
        """The collection that a client has described and writes to. Raises `CollectionNotFound`, and `InvalidRows`
        where the client knows another one of that name, or another version of it."""
        name, described = params["collection"], (params["id"], params["schema_version"])
        collection = await self._find(name)
        if (collection.id, collection.schema.version) != described:
            collection = (await self.catalog.catch_up()).collection(name)  # this door may be the one that is behind
        if (collection.id, collection.schema.version) != described:
            raise InvalidRows(f"the rows are of another {name}, or of another version; describe it again")
        return collection

    def _check_tables(self, collection: Collection) -> None:
        """Refuse rows that no table will ever take, as far as the DataNode of this process knows. Damage does not
        refuse them: until it is repaired, they are in the log."""
        error = self.node.unreadable.get(("datanode", collection.name))
        if isinstance(error, FOREIGN_TABLES):
            raise error
