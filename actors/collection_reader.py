"""What DataNode and QueryNode have in common: for each collection a pipeline that reads its vchannels."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias, cast

import pyarrow as pa
from typing_extensions import TypedDict

from ..runtime.catalog.catalog import DROPPING, READY, Collection
from ..runtime.errors import (
    BadRecord,
    CorruptLog,
    DirectoryUnwritable,
    Fenced,
    FormatTooNew,
    InvalidRequest,
    InvalidSchema,
    PositionLost,
    PositionMismatch,
    TidewalError,
    Unavailable,
)
from ..runtime.log.heartbeats import Announcement, announcements
from ..runtime.log.names import pchannel_of
from ..runtime.log.record import Record, RecordType, decode, encode
from ..runtime.log.wal import Entry, From, FromTime
from ..runtime.rows.row_codec import decode_rows
from ..runtime.rpc.server import Request
from ..runtime.streams.dispatched_stream import DispatchedStream
from ..runtime.streams.messages import MsgPack, Position
from ..runtime.streams.pursuit import pursuit_of
from ..runtime.waiting import ended, first_of
from .metrics import dead_letters_from_zero
from .node import Node
from .pchannels import pchannels_of
from .requests import Answer, Method, WireCollection
from .role import Role

UNREADABLE_FIRST_S = 1.0  # until a collection whose tables cannot be read is looked at again
UNREADABLE_MAX_S = 60.0
LOSSES_MAX = 3  # how often a collection that retention was faster than begins anew at once
# The tables are of another collection or another log: they never take the rows of this one.
FOREIGN_TABLES = (InvalidSchema, PositionMismatch)
# What is wrong with the tables of one collection.
TABLE_ERRORS = (CorruptLog, FormatTooNew, DirectoryUnwritable, *FOREIGN_TABLES)

_log = logging.getLogger("tidewal.collections")


PartKey: TypeAlias = tuple[int, tuple[str, ...]]


def part_key(part: Collection) -> PartKey:
    """What tells the parts of collections apart: the id, and the vchannels."""
    return part.id, part.vchannels


class Pipeline(Protocol):
    """The reader of one collection, or of a part: of some of its vchannels, as if it had no others. `run` goes on until
    it is cancelled."""

    collection: Collection

    async def run(self) -> None: ...

    def end_series(self) -> None:
        """End what metrics show of it: it is not the node's any more."""


class ReleaseParams(TypedDict):
    """The collection, which is being dropped."""

    collection: WireCollection


class CollectionReaderRole(Role, ABC):
    """Runs a pipeline for each part of a collection of the catalog that is ready and that this node is to read. One
    such role of a node passes the owners' heartbeats on, for all."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._pipelines: dict[PartKey, Pipeline] = {}
        self._keys: defaultdict[int, list[PartKey]] = defaultdict(list)  # of the pipelines, by collection id
        self._tasks: dict[PartKey, asyncio.Task[None]] = {}
        self.started_ts: int = node.clock.now()
        self._unreadable: dict[PartKey, TidewalError] = {}  # why its tables cannot be read
        self._read: set[str] = set()  # the pchannels of all pipelines so far

    @abstractmethod
    def pipeline(self, part: Collection) -> Pipeline:
        """A new pipeline for this part of a collection."""

    @abstractmethod
    def missing(self, collection: Collection) -> Sequence[Collection]:
        """The parts of `collection` for which this node is to have pipelines, by the members that it knows of, and has
        none."""

    @abstractmethod
    def unwanted(self) -> Sequence[Pipeline]:
        """The pipelines that are to end now."""

    async def forget(self, collection: Collection) -> None:
        """Release what the role still holds of a dropped collection, whose pipeline has ended."""

    def handlers(self) -> dict[str, Method]:
        return {"release": Method(self._release, ReleaseParams)}

    async def prepare(self) -> None:
        await super().prepare()
        self.spawn_task(self._watch(), name="collections")
        self.spawn_task(self._listen(), name="heartbeats")

    async def _watch(self) -> None:
        seen: object = None
        while True:
            members = [(member.incarnation, member.draining) for member in self.node.cluster.members(self.role)]
            catalog = self.catalog.catalog
            found = catalog, catalog.collection_changes, catalog.wishes, members
            if found == seen:  # else there is something to do, which may have come while pipelines ended
                await first_of(self.catalog.changed(), self.node.cluster.changed())
                continue
            seen = found
            self._start_pipelines()
            for pipeline in self.unwanted():
                await self._end_pipeline(part_key(pipeline.collection))

    def _start_pipelines(self) -> None:
        for collection in list(self.catalog.catalog.collections.values()):
            for part in self.missing(collection) if collection.state == READY else ():
                self._pipelines[part_key(part)] = self.pipeline(part)
                self._keys[part.id].append(part_key(part))
                new = set(pchannels_of(part)) - self._read
                dead_letters_from_zero(self.node.metrics, new)
                self._read |= new
                self.spawn_task(self._run(part_key(part)), name=f"{self.role} {part.name}")

    def _keys_of(self, id: int) -> Sequence[PartKey]:
        """The keys of the pipelines of a collection."""
        return tuple(self._keys.get(id, ()))

    async def find_pipeline(self, name: str) -> Pipeline:
        """The pipeline of the collection `name`. Raises `CollectionNotFound`, and what is wrong with its tables."""
        collection = self.catalog.catalog.collections.get(name)
        if collection is None or part_key(collection) not in self._pipelines:
            collection = (await self.catalog.catch_up()).collection(name)
            self._start_pipelines()
        key = part_key(collection)
        if key in self._unreadable:
            raise self._unreadable[key]
        if key not in self._pipelines:
            raise Unavailable(f"another node serves {name} by now; retry", collection=name)
        return self._pipelines[key]

    async def _run(self, key: PartKey) -> None:
        """Run a pipeline until it ends, or its release cancels this. Tables that cannot be read stop their collection
        only: every request for it gets the error, and the pipeline starts again from time to time, since the tables may
        have been repaired: until it says that it reads the log (`loaded`), the collection stays unreadable. What
        retention has removed before it was read (`PositionLost`) is in the tables by now, so the pipeline starts again
        with them at once; where that has failed `LOSSES_MAX` times, the rows are gone, and the collection counts as
        unreadable. A run of more than `UNREADABLE_MAX_S` resets the pause and the count."""
        running = self._pipelines[key]
        self._tasks[key] = cast("asyncio.Task[None]", asyncio.current_task())
        collection = running.collection
        now = asyncio.get_running_loop().time
        pause_s, losses = UNREADABLE_FIRST_S, 0
        self._set_unreadable(collection, None)
        while True:
            began_s = now()
            try:
                await running.run()
                self.loaded(collection)  # it has ended with an error of its own, which its queries get
                return
            except Fenced as error:  # another node stores the collection, or has until now: begin with what it stored
                _log.warning("%s of %s begins anew: %s", self.role, collection.name, error)
                again_s = UNREADABLE_FIRST_S
            except (PositionLost, *TABLE_ERRORS) as error:
                await self._check_store(error)
                if now() - began_s > UNREADABLE_MAX_S:
                    pause_s, losses = UNREADABLE_FIRST_S, 0
                losses += isinstance(error, PositionLost)
                at_once = isinstance(error, PositionLost) and losses <= LOSSES_MAX
                again_s = 0 if at_once else pause_s
                _log.error("%s of %s stops, trying again in %g s: %s", self.role, collection.name, again_s, error)
                if not at_once:
                    error = _with_advice(collection, error)
                    self._set_unreadable(collection, error)
                    pause_s = min(2 * pause_s, UNREADABLE_MAX_S)
            if self._pipelines.get(key) is not running:  # it was released, and has failed as it ended
                return
            await asyncio.sleep(again_s)
            running = self._pipelines[key] = self.pipeline(collection)

    async def _check_store(self, error: TidewalError) -> None:
        """Raise `DirectoryUnwritable` where `error` is not the matter of one collection: it is the log's, or no tables
        can be written at all."""
        if isinstance(error, DirectoryUnwritable):
            if not str(error.path).startswith(f"{self.node.tables}/"):
                raise error
            await self.node.blocking(self.node.tables.prepare)

    def loaded(self, collection: Collection) -> None:
        """The pipeline of `collection` has its tables and reads the log behind them."""
        if part_key(collection) in self._unreadable:
            self._set_unreadable(collection, None)

    def _set_unreadable(self, collection: Collection, error: TidewalError | None) -> None:
        self._unreadable.pop(part_key(collection), None)
        if error is not None:
            self._unreadable[part_key(collection)] = error
        error = next((each for (id, _), each in self._unreadable.items() if id == collection.id), None)
        labels = {"collection_name": collection.name, "role_name": self.role}
        if error is not None:
            self.node.metrics.gauge("wal_collection_unreadable", **labels).set(1)
            self.node.unreadable[self.role, collection.name] = error
        elif self.node.unreadable.pop((self.role, collection.name), None) is not None:
            self.node.metrics.remove("wal_collection_unreadable", **labels)

    async def _release(self, request: Request) -> Answer:
        catalog = await self.catalog.catch_up()  # so that the pipeline is not started again
        collection = catalog.by_id(request.params["collection"].id)
        if collection is None:
            return None  # an old request: another collection may have the name by now
        if collection.state != DROPPING:
            raise InvalidRequest(f"collection {collection.name} is not being dropped")
        for key in self._keys_of(collection.id):
            await self._end_pipeline(key)
        await self.forget(collection)
        self.node.metrics.forget("collection_name", collection.name)
        for vchannel in collection.vchannels:
            self.node.metrics.forget("channel_name", vchannel)
        return None

    async def _end_pipeline(self, key: PartKey) -> None:
        pipeline = self._pipelines.pop(key, None)
        if pipeline is not None:
            pipeline.end_series()  # before others may begin for the same vchannels
            self._keys[key[0]].remove(key)
            if not self._keys[key[0]]:
                del self._keys[key[0]]
        task = self._tasks.pop(key, None)
        if task is not None:
            await ended(task)
        if pipeline is not None:
            self._set_unreadable(pipeline.collection, None)

    async def _listen(self) -> None:
        await self.node.make_heartbeats()
        async with self.node.dispatchers.listening:
            async for entries in self.node.wal.read(self.node.names.heartbeats, From.EARLIEST):
                for entry in entries:
                    await self._announce(entry)

    async def _announce(self, entry: Entry) -> None:
        """Pass a heartbeat on to the dispatchers of its channels."""
        try:
            batch = announcements(decode(entry.payload))
            refused = self._refused(batch)
            if refused is not None:  # heartbeats may be read further than the catalog
                with suppress(TidewalError):  # then the next one tells
                    await self.catalog.catch_up()
                refused = self._refused(batch)
            if refused is not None:
                raise BadRecord(
                    f"{refused.channel}: no owner of term {refused.term} may promise that time", reason="grant"
                )
        except BadRecord as error:  # another heartbeat follows
            self.dead_letters.bad(self.node.names.heartbeats, entry, error)
            return
        for announcement in batch:
            self.node.dispatchers.announce(*announcement)

    def _refused(self, batch: Sequence[Announcement]) -> Announcement | None:
        """The first of the announcements that no grant covers, as far as the catalog was read; None for none."""
        granted = self.catalog.granted
        return next((each for each in batch if not granted(each.channel).covers(each.term, each.time)), None)


def _with_advice(collection: Collection, error: TidewalError) -> TidewalError:
    """`error`, which has stopped the collection, as its requests get it."""
    if not isinstance(error, PositionLost):
        return error
    advice = "mount or restore the tables, which have what the log has no more, or drop the collection"
    return PositionLost(f"collection {collection.name}: {error.message}: {advice}", **error.fields)


class BeginningCheck:
    """Whether a collection that has nothing in its table is read from its first record on, where the catalog does not
    say where it begins. Where its tables are gone (a disk that is not mounted, a folder that was removed) and retention
    has removed from the log what they had, the rows that are left would look like all."""

    def __init__(self, collection: Collection, stored: int, now: int) -> None:
        """`stored` is the T of the table. At the time `now` the collection was ready, so its channels had their first
        records."""
        self.now: int = now
        self._collection = collection
        known = stored or collection.beginning is not None  # and reading from there raises `PositionLost`
        self._missing = set[str]() if known else set(collection.vchannels)  # whose first record was not read yet

    def check(self, pack: MsgPack) -> None:
        """Look at the next pack. Raises `PositionLost`."""
        if not self._missing:
            return
        for record in pack.messages:
            if record.type is RecordType.CREATE_COLLECTION:
                self._missing.discard(record.vchannel)
            elif record.vchannel in self._missing:
                raise self._lost()
        if self._missing and pack.end_ts >= self.now:
            raise self._lost()

    @property
    def is_done(self) -> bool:
        """Whether all of the collection is there, up to where it was read."""
        return not self._missing

    def _lost(self) -> PositionLost:
        vchannel = min(self._missing)
        return PositionLost(
            f"it has no tables, and the log has the beginning of {vchannel} no more",
            channel=pchannel_of(vchannel),
        )


def rows_of(role: CollectionReaderRole, collection: Collection, record: Record) -> pa.RecordBatch | None:
    """The rows of a record; None when they cannot be read: the record is a dead letter then."""
    try:
        return decode_rows(record.body, collection.schema.row_arrow())
    except BadRecord as error:
        entry = Entry(record.id, record.ts, encode(record))
        role.dead_letters.bad(pchannel_of(record.vchannel), entry, error)
        return None


def open_stream(
    role: CollectionReaderRole, collection: Collection, after: int, stored: Sequence[Position] = ()
) -> DispatchedStream:
    """The messages of `collection` with ts > `after`.

    Behind a table they begin at its positions, `stored` together with the T `after`, and where nothing is stored (0) at
    the beginning of the collection: reading raises `PositionLost` when retention has removed what comes next. Without
    (shards are stored up to different times, another tool has removed the positions, or the catalog does not say where
    the collection begins) they begin at that time, and only while a hold keeps what lies behind it is nothing missing.
    """
    channels = pchannels_of(collection)
    node = role.node
    beginning = collection.beginning
    if not after and beginning is not None:
        after = beginning.time
        stored = [
            Position(channel, id, term, cseq, after, node.wal.name)
            for channel, (term, cseq, id) in beginning.ends.items()
        ]
    stream = DispatchedStream(
        node.wal,
        node.dispatchers,
        collection.vchannels,
        group=role.role,
        on_bad=role.dead_letters.bad,
        on_late=role.dead_letters.late,
        grants=role.catalog,
        pursuit=pursuit_of(node.settings.mq, node.clock),
    )
    start = FromTime(max(after, collection.created_ts - 1))
    stream.as_consumer(channels, start, fences=role.catalog.catalog.fences(channels))
    if stored and after >= collection.created_ts:  # else the table is older than the collection, or empty
        # A position that was stored with a later T lies behind messages that are wanted.
        positions = {at.channel: at for at in stored if at.timestamp == after and at.channel in channels}
        if positions.keys() == set(channels):
            stream.seek(positions.values())
    return stream
