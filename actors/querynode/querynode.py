"""QueryNode: answers search and query at the requested freshness, and reports how fresh the result is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

import msgpack
import pyarrow as pa

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import physical_ms
from ...runtime.cluster.replica_order import replica_order
from ...runtime.errors import CollectionNotFound, DeadlineExceeded, InvalidRequest, Lagging, TidewalError
from ...runtime.log.record import DECODE_ERRORS, Record, RecordType, encode
from ...runtime.log.wal import Append, Payload
from ...runtime.ownership import SyncPoint
from ...runtime.rpc.protocol import Params
from ...runtime.rpc.server import Request
from ..node import Node
from ..requests import Answer, Method, Nothing
from .fan_out import FanOut
from .loaded_collections import LoadedCollections, check_loaded
from .part_question import (
    OPS,
    ROWS_COLUMN,
    AnyRequest,
    GetRequest,
    StatsRequest,
    decoded_tables,
    encoded_table,
    encoded_tables,
    looked_up,
    merged_answers,
    packed,
    question_of,
    run_each,
    unpacked,
)
from .peers import Peers, SeenRequests
from .pipeline import RowPipeline
from .query import run
from .question_time import QuestionTime
from .requests import FreshParams, GetParams, PartParams, QueryParams, point_to_wire
from .row_store import RowStore
from .view import ShardView

T = TypeVar("T")

# A collection up to this size is scanned on the loop, in some ms; a larger one on a snapshot and on a thread, which
# must acquire Python's lock from a busy loop again and again (measured under full write load: 6 ms become 30).
ON_LOOP_BYTES_MAX = 128 * 1024 * 1024
FAN_OUT_S = 60.0  # for all parts of a question; the client has a deadline of its own
REACH_S = 0.25  # for the log to be read up to the time of a question, until another node is asked besides
EVENTS_INTERVAL_S = 1.0
EVENTS_PENDING_MAX = 10_000


class _Result(NamedTuple):
    """What a question is answered with: everything up to `tsafe` is in it. When it arrived, and when its freshness was
    reached."""

    table: pa.Table
    collection: Collection
    tsafe: int
    began_s: float
    asked_s: float


class QueryNode(LoadedCollections):
    """Answers questions about collections. What this node has in memory it answers itself; for the rest it asks the
    QueryNodes that have it, all as of one time, and merges their results.

    Of several QueryNodes the first in the rendezvous order of a client answers its questions. Where that one is silent
    the second does, once the client repeats a question.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._events: list[Params] = []
        self._fan_outs = node.metrics.counter("querynode_fan_out_total")
        self._peers = Peers(self.rpc, self.role, self.now_s)
        self._repeated = SeenRequests()
        self._time = QuestionTime(
            node.clock, self.catalog, self.owners, node.settings.common.graceful_time, self._announce_present
        )

    def handlers(self) -> dict[str, Method]:
        return {
            **super().handlers(),
            "query": Method(self._query, QueryParams),
            "get": Method(self._get, GetParams),
            "stats": Method(self._stats, FreshParams),
            "part": Method(self._part, PartParams),
            "ping": Method(self._ping, Nothing),
        }

    async def prepare(self) -> None:
        await super().prepare()
        await self.node.make_event_channel(self.node.names.query_events)
        self.spawn_task(self.owners.run(), name="owners")
        self.spawn_task(self._publish_events(), name="query events")

    async def forget(self, collection: Collection) -> None:
        self._time.forget(collection)

    # ---- who answers ------------------------------------------------------------------------------------------------

    def answers(self, request: Request) -> bool:
        """Of two nodes that may answer, the second looks first whether the other one does (`due`). A node that is cut
        off from the log past its lease leaves questions to others."""
        if not self.node.cluster.has_other(self.role):
            return True
        if self.doubtful:
            return False
        first, second = self._askable(request.client)
        own = self.node.incarnation
        return own == first or (own == second and self._repeated.add(request))

    def due(self, request: Request) -> Sequence[Request]:
        first, second = self._askable(request.client)
        if "to" in request.params or second != self.node.incarnation:
            return [request]
        self.spawn_task(self._take_over(request, first), name="take over")
        return []

    def _askable(self, client: str) -> tuple[str, str]:
        """The nodes that are to answer a client: the second where the first does not."""
        order = [*replica_order(client, self.node.cluster.members(self.role)), "", ""]
        return order[0], order[1]

    async def _take_over(self, request: Request, first: str) -> None:
        if await self._peers.is_silent(first):
            self._serve(request)
        else:
            request.ignore()

    async def _ping(self, _: Request) -> Answer:
        return None

    # ---- questions --------------------------------------------------------------------------------------------------

    async def _query(self, request: Request) -> Answer:
        return self._answer_with(request, await self._result(request.params, request.params["request"]))

    async def _get(self, request: Request) -> Answer:
        asked = GetRequest(_keys(request.body), request.params.get("columns"))
        return self._answer_with(request, await self._result(request.params, asked))

    async def _stats(self, request: Request) -> Answer:
        """Row versions applied by operation, and current rows."""
        found = await self._result(request.params, StatsRequest())
        [row] = found.table.to_pylist()
        return {"versions": {op: row[op] for op in OPS}, "rows": row[ROWS_COLUMN], "tsafe": found.tsafe}

    async def _result(self, params: Params, asked: AnyRequest) -> _Result:
        began_s = self.now_s()
        collection = await self.find_loaded(params["collection"])
        if isinstance(asked, GetRequest):
            _check_keys(asked.keys, collection)
        whole = self._whole(collection)
        if whole is not None:
            try:
                return await self._result_of_whole(whole, collection, params, asked, began_s)
            except Lagging:
                if self._whole(collection) is whole:
                    raise
        return await self._result_of_parts(collection, params, asked, began_s)

    def _whole(self, collection: Collection) -> RowPipeline | None:
        """The pipeline that has all rows of `collection`, or is to get them and no other node has them. Raises what is
        wrong with it."""
        parts = self.parts(collection.id)
        alone = not self.node.cluster.has_other(self.role)
        if len(parts) != 1 or len(parts[0].stores) != collection.shards or not (parts[0].vchannels or alone):
            return None
        if error := self.wrong_with(parts[0]):
            raise error
        return parts[0]

    async def _result_of_whole(
        self, whole: RowPipeline, collection: Collection, params: Params, asked: AnyRequest, began_s: float
    ) -> _Result:
        """Raises `Lagging` also where vchannels of `whole` were handed over meanwhile."""
        at: int | None = params.get("at")
        time, _ = await self._time.least(collection, params, whole.tsafe)
        await whole.wait_for(time)
        asked_s = self.now_s()
        stores = await whole.stores_at(at)
        if len(stores) != collection.shards:
            raise Lagging(f"not all of {collection.name} is on {self.node.name} any more; retry")
        tsafe = whole.tsafe if at is None else at
        return _Result(await self._computed(stores, asked, at), collection, tsafe, began_s, asked_s)

    async def _result_of_parts(
        self, collection: Collection, params: Params, asked: AnyRequest, began_s: float
    ) -> _Result:
        """Ask for each vchannel where its rows are, all as of one time."""
        question = question_of(asked, collection.schema)
        reached = min((part.tsafe for part in self.parts(collection.id)), default=0)
        at, present = await self._time.common(collection, params, reached)
        asked_s = self.now_s()
        ask = partial(self._ask_node, collection, question, at, present)
        fan_out = FanOut(collection.vchannels, partial(self._order, collection), ask, self._is_lost)
        try:
            async with asyncio.timeout(FAN_OUT_S):
                tables = await fan_out.run()
        except TimeoutError:
            raise DeadlineExceeded(
                f"not all vchannels of {collection.name} could be asked within {FAN_OUT_S:g} s"
            ) from None
        self._fan_outs.inc()
        return _Result(merged_answers(asked, collection.schema, tables), collection, at, began_s, asked_s)

    def _order(self, collection: Collection, vchannel: str) -> Sequence[str]:
        """The nodes to ask for a vchannel: this one where it has the rows, and those that were silent just now last.
        Raises `CollectionNotFound` and `CollectionNotLoaded` where nobody is to have it any more."""
        check_loaded(collection.name, self.catalog.catalog.by_id(collection.id))
        self._assignment.refresh()
        own = self.node.incarnation if any(vchannel in part.vchannels for part in self.parts(collection.id)) else ""
        return sorted(self._assignment.order(vchannel), key=lambda node: (node != own, self._peers.was_silent(node)))

    async def _is_lost(self, node: str) -> bool:
        if node == self.node.incarnation:
            return False
        return not self.node.cluster.has(node) or await self._peers.is_silent(node)

    async def _ask_node(
        self, collection: Collection, question: AnyRequest, at: int, present: SyncPoint | None, node: str,
        vchannels: Sequence[str],
    ) -> Mapping[str, pa.Table]:  # fmt: skip
        if node == self.node.incarnation:
            return await self._results_here(collection, vchannels, question, at, present)
        about = {"id": collection.id, "vchannels": list(vchannels), "at": at, "present": point_to_wire(present)}
        params = {"to": node, **about}
        reply = await self.rpc.call(self.role, "part", params, packed(question), deadline_s=FAN_OUT_S)
        return decoded_tables(reply.values["sizes"], reply.body)

    # ---- what is here -----------------------------------------------------------------------------------------------

    async def _part(self, request: Request) -> Answer:
        """Answer for those of the vchannels whose rows are here."""
        params, question = request.params, unpacked(request.body)
        collection = self.catalog.catalog.by_id(params["id"]) or (await self.catalog.catch_up()).by_id(params["id"])
        if collection is None:
            raise CollectionNotFound("the collection that is asked about was dropped")
        if isinstance(question, GetRequest):
            _check_keys(question.keys, collection)
        found = await self._results_here(collection, params["vchannels"], question, params["at"], params["present"])
        sizes, body = encoded_tables(found)
        return {"sizes": sizes}, body

    async def _results_here(
        self, collection: Collection, vchannels: Sequence[str], question: AnyRequest, at: int, present: SyncPoint | None
    ) -> Mapping[str, pa.Table]:
        """The results for those of `vchannels` whose rows are here. Raises `Lagging` where they are not read up to `at`
        soon, and, where there are none, why."""
        wanted, found = set(vchannels), dict[str, pa.Table]()
        error: TidewalError | None = None
        for part in self.parts(collection.id):
            if wanted.isdisjoint(part.stores):
                continue
            wrong = self.wrong_with(part)
            if wrong is not None or wanted.isdisjoint(part.vchannels):
                error = error or wrong
                continue
            if present is not None:
                part.announce(self._as_granted(present))
            await self._reach(part, at)
            stores = {each: store for each, store in (await part.stores_at(at)).items() if each in wanted}
            found |= await self._computed_each(stores, question, at)
        if error is not None and not found:
            raise error
        return found

    def _as_granted(self, present: SyncPoint) -> SyncPoint:
        """`present` without what no owner may promise: another process has sent it."""
        granted = self.catalog.granted
        ends = {name: end for name, end in present.channels.items() if granted(name).covers(end.term, present.time)}
        return present._replace(channels=ends)

    async def _reach(self, part: RowPipeline, at: int) -> None:
        """Wait for `at` a little: another node may be further."""
        try:
            async with asyncio.timeout(REACH_S):
                await part.wait_for(at)
        except TimeoutError:
            raise Lagging(f"{part.collection.name} is not read up to {at} yet on {self.node.name}; retry") from None

    def _announce_present(self, collection: Collection, present: SyncPoint) -> None:
        for part in self.parts(collection.id):
            part.announce(present)

    # ---- computing --------------------------------------------------------------------------------------------------

    async def _computed(self, stores: Mapping[str, RowStore], asked: AnyRequest, at: int | None) -> pa.Table:
        """The result over all these stores of a collection."""
        if isinstance(asked, GetRequest | StatsRequest):
            schema = next(iter(stores.values())).schema
            return merged_answers(asked, schema, list(looked_up(stores, asked, at).values()))
        return await self._on_views(stores, at, lambda views: run(list(views.values()), asked))

    async def _computed_each(
        self, stores: Mapping[str, RowStore], asked: AnyRequest, at: int
    ) -> Mapping[str, pa.Table]:
        """The result for each of these stores."""
        if isinstance(asked, GetRequest | StatsRequest):
            return looked_up(stores, asked, at)
        return await self._on_views(stores, at, partial(run_each, asked=asked))

    async def _on_views(
        self, stores: Mapping[str, RowStore], at: int | None, compute: Callable[[Mapping[str, ShardView]], T]
    ) -> T:
        if sum(store.bytes for store in stores.values()) <= ON_LOOP_BYTES_MAX:
            return compute({vchannel: store.view(at) for vchannel, store in stores.items()})
        snapshots = {vchannel: store.snapshot(at) for vchannel, store in stores.items()}
        return await self.node.blocking(partial(compute, snapshots))

    def _answer_with(self, request: Request, found: _Result) -> tuple[Params, memoryview]:
        took_ms, waited_ms = (self.now_s() - found.asked_s) * 1000, (found.asked_s - found.began_s) * 1000
        metrics = self.node.metrics
        metrics.histogram("querynode_sq_wait_tsafe_latency", query_type=request.method).observe(waited_ms)
        metrics.histogram("querynode_sq_req_latency", query_type=request.method, status="success").observe(
            took_ms + waited_ms
        )
        age_ms = max(0, physical_ms(self.node.clock.last) - physical_ms(found.tsafe))
        freshness = {"tsafe": found.tsafe, "age_ms": age_ms, "waited_ms": waited_ms, "took_ms": took_ms}
        if len(self._events) < EVENTS_PENDING_MAX:
            about = {"collection": found.collection.name, "kind": request.method, "rows": found.table.num_rows}
            self._events.append({**about, **freshness, "consistency": request.params["consistency"]})
        return freshness, encoded_table(found.table)

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


def _check_keys(keys: Sequence[object], collection: Collection) -> None:
    key = collection.schema.key
    for number, value in enumerate(keys):
        fits = type(value) is str if key.type == "varchar" else type(value) is int and -(2**63) <= value < 2**63
        if not fits:
            raise InvalidRequest(f"key {number} is {value!r}; {key.name!r} is {key.type}")
