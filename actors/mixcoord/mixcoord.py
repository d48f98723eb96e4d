"""MixCoord: elected through the log, it writes the catalog, grants channels and stores cuts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from ...runtime.catalog.catalog import CREATING, DROPPING, READY, Collection, PChannelState
from ...runtime.catalog.cuts import Cut, CutEnd
from ...runtime.clock import add_ms
from ...runtime.errors import (
    ActorStopped,
    CollectionExists,
    DeadlineExceeded,
    Fenced,
    HandlerFailed,
    InvalidRequest,
    Overloaded,
    TidewalError,
    Unavailable,
)
from ...runtime.log.record import encode
from ...runtime.log.wal import ControlAppend
from ...runtime.ownership.lease import LEASE_MS, LEASE_S
from ...runtime.rows.schema import CollectionSchema
from ...runtime.rpc.server import Request
from ...runtime.streams.channel_reader import OnBadRecord
from ...runtime.tables.table_store import LOG
from ..collection_reader import holder, pchannels_of
from ..datanode.delta_errors import storage_errors
from ..datanode.wal_identity import foreign_tables
from ..metrics import lag_ms
from ..node import Node
from ..owners import sync_point
from ..requests import Answer, Method, Nothing, OfCollection
from ..role import Role
from ...runtime.waiting import first_of
from .group_lags import GroupLags
from .pchannels import Pchannels
from .reply_channels import ReplyChannels
from .requests import CreateParams, DropParams, RenewParams
from .schema_differences import differences
from .stray_tables import warn_of_stray_tables

CUT_INTERVAL_S = 0.5
CUT_DEADLINE_S = 2.0  # of a cut that no client waits for: those of other collections wait behind it
CUT_AGAIN_MS = 24 * 3600 * 1000  # of a collection that is idle: cuts are kept for two weeks, its rows perhaps longer
DDL_DEADLINE_S = 30.0
GRANT_AGAIN_S = 0.1
FINISH_AGAIN_S = 5.0

_AWAY = (Unavailable, Overloaded, DeadlineExceeded, ActorStopped, HandlerFailed)

_log = logging.getLogger("tidewal.mixcoord")


class MixCoord(Role):
    """The coordinator of all roles. One node leads; each of its decisions is an event of the catalog before it is
    carried out, and is finished by the next leader where this one stops half-way."""

    role = "mixcoord"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._claimed_s = 0.0  # on the clock of leases
        self._ddl: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name, while one is held
        self._adding = asyncio.Lock()  # each collection rests on the ids before it
        self._last_cuts: dict[int, tuple[Cut, bytes]] = {}  # by collection, with its id in the log
        self._first_cut = b""  # the first id that there is, where retention may remove cuts soon
        self._cut_time = 0
        self._pchannels = Pchannels(node, self.catalog)

    def handlers(self) -> dict[str, Method]:
        return {
            "create_collection": Method(self._create, CreateParams),
            "drop_collection": Method(self._drop, DropParams),
            "describe_collection": Method(self._describe, OfCollection),
            "list_collections": Method(self._list, Nothing),
            "renew": Method(self._renew, RenewParams),
            "cut": Method(self._cut, OfCollection),
        }

    def on_bad_event(self) -> OnBadRecord:
        return self.dead_letters.bad

    async def prepare(self) -> None:
        if self.ref.cell.restarts and self.superseded:
            return  # a node that has taken over since this role ran last keeps the log
        await self._pchannels.check()  # before a healthy node is superseded
        before = self.catalog.leader.node
        await self.catalog.claim(self.node.incarnation)
        _log.info("%s leads the log now%s", self.node.incarnation, f", in place of {before}" if before else "")
        self._claimed_s = self.node.clock.clock.monotonic()
        if not self.ref.cell.restarts:
            self.spawn_task(self._warn_of_stray_tables(), name="stray tables")
        await self.node.make_event_channel(self.node.names.cuts)
        metrics, clock = self.node.metrics, self.node.clock
        metrics.counter("mixcoord_election_total").inc()
        metrics.gauge("mixcoord_leader").set(1)
        metrics.gauge("mixcoord_cut_lag_ms").set_function(lambda: lag_ms(clock, self._cut_time))
        metrics.gauge("rootcoord_dml_channel_num").set_function(lambda: len(self.catalog.catalog.channels))
        self.spawn_task(self._grant_periodically(), name="grants")
        self.spawn_task(self._finish(), name="unfinished collections")
        self.spawn_task(self._draw_cuts(), name="cuts")
        if self.node.wal.capabilities.groups:
            self.spawn_task(GroupLags(self.node.wal, clock.clock, metrics).run(), name="lags of groups")
        if not self.node.wal.capabilities.drops_temporary:
            replies = ReplyChannels(self.node.wal, self.node.names, metrics)
            self.spawn_task(replies.run(), name="silent reply channels")

    async def _warn_of_stray_tables(self) -> None:
        try:
            await self.node.blocking(partial(warn_of_stray_tables, self.node.tables, self.catalog.catalog.collections))
        except TidewalError as error:  # the DataNode meets the same, and says what follows
            _log.warning("the tables cannot be listed: %s", error)

    # ---- collections ------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Answer:
        schema: CollectionSchema = request.params["schema"]
        shards: int = request.params["shards"]
        if not 1 <= shards <= self.node.settings.proxy.max_shard_num:
            limit = self.node.settings.proxy.max_shard_num
            raise InvalidRequest(f"a collection has 1 to {limit} shards (proxy.maxShardNum), not {shards!r}")
        async with self._ddl_of(schema.name):
            existing = self.catalog.catalog.collections.get(schema.name)
            if existing is not None and existing.state == DROPPING:
                await self._finish_drop(existing)
                existing = None
            if existing is not None and (other := differences(existing, schema, shards)):
                raise CollectionExists(f"collection {schema.name} exists: {other}", collection=schema.name)
            if existing is not None and existing.state == READY:
                return {"collection": existing.to_wire(), "created": False}
            if existing is None:
                async with self._adding:
                    existing = await self._add(schema, shards)
            await self._finish_create(existing)
        return {"collection": replace(existing, state=READY).to_wire(), "created": True}

    def _ddl_of(self, name: str) -> asyncio.Lock:
        """The lock of all that is done to the collections of this name. Those of others may be where a channel is
        away."""
        lock = self._ddl.get(name)
        if lock is None:
            lock = self._ddl[name] = asyncio.Lock()
        return lock

    async def _add(self, schema: CollectionSchema, shards: int) -> Collection:
        await self._check_no_tables(schema.name)
        id = self.catalog.catalog.next_id
        pchannels = [await self._pchannels.for_shard(id, shard) for shard in range(shards)]
        vchannels = tuple(self.node.names.vchannel(name, id, shard) for shard, name in enumerate(pchannels))
        collection = Collection(id, schema, vchannels, self.node.clock.now())
        await self.catalog.append({"kind": "create", "collection": collection.to_wire()})
        return collection

    async def _check_no_tables(self, name: str) -> None:
        """Raise `PositionMismatch` where a collection that this log does not have has tables: they are another log's,
        for those of a dropped collection are removed before its name is free again."""
        location = self.node.tables.table(name, LOG)
        with storage_errors(location):
            there = await self.node.blocking(location.exists)
        if there:
            raise foreign_tables(location, name, "was there before it was created")

    async def _finish_create(self, collection: Collection) -> None:
        await self._until_owned(pchannels_of(collection))
        await self._announce("create", collection)
        for channel in pchannels_of(collection):
            # Before the first row: the DataNode holds nothing until it has opened the table, which may fail for long.
            latest = await self.node.wal.latest_id(channel)
            if latest is not None:
                await self.node.wal.hold(channel, holder(collection), latest)
        await self.catalog.append({"kind": "ready", "id": collection.id})

    async def _drop(self, request: Request) -> Answer:
        named = self.catalog.catalog.by_id(request.params["id"])
        if named is None:
            return None  # a repeated request: it is gone already
        async with self._ddl_of(named.name):
            collection = self.catalog.catalog.by_id(named.id)
            if collection is None:
                return None
            if collection.state != DROPPING:
                await self.catalog.append({"kind": "drop", "id": collection.id})
            await self._finish_drop(collection)
        return None

    async def _finish_drop(self, collection: Collection) -> None:
        """Readers release the collection before its name is free again: a new one of that name starts with empty
        tables."""
        await self._announce("drop", collection)
        for role in ("querynode", "datanode"):
            await self.rpc.call(role, "release", {"collection": collection.to_wire()}, deadline_s=DDL_DEADLINE_S)
        await self.catalog.append({"kind": "dropped", "id": collection.id})
        self._last_cuts.pop(collection.id, None)

    async def _announce(self, what: str, collection: Collection) -> None:
        addressed = {"to": self.node.incarnation, "what": what, "collection": collection.to_wire()}
        await self.rpc.call("streamingnode", "announce_collection", addressed, deadline_s=DDL_DEADLINE_S)

    async def _describe(self, request: Request) -> Answer:
        return {"collection": self.catalog.catalog.collection(request.params["collection"]).to_wire()}

    async def _list(self, _: Request) -> Answer:
        return {"collections": sorted(c.name for c in self.catalog.catalog.collections.values() if c.state == READY)}

    # ---- ownership --------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Finish what an earlier leader began."""
        while unfinished := [each for each in self.catalog.catalog.collections.values() if each.state != READY]:
            await asyncio.gather(*map(self._finish_one, unfinished))
            await asyncio.sleep(FINISH_AGAIN_S)

    async def _finish_one(self, collection: Collection) -> None:
        async with self._ddl_of(collection.name):
            current = self.catalog.catalog.by_id(collection.id)
            try:
                if current is not None and current.state == CREATING:
                    await self._finish_create(current)
                elif current is not None and current.state == DROPPING:
                    await self._finish_drop(current)
            except Fenced:
                raise
            except TidewalError as error:  # the next turn, or the next request for the name, continues
                _log.warning("%s stays %s for now: %s", collection.name, collection.state, error)

    async def _grant_periodically(self) -> None:
        """Grant the channels of all collections to the StreamingNode of this node, as long as it has one: those that it
        has not yet, and those that it has given up."""
        while True:
            lacking = self._lacking() if self.node.local_owner.joined else []
            if lacking:
                try:
                    await self._grant(lacking)
                except TidewalError as error:
                    if not error.retryable:
                        raise
                    _log.warning("channels are not granted now, trying again: %s", error)
                    await asyncio.sleep(GRANT_AGAIN_S)
            else:
                await first_of(self.catalog.changed(), self.node.local_owner.changed())

    def _lacking(self) -> list[str]:
        channels = self.catalog.catalog.channels
        collections = self.catalog.catalog.collections.values()
        wanted = {name for collection in collections for name in pchannels_of(collection)}
        return sorted(name for name in wanted if name not in channels or channels[name].owner != self.node.incarnation)

    async def _grant(self, names: list[str]) -> None:
        """Grant channels, under new terms: each grant is in the catalog before the fence is written, and the fence's
        id, which the owner writes there itself, before it acknowledges anything (guarantee 3)."""
        await self._wait_for_owners(names)
        channels = self.catalog.catalog.channels
        last = {name: channels[name].term if name in channels else 0 for name in names}
        # the new owner's clock begins behind the old limits
        past = max((channels[name].used_limit for name in names if name in channels), default=0)
        limit = add_ms(max(past, self.node.clock.now()), LEASE_MS)
        granted = {name: (term + 1, term) for name, term in last.items()}
        await self.catalog.append({"kind": "grant", "node": self.node.incarnation, "channels": granted, "limit": limit})
        self.node.metrics.counter("mixcoord_assignment_total", role_name="streamingnode").inc(len(names))

    async def _until_owned(self, names: Iterable[str]) -> None:
        """Wait until the channels have their owner. Raises `DeadlineExceeded`."""
        wanted = list(names)
        await self.catalog.wait_for(
            lambda catalog: all(self._is_owned(catalog.channels.get(name)) for name in wanted),
            deadline_s=DDL_DEADLINE_S,
        )

    def _is_owned(self, channel: PChannelState | None) -> bool:
        return channel is not None and channel.owner == self.node.incarnation and channel.term in channel.fences

    async def _wait_for_owners(self, names: Iterable[str]) -> None:
        """On a log that several nodes can open: wait until the previous owners have released these channels, or their
        leases have expired.

        A running node releases them as soon as it reads this one's claim. A silent node may still acknowledge; since
        the claim none of its renewals counts, so its lease ends `LEASE_S` later. Wall clocks are not used: they may
        differ, and be set.
        """
        if self.node.wal.capabilities.one_node:
            return
        channels = self.catalog.catalog.channels
        owners = {
            name: channels[name].owner
            for name in names
            if name in channels and channels[name].owner not in ("", self.node.incarnation)
        }
        rest_s = self._claimed_s + LEASE_S - self.node.clock.clock.monotonic()
        if not owners or rest_s <= 0:
            return
        silent = ", ".join(sorted(set(owners.values())))
        _log.warning("waiting for %s to release its channels, %.0f s at most", silent, rest_s)
        with suppress(DeadlineExceeded):
            await self.catalog.wait_for(
                lambda catalog: all(catalog.channels[name].owner != owner for name, owner in owners.items()),
                deadline_s=rest_s,
            )

    async def _renew(self, request: Request) -> Answer:
        """Renew the lease of this node's StreamingNode."""
        node = request.params["node"]
        if node != self.node.incarnation:
            raise Fenced(f"{self.node.incarnation} has taken the log over: there is one node to a log")
        limit = add_ms(self.node.clock.now(), LEASE_MS)
        lease = {"kind": "lease", "node": node, "limit": limit, "checkpoints": request.params["checkpoints"]}
        await self.catalog.append(lease)
        return {"limit": limit}

    # ---- cuts -------------------------------------------------------------------------------------------------------

    async def _cut(self, request: Request) -> Answer:
        cut = await self._draw(self.catalog.catalog.collection(request.params["collection"]), only_changed=False)
        assert cut is not None
        return {"time": cut.time}

    async def _draw(self, collection: Collection, *, only_changed: bool) -> Cut | None:
        """Store a cut at the owner's present time; with `only_changed` none when nothing was written since the last cut
        and that is there and younger than `CUT_AGAIN_MS`: retention must not remove the last cut there is."""
        pchannels = pchannels_of(collection)
        deadline_s = CUT_DEADLINE_S if only_changed else DDL_DEADLINE_S
        point = await sync_point(self.node, self.rpc, pchannels, to=self.node.incarnation, deadline_s=deadline_s)
        ends = {name: CutEnd(*end) for name, end in point.channels.items()}
        cut = Cut(collection.id, collection.name, point.time, ends)
        last, id = self._last_cuts.get(collection.id, (None, b""))
        if id < self._first_cut:  # retention has removed it
            last = None
        if only_changed and last is not None and last.ends == ends and cut.time < add_ms(last.time, CUT_AGAIN_MS):
            return None
        entry = ControlAppend(self.node.names.cuts, encode(cut.to_record()), cut.time)
        [id] = await self.node.wal.append_many([entry])
        self._last_cuts[collection.id] = cut, id
        self._cut_time = max(self._cut_time, cut.time)
        return cut

    async def on_stop(self) -> None:
        self.node.metrics.gauge("mixcoord_leader").set(0)
        await super().on_stop()

    async def _look_at_first_cut(self) -> None:
        if self.node.wal.capabilities.shared_segments:
            with suppress(*_AWAY):  # looked at again in a moment
                kept = await self.node.wal.describe(self.node.names.cuts)
                self._first_cut = kept.first_id or (kept.latest_id or b"") + b"\0"  # none there: behind the last one

    async def _draw_cuts(self) -> None:
        """Store a cut of each collection every `CUT_INTERVAL_S` while rows are written: other processes read up to
        it."""
        while True:
            await asyncio.sleep(CUT_INTERVAL_S)
            await self._look_at_first_cut()
            for collection in list(self.catalog.catalog.collections.values()):
                if collection.state == READY:
                    try:
                        await self._draw(collection, only_changed=True)
                    except _AWAY as error:
                        _log.warning("no cut of %s now: %s", collection.name, error)
