"""What DataNode and QueryNode have in common: for each collection a pipeline that reads its vchannels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Protocol

import pyarrow as pa
from typing_extensions import TypedDict

from ..runtime.arrow import decode_rows
from ..runtime.catalog import DROPPING, READY, Collection
from ..runtime.errors import (
    BadRecord,
    CorruptLog,
    FormatTooNew,
    InvalidRequest,
    InvalidSchema,
    PositionLost,
    TidewalError,
)
from ..runtime.factory import Factory
from ..runtime.heartbeats import announcements
from ..runtime.messages import Position
from ..runtime.names import physical
from ..runtime.record import Record, decode, encode
from ..runtime.rpc import Request
from ..runtime.tt_stream import TtMsgStream
from ..runtime.wal import Entry, From, FromTime
from .node import Node
from .requests import Answer, Method, WireCollection
from .role import Role

UNREADABLE_FIRST_S = 1.0  # until a collection whose tables cannot be read is looked at again
UNREADABLE_MAX_S = 60.0
LOSSES_MAX = 3  # how often a collection that retention was faster than begins anew at once
TABLE_ERRORS = (CorruptLog, FormatTooNew, InvalidSchema)  # what is wrong with the tables of one collection

_log = logging.getLogger("tidewal.collections")


class Pipeline(Protocol):
    """One collection's reader. `run` goes on until it is cancelled."""

    collection: Collection

    async def run(self) -> None: ...

    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """What a channel's owner says about time; for channels of other collections it means nothing."""
        ...


class ReleaseParams(TypedDict):
    """The collection, which is being dropped."""

    collection: WireCollection


class Follower(Role):
    """Runs a pipeline for every collection of the catalog that is ready, and passes the owners' heartbeats on."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._pipelines: dict[int, Pipeline] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unreadable: dict[int, TidewalError] = {}  # collections whose tables are, and why

    def pipeline(self, collection: Collection) -> Pipeline:
        """A new pipeline for `collection`."""
        raise TypeError(f"{type(self).__name__} says nothing about pipelines")

    async def forget(self, collection: Collection) -> None:
        """The collection was dropped and its pipeline has ended: let go of what is left of it."""

    def handlers(self) -> dict[str, Method]:
        return {"release": Method(self._release, ReleaseParams)}

    async def prepare(self) -> None:
        await super().prepare()
        self.spawn_task(self._watch(), name="collections")
        self.spawn_task(self._listen(), name="heartbeats")

    async def _watch(self) -> None:
        while True:
            self._start_pipelines()
            await self.catalog.changed()

    def _start_pipelines(self) -> None:
        for collection in list(self.catalog.catalog.collections.values()):
            if collection.state == READY and collection.id not in self._pipelines:
                self._pipelines[collection.id] = self.pipeline(collection)
                self.spawn_task(self._run(collection.id), name=f"{self.role} {collection.name}")

    async def find_pipeline(self, name: str) -> Pipeline:
        """The pipeline of a collection. Raises `CollectionNotFound`, and what is wrong with its tables."""
        collection = self.catalog.catalog.collections.get(name)
        if collection is None or collection.id not in self._pipelines:
            collection = (await self.catalog.catch_up()).collection(name)
            self._start_pipelines()
        if collection.id in self._unreadable:
            raise self._unreadable[collection.id]
        return self._pipelines[collection.id]

    async def _run(self, id: int) -> None:
        """Run a pipeline until it ends. Tables that cannot be read are the matter of their collection alone: it says
        so to every question, and begins anew now and then, for somebody may have mended them. What the log has
        forgotten before it was read (`PositionLost`) the tables have by now, so the pipeline begins anew with them at
        once; where that does not help, `LOSSES_MAX` times, the rows are gone, and it is the same as above. What it met
        before it ran for `UNREADABLE_MAX_S` is over."""
        collection = self._pipelines[id].collection
        now = asyncio.get_running_loop().time
        pause_s, losses = UNREADABLE_FIRST_S, 0
        while id in self._pipelines:
            self._tell_unreadable(collection, None)
            began_s = now()
            try:
                await self._as_task(id, self._pipelines[id].run())
                return
            except (PositionLost, *TABLE_ERRORS) as error:
                if now() - began_s > UNREADABLE_MAX_S:
                    pause_s, losses = UNREADABLE_FIRST_S, 0
                losses += isinstance(error, PositionLost)
                at_once = isinstance(error, PositionLost) and losses <= LOSSES_MAX
                again_s = 0 if at_once else pause_s
                _log.error("%s of %s stops, trying again in %g s: %s", self.role, collection.name, again_s, error)
                if not at_once:
                    self._tell_unreadable(collection, error)
                    pause_s = min(2 * pause_s, UNREADABLE_MAX_S)
            await self._as_task(id, asyncio.sleep(again_s))
            if id in self._pipelines:  # not released
                self._pipelines[id] = self.pipeline(collection)

    def _tell_unreadable(self, collection: Collection, error: TidewalError | None) -> None:
        labels = {"collection_name": collection.name, "role_name": self.role}
        self.node.metrics.gauge("wal_collection_unreadable", **labels).set(error is not None)
        self._unreadable.pop(collection.id, None)
        self.node.unreadable.pop((self.role, collection.name), None)
        if error is not None:
            self._unreadable[collection.id] = error
            self.node.unreadable[self.role, collection.name] = error.message

    async def _as_task(self, id: int, work: Coroutine[object, object, None]) -> None:
        """Run what a pipeline does as a task of its own, so that a release can end it without ending the actor."""
        task = self._tasks[id] = asyncio.create_task(work)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _release(self, request: Request) -> Answer:
        catalog = await self.catalog.catch_up()  # so that the pipeline is not started again
        collection = catalog.by_id(request.params["collection"].id)
        if collection is None:
            return None  # an old request: the name may be another collection's by now
        if collection.state != DROPPING:
            raise InvalidRequest(f"collection {collection.name} is not being dropped")
        self._pipelines.pop(collection.id, None)
        task = self._tasks.pop(collection.id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._tell_unreadable(collection, None)
        await self.forget(collection)
        self.node.metrics.forget("collection_name", collection.name)
        for vchannel in collection.vchannels:
            self.node.metrics.forget("channel_name", vchannel)
        return None

    async def _listen(self) -> None:
        await self.node.make_heartbeats()
        async for entries in self.node.wal.read(self.node.names.heartbeats, From.EARLIEST):
            for entry in entries:
                try:
                    announced = announcements(decode(entry.payload))
                    for told in announced:
                        if not self.catalog.granted(told.channel).covers(told.term, told.time):
                            raise BadRecord(
                                f"{told.channel}: no owner of term {told.term} may promise that", reason="grant"
                            )
                except BadRecord as error:  # another heartbeat follows
                    self.dead_letters.bad(self.node.names.heartbeats, entry, error)
                    continue
                for told in announced:
                    for pipeline in self._pipelines.values():
                        pipeline.announce(*told)


def rows_of(role: Follower, collection: Collection, record: Record) -> pa.RecordBatch | None:
    """The rows of a record; None when they cannot be read, and then they are among the dead letters."""
    try:
        return decode_rows(record.body, collection.schema.row_arrow())
    except BadRecord as error:
        entry = Entry(record.id, record.ts, encode(record))
        role.dead_letters.bad(physical(record.vchannel), entry, error)
        return None


def pchannels_of(collection: Collection) -> list[str]:
    """The physical channels of a collection, sorted."""
    return sorted({physical(vchannel) for vchannel in collection.vchannels})


def holder(collection: Collection) -> str:
    """Who holds the log for the rows that are not in the collection's table yet: set by MixCoord before the first row,
    moved on by each flush, given up when the collection is dropped."""
    return f"datanode-{collection.id}"


def open_stream(role: Follower, collection: Collection, after: int, stored: Sequence[Position] = ()) -> TtMsgStream:
    """The messages of `collection` with ts > `after`.

    Behind a table they begin at its positions, `stored` together with the T `after`: reading raises `PositionLost` when
    retention has removed what comes next. Without (nothing is stored yet, shards are stored up to different times, or
    another tool has removed the positions) they begin at that time, and only while a hold keeps what lies behind it is
    nothing missing.
    """
    channels = pchannels_of(collection)
    node = role.node
    factory = Factory(node.wal, node.clock, node.settings, dead_letters=role.dead_letters, grants=role.catalog)
    stream = factory.tt_stream(role.role, vchannels=collection.vchannels)
    start = FromTime(max(after, collection.created_ts - 1))
    stream.as_consumer(channels, start, fences=role.catalog.catalog.fences(channels))
    if stored and after >= collection.created_ts:  # else the table is older than the collection, or empty
        # One that was stored with a later T lies behind messages that are wanted.
        positions = {at.channel: at for at in stored if at.timestamp == after}
        if positions.keys() == set(channels):
            stream.seek(positions.values())
    return stream
