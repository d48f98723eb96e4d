"""QueryNode: answers search and query at the requested freshness, and reports how fresh the result is."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal, NotRequired, cast

import msgpack
import pyarrow as pa
from pydantic import PlainValidator
from typing_extensions import TypedDict

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import add_ms, physical_ms
from ...runtime.cluster.pressure import ROW_MEMORY
from ...runtime.errors import CollectionNotLoaded, InvalidRequest, TidewalError
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import DECODE_ERRORS, Record, RecordType, encode
from ...runtime.log.wal import Append, Payload
from ...runtime.rpc.protocol import Params
from ...runtime.rpc.server import Request
from ..collection_reader import CollectionReaderRole, Pipeline
from ..metrics import measure_limit
from ..node import Node
from ..requests import Answer, Method, Number, OfCollection
from .past_rows import PastRows
from .pipeline import RowPipeline
from .query import Request as Asked
from .query import from_wire, run
from .row_store import RowMemory

# A collection up to this size is scanned on the loop, in some ms; a larger one on a snapshot and on a thread, which
# must acquire Python's lock from a busy loop again and again (measured under full write load: 6 ms become 30).
ON_LOOP_BYTES_MAX = 128 * 1024 * 1024
AHEAD_MS = 10_000  # so far ahead of the log a time to read at may lie: another node may have told it
EVENTS_INTERVAL_S = 1.0
EVENTS_PENDING_MAX = 10_000


class FreshParams(TypedDict):
    """A collection and the freshness of its result. `session_ts` is the time of the client's last write. With `at` the
    result is as of that time, whatever the consistency."""

    collection: str
    consistency: Literal["strong", "session", "bounded", "eventually"]
    at: NotRequired[Number | None]
    session_ts: NotRequired[Number]
    staleness_ms: NotRequired[Number]


class QueryParams(FreshParams):
    """A query or a search."""

    request: Annotated[Asked, PlainValidator(from_wire)]


class GetParams(FreshParams):
    """A get by keys, which are in the body."""

    columns: NotRequired[list[str] | None]


class QueryNode(CollectionReaderRole):
    """Holds the current rows of every collection in memory."""

    role = "querynode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._events: list[Params] = []
        self._past = PastRows(self._now_s)
        self._memory = RowMemory(node.settings.query_node.memory_limit_bytes, self._past.reclaim)

    def handlers(self) -> dict[str, Method]:
        return {
            **super().handlers(),
            "query": Method(self._query, QueryParams),
            "get": Method(self._get, GetParams),
            "stats": Method(self._stats, FreshParams),
            "load_state": Method(self._load_state, OfCollection),
        }

    async def prepare(self) -> None:
        await super().prepare()
        node, memory, past = self.node, self._memory, self._past
        measure_limit(node.cluster, node.metrics, ROW_MEMORY, lambda: (memory.used - past.bytes, memory.limit_bytes))
        await self.node.make_event_channel(self.node.names.query_events)
        self.spawn_task(self.owners.run(), name="owners")
        self.spawn_task(self._publish_events(), name="query events")

    def serves(self, collection: Collection) -> bool:
        return collection.replicas > 0

    async def find_pipeline(self, name: str) -> Pipeline:
        known = self.catalog.catalog.collections.get(name)
        if known is not None and not self.serves(known):
            known = (await self.catalog.catch_up()).collection(name)
            if not self.serves(known):
                raise CollectionNotLoaded(f"collection {name} is released: load_collection loads it", collection=name)
        return await super().find_pipeline(name)

    def pipeline(self, collection: Collection) -> RowPipeline:
        return RowPipeline(self, collection, self._memory, self._past)

    def _now_s(self) -> float:
        return self.node.clock.clock.monotonic()

    # ---- queries ----------------------------------------------------------------------------------------------------

    async def _query(self, request: Request) -> Answer:
        asked, at = request.params["request"], request.params.get("at")
        pipeline, waited_ms = await self._fresh(request.params)
        started = self._now_s()
        stores = await pipeline.stores_at(at)
        tsafe = pipeline.tsafe if at is None else at
        if sum(store.bytes for store in stores) <= ON_LOOP_BYTES_MAX:
            table = run([store.view(at) for store in stores], asked)
        else:
            table = await self.node.blocking(partial(run, [store.snapshot(at) for store in stores], asked))
        return self._answer_with(request, table, pipeline, tsafe, waited_ms, started)

    async def _get(self, request: Request) -> Answer:
        keys, at = _keys(request.body), request.params.get("at")
        pipeline, waited_ms = await self._fresh(request.params)
        _check_keys(keys, pipeline.collection)
        started = self._now_s()
        columns = request.params.get("columns")
        table = pa.concat_tables([store.get(keys, columns, at) for store in await pipeline.stores_at(at)])
        return self._answer_with(request, table, pipeline, pipeline.tsafe if at is None else at, waited_ms, started)

    async def _stats(self, request: Request) -> Answer:
        """Row versions applied by operation, and current rows."""
        pipeline, _ = await self._fresh(request.params)
        versions: dict[str, int] = {}
        for store in pipeline.stores:
            for op, count in store.versions.items():
                versions[op] = versions.get(op, 0) + count
        rows = sum(store.row_count for store in pipeline.stores)
        return {"versions": versions, "rows": rows, "tsafe": pipeline.tsafe}

    async def _load_state(self, request: Request) -> Answer:
        """Whether the rows of a collection are in memory, as of a catalog that is read now."""
        collection = (await self.catalog.catch_up()).collection(request.params["collection"])
        if not collection.replicas:
            return {"state": "NotLoad", "replicas": 0}
        pipeline = await self.find_pipeline(collection.name)
        assert isinstance(pipeline, RowPipeline)
        return {"state": "Loaded" if pipeline.tsafe else "Loading", "replicas": collection.replicas}

    def _answer_with(
        self, request: Request, table: pa.Table, pipeline: RowPipeline, tsafe: int, waited_ms: float, started: float
    ) -> tuple[Params, memoryview]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        took_ms = (self._now_s() - started) * 1000
        metrics = self.node.metrics
        metrics.histogram("querynode_sq_wait_tsafe_latency", query_type=request.method).observe(waited_ms)
        metrics.histogram("querynode_sq_req_latency", query_type=request.method, status="success").observe(
            took_ms + waited_ms
        )
        age_ms = max(0, physical_ms(self.node.clock.last) - physical_ms(tsafe))
        freshness = {"tsafe": tsafe, "age_ms": age_ms, "waited_ms": waited_ms, "took_ms": took_ms}
        if len(self._events) < EVENTS_PENDING_MAX:
            about = {"collection": pipeline.collection.name, "kind": request.method, "rows": table.num_rows}
            self._events.append({**about, **freshness, "consistency": request.params["consistency"]})
        return freshness, memoryview(sink.getvalue())

    # ---- freshness --------------------------------------------------------------------------------------------------

    async def _fresh(self, params: Params) -> tuple[RowPipeline, float]:
        """The pipeline of the collection, once it is as fresh as requested; and how long that took, in ms."""
        started = self._now_s()
        pipeline = await self.find_pipeline(params["collection"])
        assert isinstance(pipeline, RowPipeline)
        await pipeline.wait_for(await self._guarantee(pipeline, params))
        return pipeline, (self._now_s() - started) * 1000

    async def _guarantee(self, pipeline: RowPipeline, params: Params) -> int:
        """The timestamp up to which the result must reflect the log."""
        at: int | None = params.get("at")
        if at is not None:
            return await self._snapshot_time(pipeline, at)
        consistency = params["consistency"]
        if consistency == "strong":
            return await pipeline.present()
        if consistency == "session":
            written: int = params.get("session_ts", 0)
            if not (self.node.clock.believes(written) or written <= self._granted_to(pipeline.collection)):
                raise InvalidRequest(f"session_ts {written} lies days ahead: no write can have had that time")
            if written > pipeline.tsafe:
                await pipeline.present()  # sooner than the next tick
            return written
        if consistency == "bounded":
            staleness_ms = params.get("staleness_ms") or self.node.settings.common.graceful_time
            return add_ms(self.node.clock.now(), -staleness_ms)
        return 1  # eventually: at least what the table and the log held when this node started

    async def _snapshot_time(self, pipeline: RowPipeline, at: int) -> int:
        """The time `at`, if it lies between the collection's creation and now."""
        collection = pipeline.collection
        if at < collection.created_ts:
            raise InvalidRequest(
                f"at {at} there was no collection {collection.name}: it was created at {collection.created_ts}"
            )
        if at > pipeline.tsafe and at > add_ms(await pipeline.present(), AHEAD_MS):  # sooner than the next tick
            raise InvalidRequest(f"at {at} lies ahead of the log: give the time of an answer, of a write, or of a cut")
        return at

    def _granted_to(self, collection: Collection) -> int:
        """The highest timestamp that a write to the collection may have: the clock of a new owner passes it only once
        it acquires the channels."""
        return max(self.catalog.granted(pchannel_of(vchannel)).limit for vchannel in collection.vchannels)

    async def _publish_events(self) -> None:
        """Append an event of the queries to `query_events` every second."""
        while True:
            await asyncio.sleep(EVENTS_INTERVAL_S)
            if not self._events:
                continue
            events, self._events = self._events, []
            body = cast(bytes, msgpack.packb({"v": 1, "queries": events}))
            ts = self.node.clock.now()
            record = Record(RecordType.QUERY, ts=ts, tags={"queries": len(events)}, body=body)
            entry = Append(self.node.names.query_events, encode(record), ts)
            try:
                await self.node.wal.append_many([entry])
            except TidewalError as error:
                if not error.retryable:
                    raise


def _keys(body: Payload) -> list[object]:
    try:
        keys = cast(object, msgpack.unpackb(body))
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the keys cannot be read: {error}") from error
    if not isinstance(keys, list):
        raise InvalidRequest("get takes a list of keys")
    return cast("list[object]", keys)


def _check_keys(keys: list[object], collection: Collection) -> None:
    key = collection.schema.key
    for number, value in enumerate(keys):
        fits = type(value) is str if key.type == "varchar" else type(value) is int and -(2**63) <= value < 2**63
        if not fits:
            raise InvalidRequest(f"key {number} is {value!r}; {key.name!r} is {key.type}")
