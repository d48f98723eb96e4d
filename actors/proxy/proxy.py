"""Proxy: validates rows, routes them to the shards of their collection, and owns the pchannels."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import perf_counter

import numpy as np
import pyarrow as pa

from ...runtime.actor.heartbeat import HeartbeatCallback
from ...runtime.catalog.catalog import CREATING, DROPPING, Collection
from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.errors import (
    BadRecord,
    CollectionNotFound,
    HandlerFailed,
    InvalidRequest,
    InvalidRows,
    Overloaded,
    PositionLost,
    TidewalError,
)
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record, RecordType, decode
from ...runtime.log.wal import ChannelPolicy, Entry, From, Payload
from ...runtime.ownership import Appended, ChannelGrant, ChannelOwner
from ...runtime.ownership.metrics import ChannelOwnerMetrics
from ...runtime.rows.row_codec import decode_rows, encode_rows, is_compact
from ...runtime.rows.schema import OP_COLUMN, Op
from ...runtime.rpc.server import Request
from ..collection_reader import FOREIGN_TABLES, TABLE_ERRORS
from ..flush_events import FlushEvent
from ..metrics import lag_ms
from ..node import Node
from ..requests import Answer, Method, Nothing, OfCollection
from ..role import Role
from ..rows import check_values, split_by_bytes, split_by_shard
from .metrics import ProxyMetrics
from .requests import AcquireParams, AnnounceParams, OfChannels, WriteParams
from .unflushed import Unflushed

RENEW_S = 3.0
IDLE_TICK_S = 600.0
ASK_AGAIN_S = 0.1
MIXCOORD_DEADLINE_S = 300.0  # acquiring channels reads their logs; a shorter deadline would only repeat the request
CHECK_FIRST_S = 1.0  # until the DataNode is asked why a flush is not done; doubled each time
CHECK_MAX_S = 30.0
DEFAULT_MESSAGE_BYTES = ChannelPolicy().max_message_bytes
RECORD_OVERHEAD_BYTES = 4 * 1024  # of a message's limit, for names, counts and the checksum beside the rows

_log = logging.getLogger("tidewal.proxy")


class Proxy(Role):
    """Owner of the pchannels that MixCoord grants it.

    A write is one batch: its rows go to their shards under one timestamp, in one commit of the log, and are
    acknowledged when they are durable. Requests are appended in the order of their arrival.
    """

    role = "proxy"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._owner: ChannelOwner
        self._beat: HeartbeatCallback
        self._metrics: ProxyMetrics
        self._unflushed = Unflushed(node.settings.proxy.max_unflushed_bytes)
        self._registered = asyncio.Event()
        self._outdated = asyncio.Event()  # set: register again
        self._waiting_bytes = 0
        self._turns = asyncio.Lock()  # of writes that wait: it is fair
        self._limits: dict[str, int] = {}  # of a message, by channel

    def handlers(self) -> dict[str, Method]:
        return {
            "write": Method(self._write, WriteParams),
            "flush": Method(self._flush, OfCollection),
            "sync": Method(self._sync, OfChannels),
            "acquire": Method(self._acquire, AcquireParams),
            "activate": Method(self._activate, OfChannels),
            "announce_collection": Method(self._announce_collection, AnnounceParams),
            "ready": Method(self._ready, Nothing),
        }

    async def prepare(self) -> None:
        node = self.node
        await node.make_heartbeats()
        await node.make_event_channel(node.names.insert_events)
        self._owner = ChannelOwner(
            node.wal,
            node.clock,
            heartbeat_channel=node.names.heartbeats,
            inflight_bytes=node.settings.proxy.max_inflight_bytes,
            observer=_Observer(self),
            grants=self.catalog,
            lease_holds=None if node.lease is None else node.lease.holds,
        )
        self._metrics = ProxyMetrics(node.metrics, lambda: self._owner.inflight_bytes)
        for collection in self.catalog.catalog.collections.values():
            self._watch(collection)
        interval_s = node.settings.proxy.time_tick_interval / 1000
        self._beat = self.system.heartbeat.every(interval_s, self._owner.tick_all, f"ticks of {self.name}")
        self.spawn_task(self._follow_flushes(), name="flushes")
        self.spawn_task(self._register(), name="register")
        self.spawn_task(self._watch_leader(), name="leader")
        self.spawn_task(self._renew_periodically(), name="lease")
        if node.wal.capabilities.shared_segments:
            self.spawn_task(self._tick_idle_channels(), name="idle channels")

    # ---- ownership --------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Register again: request all channels under new terms. Until they are granted, writes wait."""
        self._registered.clear()
        self._outdated.set()

    async def _register(self) -> None:
        """Register at the start, with each new leader, and when an append's outcome is unknown."""
        while True:
            self._outdated.clear()
            # a stalled owner stamps and promises nothing: its clock need not leap to the end of the old lease
            used = self.node.clock.last if self._owner.stalled else 0
            await self._ask_mixcoord("register_proxy", {"used": used})
            await self._renew_lease()
            if not self._outdated.is_set() and not self._owner.stalled:
                self._registered.set()
                await self._outdated.wait()

    async def _watch_leader(self) -> None:
        leader = self.catalog.leader
        while True:
            await self.catalog.changed()
            if self.catalog.leader != leader and not self.superseded:
                leader = self.catalog.leader
                self.register()

    async def _ready(self, _: Request) -> Answer:
        """Reply once this Proxy owns its channels."""
        await self._registered.wait()
        return None

    async def _ask_mixcoord(self, method: str, params: dict[str, object]) -> dict[str, object]:
        """Call the coordinator of this node until it replies. A coordinator that is superseded never does: the role
        ends then."""
        request = {"node": self.node.incarnation, "to": self.node.incarnation, **params}
        while True:
            asked_s = self.node.clock.clock.monotonic()
            try:
                reply = await self.rpc.call("mixcoord", method, request, deadline_s=MIXCOORD_DEADLINE_S)
            except TidewalError as error:
                if not (error.retryable or isinstance(error, HandlerFailed)):
                    raise
                _log.warning("mixcoord does not %s, trying again: %s", method, error)
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                if method == "renew" and self.node.lease is not None:
                    self.node.lease.renew(asked_s)
                return dict(reply.values)

    async def _renew_periodically(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._renew_lease()

    async def _tick_idle_channels(self) -> None:
        """While some channels are written, store ticks in the others: the last entry of an idle channel is held for its
        collections, and keeps all that lies behind it in the segments."""
        written: object = None
        while True:
            await asyncio.sleep(IDLE_TICK_S)
            with suppress(TidewalError):  # the next turn tries again
                if self._owner.sync_point().channels != written:
                    await self._owner.tick_now(everywhere=True)
                    written = self._owner.sync_point().channels

    async def _renew_lease(self) -> None:
        """Renew the lease of all channels, and the limit of their timestamps."""
        renewed = await self._ask_mixcoord("renew", {"checkpoints": self._owner.checkpoints()})
        limit = renewed["limit"]
        assert isinstance(limit, int)
        self._owner.renew(limit)

    async def _acquire(self, request: Request) -> Answer:
        grants: list[ChannelGrant] = request.params["grants"]
        described = await asyncio.gather(*(self.node.wal.describe(grant.channel) for grant in grants))
        self._limits.update((channel.name, channel.max_message_bytes) for channel in described)
        self._unflushed.begin_recovery(grant.channel for grant in grants)
        return {"fences": await self._owner.acquire(grants)}

    async def _activate(self, request: Request) -> Answer:
        self._owner.activate(request.params["channels"])
        return None

    async def _announce_collection(self, request: Request) -> Answer:
        """Append to every vchannel the record that its collection begins or ends. Writes behind the end find no
        collection."""
        begins = request.params["what"] == "create"
        await self._registered.wait()
        collection = (await self.catalog.catch_up()).by_id(request.params["collection"].id)
        if collection is None or collection.state != (CREATING if begins else DROPPING):
            raise InvalidRequest(f"no collection of this id is to be {request.params['what']}d")
        kind = RecordType.CREATE_COLLECTION if begins else RecordType.DROP_COLLECTION
        await self._owner.append(self._to_all(collection, kind))
        if not begins:
            self._unflushed.forget(collection.vchannels)
            self._metrics.forget(collection)
        return None

    def _watch(self, collection: Collection) -> None:
        self._metrics.watch(
            collection,
            unflushed_bytes=lambda: self._unflushed.bytes(collection.vchannels),
            unflushed_age_s=lambda: lag_ms(self.node.clock, self._unflushed.oldest(collection.vchannels)) / 1000,
        )

    def _to_all(self, collection: Collection, kind: RecordType) -> list[tuple[str, Record]]:
        return [(pchannel_of(vchannel), Record(kind, vchannel=vchannel)) for vchannel in collection.vchannels]

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
        await self._wait_for_channels(len(request.body))
        collection = await _find_collection(self.catalog, request.params["collection"])
        self._check_tables(collection)
        schema = collection.schema
        if (request.params["id"], request.params["schema_version"]) != (collection.id, schema.version):
            raise InvalidRows(f"the rows are of another {collection.name}, or of another version; describe it again")
        rows = decode_rows(request.body, schema.row_arrow())
        check_values(rows, schema)
        self._unflushed.check(collection.name, collection.vchannels, len(request.body))
        records = self._records(collection, rows, request.body)
        producer, pseq, digest = request.params["producer"], request.params["pseq"], request.params.get("digest", 0)
        appended = await self._owner.append(records, producer=producer, pseq=pseq, rows=rows.num_rows, digest=digest)
        if not appended.repeated:
            for _, record in records:
                self._unflushed.add(record.vchannel, appended.ts, len(record.body))
            if not self._metrics.watches(collection):
                self._watch(collection)
            self._metrics.written(collection, records)
        return appended

    def _check_tables(self, collection: Collection) -> None:
        """Refuse rows that no table will ever take, as far as the DataNode of this process knows. Damage does not
        refuse them: until it is repaired, they are in the log."""
        error = self.node.unreadable.get(("datanode", collection.name))
        if isinstance(error, FOREIGN_TABLES):
            raise error

    async def _wait_for_channels(self, size: int) -> None:
        """While channels are being acquired, let a write of `size` bytes wait, in its order, instead of failing."""
        if self._registered.is_set() and not self._waiting_bytes:
            return
        limit = self.node.settings.proxy.max_inflight_bytes
        if self._waiting_bytes and self._waiting_bytes + size > limit:
            raise Overloaded(
                f"{self._waiting_bytes} bytes wait until their channels are acquired, the limit is {limit}; retry",
                limit="proxy.maxInflightBytes",
            )
        self._waiting_bytes += size
        try:
            async with self._turns:
                await self._registered.wait()
        finally:
            self._waiting_bytes -= size

    def _records(self, collection: Collection, rows: pa.RecordBatch, body: Payload) -> list[tuple[str, Record]]:
        """The records of a batch, split by shard and by the message size limit of each channel. The channel owner
        chains those of one pchannel, so that readers see all of a batch or nothing. Rows that are not split go into the
        log as the client has encoded them, in `body`, unless that holds more than the rows."""
        shards = split_by_shard(rows, collection.schema, collection.shards)
        records: list[tuple[str, Record]] = []
        for vchannel, part in zip(collection.vchannels, shards, strict=True):
            if part is not None:
                channel = pchannel_of(vchannel)
                limit = self._limits.get(channel, DEFAULT_MESSAGE_BYTES) - RECORD_OVERHEAD_BYTES
                if part is rows and len(body) <= limit and is_compact(body, rows):
                    records.append((channel, _record(vchannel, rows, collection, body)))
                    continue
                slices = split_by_bytes(part, limit, collection.schema.primary_key)
                records += [(channel, _record(vchannel, each, collection, encode_rows(each))) for each in slices]
        return records

    # ---- freshness --------------------------------------------------------------------------------------------------

    async def _sync(self, request: Request) -> Answer:
        """The present time of the log, and the last acknowledged record of each channel at or before it."""
        await self._registered.wait()
        point = self._owner.sync_point()
        wanted = request.params["channels"]
        return {
            "time": point.time,
            "channels": {name: point.channels[name] for name in wanted if name in point.channels},
        }

    async def _flush(self, request: Request) -> Answer:
        """Ask the DataNode to store all that was acknowledged before this, and wait until it has."""
        await self._registered.wait()
        collection = await _find_collection(self.catalog, request.params["collection"])
        appended = await self._owner.append(self._to_all(collection, RecordType.FLUSH))
        await self._owner.tick_now()
        await self._stored(collection, appended.ts)
        return {"ts": appended.ts}

    async def _stored(self, collection: Collection, ts: int) -> None:
        """Wait until the tables have all up to `ts`. While that lasts, ask the DataNode with growing pauses whether it
        can store them: raises what is wrong with the tables, `PositionLost` where the log has lost rows for them."""
        pause_s = CHECK_FIRST_S
        while True:
            # The catalog has a drop before `Unflushed` ends the flushes that wait; a flush that comes later learns of
            # the drop from the catalog alone.
            current = self.catalog.catalog.by_id(collection.id)
            if current is None or current.state == DROPPING:
                raise CollectionNotFound(
                    f"collection {collection.name} was dropped before all of it was stored", collection=collection.name
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    return await self._unflushed.stored(collection.vchannels, ts)
            pause_s = min(2 * pause_s, CHECK_MAX_S)
            try:
                await self.rpc.call("datanode", "check", {"collection": collection.name})
            except (PositionLost, *TABLE_ERRORS):
                raise
            except TidewalError as error:  # the DataNode restarts or is busy: it stores all later
                _log.info("waiting for the DataNode to store %s: %s", collection.name, error)

    async def _follow_flushes(self) -> None:
        async for entries in self.node.wal.read(self.node.names.insert_events, From.EARLIEST):
            for entry in entries:
                try:
                    self._unflushed.store(FlushEvent.from_record(decode(entry.payload)))
                except BadRecord as error:  # the next flush event of that collection covers it
                    self.dead_letters.bad(self.node.names.insert_events, entry, error)

    def recovered(self, record: Record) -> None:
        """Count a record that was found in the log while its channel was acquired."""
        if record.type is RecordType.ROWS:
            self._unflushed.recover(record.vchannel, record.ts, len(record.body))

    async def on_stop(self) -> None:
        self._beat.cancel()
        limit = await self._owner.close()
        params: dict[str, object] = {
            "node": self.node.incarnation,
            "checkpoints": self._owner.checkpoints(),
            "limit": limit,
        }
        try:
            if self._owner.channels:
                await self.rpc.call("mixcoord", "renew", params)
        except TidewalError as error:
            _log.warning("the lease is not released, the next owner begins behind its limit: %s", error)
        await super().on_stop()


class _Observer(ChannelOwnerMetrics):
    """Passes what the channel owner observes to the Proxy."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy.node.metrics, proxy.node.clock)
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()

    def recovered(self, channel: str, record: Record) -> None:
        self._proxy.recovered(record)

    def bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        self._proxy.dead_letters.bad(channel, entry, error)

    def stalled(self, error: TidewalError) -> None:
        super().stalled(error)
        self._loop.call_soon_threadsafe(self._proxy.register)


async def _find_collection(catalog: CatalogLog, name: str) -> Collection:
    """The collection `name`, after catching up where the catalog read so far does not have it. Raises
    `CollectionNotFound`."""
    try:
        return catalog.catalog.collection(name)
    except CollectionNotFound:
        return (await catalog.catch_up()).collection(name)


def _record(vchannel: str, rows: pa.RecordBatch, collection: Collection, body: Payload) -> Record:
    return Record(
        RecordType.ROWS,
        vchannel=vchannel,
        tags={"rows": rows.num_rows, **_ops(rows)},
        schema_version=collection.schema.version,
        body=body,
    )


def _ops(rows: pa.RecordBatch) -> dict[str, int]:
    """Rows per operation, for the record's tags: a reader that filters or inspects need not decode the rows."""
    counts = np.bincount(rows.column(OP_COLUMN).to_numpy(), minlength=len(Op)).tolist()
    return {op.name.lower(): counts[op] for op in Op if counts[op]}
