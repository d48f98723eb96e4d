"""MixCoord: elected through the log, it writes the catalog, grants channels and stores cuts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ...runtime.catalog.catalog import CREATING, DROPPING, READY, Collection
from ...runtime.cluster.channel_assignment import assign_channels
from ...runtime.cluster.coordinator import ClusterCoordinator
from ...runtime.cluster.decisions import ClusterView
from ...runtime.cluster.roles import STREAMING_NODE
from ...runtime.errors import (
    ActorStopped,
    CollectionExists,
    DeadlineExceeded,
    Fenced,
    HandlerFailed,
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
    TidewalError,
    Unavailable,
)
from ...runtime.rows.schema import CollectionSchema
from ...runtime.rpc.protocol import Params
from ...runtime.rpc.server import Request
from ...runtime.streams.channel_reader import OnBadRecord
from ...runtime.tables.table_store import LOG
from ...runtime.waiting import ended, first_of
from ..datanode.delta_errors import storage_errors
from ..datanode.wal_identity import foreign_tables
from ..node import Node
from ..requests import Answer, Method, Nothing, OfCollection
from ..role import Role
from .cluster_metrics import ClusterMetrics
from .cut_drawer import CutDrawer
from .group_lags import GroupLags
from .log_migration_requests import migration_handlers
from .pchannels import Pchannels
from .placement import Placement
from .reply_channels import ReplyChannels
from .requests import CreateParams, DropParams, LoadParams
from .schema_differences import differences
from .stray_tables import warn_of_stray_tables
from .topic_ddl import TopicDdl

DDL_DEADLINE_S = 30.0
FINISH_AGAIN_S = 5.0

_AWAY = (Unavailable, Overloaded, DeadlineExceeded, ActorStopped, HandlerFailed)

_log = logging.getLogger("tidewal.mixcoord")


class MixCoord(Role):
    """The coordinator of all roles. One node of the cluster leads, the others follow the same state; each decision of
    the leader is an event of the catalog before it is carried out, and is finished by the next one where it stops
    half-way."""

    role = "mixcoord"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._ddl: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name, while one is held
        self._adding = asyncio.Lock()  # each collection or topic rests on the ids before it
        self._cuts = CutDrawer(node, self.catalog, self.owners)
        self._pchannels = Pchannels(node, self.catalog)
        assigned = node.metrics.counter("mixcoord_assignment_total", role_name=STREAMING_NODE)
        self._coordinator = ClusterCoordinator(
            self.catalog,
            node.cluster.log,
            node.cluster.detector,
            node.clock,
            self._assign,
            on_granted=assigned.inc,
            on_evicted=node.metrics.counter("mixcoord_eviction_total").inc,
        )
        self._placement = Placement(node, self.catalog, self._coordinator.view)
        deciding, is_over = self._coordinator.deciding, node.cluster.detector.is_over
        self._topics = TopicDdl(node, self.catalog, self._adding, deciding, is_over)

    def handlers(self) -> dict[str, Method]:
        return {
            "create_collection": Method(self._create, CreateParams),
            "drop_collection": Method(self._drop, DropParams),
            "load_collection": Method(self._load, LoadParams),
            "release_collection": Method(self._release, OfCollection),
            "describe_collection": Method(self._describe, OfCollection),
            "list_collections": Method(self._list, Nothing),
            "cut": Method(self._cut, OfCollection),
            **self._topics.handlers(),
            **self._placement.handlers(),
            **migration_handlers(self.node),
        }

    def on_bad_event(self) -> OnBadRecord:
        return self.dead_letters.bad

    def answers(self, request: Request) -> bool:
        """The leader answers."""
        return self.catalog.leads

    @property
    def gives_way(self) -> bool:
        return super().gives_way or not self.catalog.leads

    async def prepare(self) -> None:
        await self._pchannels.check()
        await self.node.make_event_channel(self.node.names.cuts)
        with suppress(*_AWAY, PreconditionFailed, Fenced):  # looked at again at once
            await self._coordinator.step()  # so that a node that is alone leads before it is asked for anything
        metrics = self.node.metrics
        metrics.gauge("mixcoord_leader").set_function(lambda: self.catalog.leads)
        metrics.gauge("rootcoord_dml_channel_num").set_function(lambda: len(self.catalog.catalog.collection_channels))
        view, detector = self._coordinator.view, self.node.cluster.detector
        shown = ClusterMetrics(metrics, view, detector, self.node.clock.clock, changed=self.catalog.changed)
        self.spawn_task(shown.run(), name="metrics")
        self.spawn_task(self.owners.run(), name="owners")
        self.spawn_task(self._coordinator.run(), name="cluster")
        self.spawn_task(self._lead(), name="leadership")

    # ---- leadership -------------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Do what the leader does, whenever this node leads."""
        while True:
            while not self.catalog.leads:
                await self.catalog.changed()
            before = self.catalog.leader.node
            _log.info("%s leads the cluster", before)
            self.node.metrics.counter("mixcoord_election_total").inc()
            await self._do_while_leading(*self._duties())
            _log.info("%s leads the cluster, in place of %s", self.catalog.leader.node, before)

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        node = self.node
        duties: list[Coroutine[Any, Any, None]] = [self._warn_of_stray_tables(), self._finish(), self._cuts.run()]
        duties.append(self._topics.finish())
        if node.wal.capabilities.groups:
            duties.append(GroupLags(node.wal, node.clock.clock, node.metrics).run())
        if not node.wal.capabilities.drops_temporary:
            duties.append(ReplyChannels(node.wal, node.names, node.metrics).run())
        return duties

    async def _do_while_leading(self, *duties: Coroutine[Any, Any, None]) -> None:
        """Run `duties` until another node leads. Raises what one of them raises while this one does."""
        tasks = [asyncio.create_task(duty) for duty in duties]
        watching = asyncio.create_task(self._until_superseded())
        running = {watching, *tasks}
        try:
            while not watching.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {watching}:
                    self._check_duty(task)
            watching.result()
        finally:
            await ended(watching, *tasks)

    async def _until_superseded(self) -> None:
        while self.catalog.leads:
            await self.catalog.changed()

    def _check_duty(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if isinstance(error, Fenced) and not self.catalog.leads:
            return  # it was refused because another node leads
        if error is not None:
            raise error

    def _assign(self, view: ClusterView) -> Mapping[str, str]:
        """Which StreamingNode is to own which pchannel."""
        plan = assign_channels(view, view.catalog.pchannels)
        for move in plan.moves:
            _log.info(
                "%s moves from %s to %s: %s", move.channel, move.source, move.target, move.detail or move.reason.value
            )
        return plan.owners()

    async def _warn_of_stray_tables(self) -> None:
        if self.ref.cell.restarts:
            return
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
                    replicas = request.params.get("replicas")
                    default = self.node.settings.query_node.replicas
                    existing = await self._add(schema, shards, default if replicas is None else replicas)
            await self._finish_create(existing)
        return {"collection": self.catalog.catalog.collections[schema.name].to_wire(), "created": True}

    def _ddl_of(self, name: str) -> asyncio.Lock:
        """The lock of all that is done to the collections of this name. Those of others may be where a channel is
        away."""
        lock = self._ddl.get(name)
        if lock is None:
            lock = self._ddl[name] = asyncio.Lock()
        return lock

    async def _add(self, schema: CollectionSchema, shards: int, replicas: int) -> Collection:
        await self._check_no_tables(schema.name)
        id = self.catalog.catalog.next_id
        pchannels = [await self._pchannels.for_shard(id, shard) for shard in range(shards)]
        vchannels = tuple(self.node.names.vchannel(name, id, shard) for shard, name in enumerate(pchannels))
        collection = Collection(id, schema, vchannels, self.node.clock.now(), replicas=replicas)
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
        await self.owners.announce("create", collection, deadline_s=DDL_DEADLINE_S)
        # Before the first row: the DataNode holds nothing until it has opened the table, which may fail for long.
        point = await self.owners.sync(collection, deadline_s=DDL_DEADLINE_S)
        hold, name = self.node.wal.hold, collection.holder
        await asyncio.gather(*(hold(channel, name, last.id) for channel, last in point.channels.items()))
        ends = {channel: tuple(last) for channel, last in point.channels.items()}
        await self.catalog.append({"kind": "ready", "id": collection.id, "beginning": (point.time, ends)})

    async def _load(self, request: Request) -> Answer:
        name: str = request.params["collection"]
        async with self._ddl_of(name):
            present = self.catalog.catalog.collection(name)
            asked: int | None = request.params.get("replicas")
            await self._set_replicas(present, asked or present.replicas or self.node.settings.query_node.replicas or 1)
        return None

    async def _release(self, request: Request) -> Answer:
        name: str = request.params["collection"]
        async with self._ddl_of(name):
            await self._set_replicas(self.catalog.catalog.collection(name), 0)
        return None

    async def _set_replicas(self, collection: Collection, replicas: int) -> None:
        if collection.replicas != replicas:
            await self.catalog.append({"kind": "load", "id": collection.id, "replicas": replicas})

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
        await self.owners.announce("drop", collection, deadline_s=DDL_DEADLINE_S)
        for role in ("querynode", "datanode"):
            await self._ask_all(role, "release", {"collection": collection.to_wire()})
        await self.catalog.append({"kind": "dropped", "id": collection.id})

    async def _ask_all(self, role: str, method: str, params: Params) -> None:
        """Have all members with `role` answer, or cease to be members."""
        asked = {
            member.incarnation: self._ask_member(role, method, member.incarnation, params)
            for member in self.node.cluster.members(role)
        }
        await asyncio.gather(*asked.values())

    async def _ask_member(self, role: str, method: str, incarnation: str, params: Params) -> None:
        cluster = self.node.cluster
        while cluster.has(incarnation):
            asking = asyncio.create_task(
                self.rpc.call(role, method, {"to": incarnation, **params}, deadline_s=DDL_DEADLINE_S)
            )
            try:
                while not asking.done() and cluster.has(incarnation):
                    await first_of(asyncio.wait([asking]), cluster.changed())
                if asking.done():
                    asking.result()
                    return
            finally:
                await ended(asking)

    async def _describe(self, request: Request) -> Answer:
        return {"collection": self.catalog.catalog.collection(request.params["collection"]).to_wire()}

    async def _list(self, _: Request) -> Answer:
        return {"collections": sorted(c.name for c in self.catalog.catalog.collections.values() if c.state == READY)}

    async def _cut(self, request: Request) -> Answer:
        return {"time": await self._cuts.draw(self.catalog.catalog.collection(request.params["collection"]))}

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
