"""Proxy: the door. It validates rows and messages, routes rows to the shards of their collection, and owns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias
from weakref import WeakValueDictionary

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.topics import READY, Topic
from ...runtime.delays.delayed import DelayedId
from ...runtime.errors import (
    CollectionNotFound,
    InvalidRequest,
    InvalidRows,
    Overloaded,
    TidewalError,
    TopicNotFound,
)
from ...runtime.log.wal import Payload
from ...runtime.ownership import Appended
from ...runtime.rows.row_codec import decode_rows
from ...runtime.rpc.protocol import Params
from ...runtime.rpc.server import Request
from ..collection_reader import FOREIGN_TABLES
from ..node import Node
from ..requests import Answer, Method, Nothing, OfCollection
from ..role import Role
from ..rows import check_values
from ..transactions.buffer import MESSAGES, TRANSACTIONS_LEVEL
from .client_order import ClientOrder
from .metrics import ProxyMetrics
from .partitioned_messages import Cancellation, PartitionedMessages, due_ms_of
from .position_fences import PositionFences
from .requests import CancelParams, CommitParams, FencePositionParams, SendParams, WriteParams
from .sharded_rows import ShardedRows
from .transaction_batch import TransactionBatch, parts_of
from .write_lines import WriteLines

DEADLINE_S = 30.0  # of a client that names none

WriteBatch: TypeAlias = ShardedRows | PartitionedMessages | Cancellation | TransactionBatch


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
        self._fences = PositionFences(node, self.catalog, self.rpc.name)

    def handlers(self) -> dict[str, Method]:
        return {
            "write": Method(self._write, WriteParams),
            "send": Method(self._send, SendParams),
            "cancel": Method(self._cancel, CancelParams),
            "commit": Method(self._commit, CommitParams),
            "fence_position": Method(self._fence_position, FencePositionParams),
            "flush": Method(self._flush, OfCollection),
            "ready": Method(self._ready, Nothing),
        }

    def due(self, request: Request) -> Sequence[Request]:
        if request.method not in ("write", "send", "cancel", "commit"):
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
        return await self._timed(self._append_rows(request))

    async def _send(self, request: Request) -> Answer:
        return await self._timed(self._append_messages(request))

    async def _commit(self, request: Request) -> Answer:
        return await self._timed(self._append_transaction(request))

    async def _timed(self, appending: Awaitable[Appended]) -> Answer:
        started = perf_counter()
        try:
            appended = await appending
        except TidewalError as error:
            self._metrics.answered((perf_counter() - started) * 1000, error)
            raise
        self._metrics.answered((perf_counter() - started) * 1000, None)
        return {"ts": appended.ts, "rows": appended.rows, "digest": appended.digest}

    async def _append_rows(self, request: Request) -> Appended:
        self._check_not_denied()
        params = request.params
        async with self._describing.setdefault(params["producer"], asyncio.Lock()):  # its writes go on in their order
            collection = await self._find_described(params)
        batch = self._sharded(collection, request.body)
        appended = await self._in_line(batch, request)
        if not appended.repeated:
            self._metrics.written(collection, batch.records)
        return appended

    async def _append_messages(self, request: Request) -> Appended:
        self._check_not_denied()
        params = request.params
        async with self._describing.setdefault(params["producer"], asyncio.Lock()):
            topic = await self._find_topic(params)
        due_ms = due_ms_of(params, self.node.clock.clock.wall_ms())
        batch = PartitionedMessages(topic, params["epoch"], request.body, due_ms)
        appended = await self._in_line(batch, request)
        if not appended.repeated:
            self._metrics.sent(topic.name, appended.rows, len(request.body))
        return appended

    async def _cancel(self, request: Request) -> Answer:
        self._check_not_denied()
        params = request.params
        async with self._describing.setdefault(params["producer"], asyncio.Lock()):
            topic = await self._find_topic(params)
        appended = await self._in_line(Cancellation(topic, params), request)
        return {"cancelled": appended.ts < DelayedId.from_bytes(params["message"]).due}

    async def _append_transaction(self, request: Request) -> Appended:
        self._check_not_denied()
        self._check_level()
        params = request.params
        participants: list[ShardedRows | PartitionedMessages] = []
        async with self._describing.setdefault(params["producer"], asyncio.Lock()):
            for wire, body in parts_of(params["parts"], request.body):
                if wire.kind == MESSAGES:
                    topic = await self._find_topic({"topic": wire.name, "id": wire.id, "epoch": wire.version})
                    participants.append(PartitionedMessages(topic, wire.version, body))
                else:
                    described = {"collection": wire.name, "id": wire.id, "schema_version": wire.version}
                    rows = self._sharded(await self._find_described(described), body)
                    if not rows.rows.num_rows:
                        raise InvalidRequest(f"a transaction without rows for {wire.name} does not name it")
                    participants.append(rows)
        batch = TransactionBatch(participants, self.node.wal.capabilities, params.get("acks"))
        appended = await self._in_line(batch, request)
        if not appended.repeated:
            self._metrics.committed(participants)
        return appended

    async def _fence_position(self, request: Request) -> Answer:
        self._check_level()
        found = await self._fences.fence(request.params["group"], request.params["channel"])
        return {"token": found.token, "decided": found.decided, "upto": found.upto, "metadata": found.metadata}

    def _sharded(self, collection: Collection, body: Payload) -> ShardedRows:
        """The rows in `body`, checked, by shard."""
        self._check_tables(collection)
        rows = decode_rows(body, collection.schema.row_arrow())
        check_values(rows, collection.schema)
        return ShardedRows(collection, rows, body)

    def _check_not_denied(self) -> None:
        if self.node.settings.quota_and_limits.limit_writing.force_deny:
            key = "quotaAndLimits.limitWriting.forceDeny"
            raise Overloaded(f"all writes are refused, because {key} is set", limit=key)

    def _check_level(self) -> None:
        """Refuse transactions while an owner may not know them: it would take one for a write of nothing."""
        if self.catalog.fold.level < TRANSACTIONS_LEVEL:
            raise InvalidRequest(
                f"transactions need feature level {TRANSACTIONS_LEVEL}, and the cluster has level "
                f"{self.catalog.fold.level}: `tidewal level` says what it waits for"
            )

    async def _in_line(self, batch: WriteBatch, request: Request) -> Appended:
        """Have a batch appended once it is its turn among those of its client."""
        params, size = request.params, len(request.body)
        deadline_s = params.get("deadline_s", DEADLINE_S)
        send = partial(self._hand_over, batch, params, asyncio.get_running_loop().time() + deadline_s)
        alone = isinstance(batch, TransactionBatch) and batch.prepared
        return await self._lines.write(
            params["producer"], batch.channels, size, send, deadline_s=deadline_s, alone=alone
        )

    def _hand_over(self, batch: WriteBatch, params: Params, deadline: float) -> asyncio.Future[Appended]:
        """Hand a batch to the owners of its channels, which are open; they take it until the loop's time `deadline`."""
        part = batch.part(params, self.owners.message_bytes())
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

    async def _find_topic(self, params: Params) -> Topic:
        """The topic that a client has described and sends to. Raises `TopicNotFound`, also where the client knows
        another one of that name, or an epoch that it does not have: one that is over has what earlier attempts of the
        client have written."""
        name, id, epoch = params["topic"], params["id"], params["epoch"]
        found = self.catalog.catalog.topics.find(name)
        wants_delays = not {"due_ms", "after_ms", "message"}.isdisjoint(params)
        behind = found is None or found.state != READY or found.id != id or epoch > found.epoch
        if found is None or behind or (wants_delays and not found.delays):  # this door may be behind
            found = (await self.catalog.catch_up()).topics.ready(name)
        if found.id != id or not found.partitions_of(epoch):
            raise TopicNotFound(f"the messages are for another topic {name}: describe it again", topic=name)
        return found

    def _check_tables(self, collection: Collection) -> None:
        """Refuse rows that no table will ever take, as far as the DataNode of this process knows. Damage does not
        refuse them: until it is repaired, they are in the log."""
        error = self.node.unreadable.get(("datanode", collection.name))
        if isinstance(error, FOREIGN_TABLES):
            raise error
