"""The rows that a QueryNode has in memory: of which vchannels, since when, and until when."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...runtime.catalog.catalog import READY, Collection
from ...runtime.cluster.pressure import LOADED_MAX, REPORTED, ROW_MEMORY
from ...runtime.cluster.state import LOADED, ROWS
from ...runtime.errors import CollectionNotFound, CollectionNotLoaded, TidewalError
from ...runtime.rpc.server import Request
from ..collection_reader import CollectionReaderRole, Pipeline, part_key
from ..metrics import measure_limit, watch_pending
from ..node import Node
from ..requests import Answer, Method, OfCollection
from .handover import Handover
from .metrics import watch_rows
from .past_rows import PastRows
from .pipeline import RowPipeline
from .readiness import LOADING, Readiness
from .replica_assignment import ReplicaAssignment
from .requests import HeldParams
from .row_store import RowMemory, RowStore


class LoadedCollections(CollectionReaderRole, ABC):
    """Has the rows of the vchannels that are this node's by the members of the cluster, and of those that were its own
    until other nodes have them. What becomes this node's at once is read by one pipeline."""

    role = "querynode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._past = PastRows(self.now_s)
        self._memory = RowMemory(node.settings.query_node.memory_limit_bytes, self._past.reclaim)
        self._assignment = ReplicaAssignment(node.cluster, self.catalog, self.role)
        self._handover = Handover(self, self._assignment, self.rpc, self.role, node.incarnation)

    def handlers(self) -> dict[str, Method]:
        return {
            **super().handlers(),
            "held": Method(self._held, HeldParams),
            "load_state": Method(self._load_state, OfCollection),
        }

    async def prepare(self) -> None:
        await super().prepare()
        node, memory, past = self.node, self._memory, self._past
        measure_limit(node.cluster, node.metrics, ROW_MEMORY, lambda: (memory.used - past.bytes, memory.limit_bytes))
        node.cluster.reports[LOADED] = self._loaded_where_memory_lacks
        node.cluster.reports[ROWS] = Readiness(self._states, node.clock.clock.wall_ms)
        self.node.before_leaving[self.role] = self._handover.until_replaced
        self.spawn_task(self._handover.run(), name="handover")
        self.spawn_task(past.run(), name="past rows")

    def _loaded_where_memory_lacks(self) -> list[int] | None:
        """The ids of the collections whose writes add to the rows here. From any thread."""
        ids = list(self._keys)
        named = self._memory.used > REPORTED * self._memory.limit_bytes and len(ids) <= LOADED_MAX
        return ids if named else None

    def _states(self) -> dict[str, str]:
        """Why each vchannel here cannot be asked for, "" where it can. From any thread."""
        return {vchannel: self._state(part, vchannel) for part in self._rows() for vchannel in list(part.stores)}

    def _state(self, part: RowPipeline, vchannel: str) -> str:
        error = self.wrong_with(part)
        return "" if vchannel in part.vchannels else LOADING if error is None else type(error).__name__

    def now_s(self) -> float:
        return self.node.clock.clock.monotonic()

    # ---- pipelines --------------------------------------------------------------------------------------------------

    def _start_pipelines(self) -> None:
        self._assignment.refresh()
        super()._start_pipelines()

    def pipeline(self, part: Collection) -> RowPipeline:
        whole = self.catalog.catalog.by_id(part.id) or part
        watch_rows(self.node.metrics, part.name, lambda: self._stores(part.id))
        watch_pending(
            self.node.metrics, self.role, part.name, lambda: sum(each.pending_bytes for each in self.parts(part.id))
        )
        return RowPipeline(self, whole, part.vchannels, self._memory, self._past)

    def _stores(self, id: int) -> list[RowStore]:
        return [store for part in self.parts(id) for store in part.stores.values()]

    def missing(self, collection: Collection) -> Sequence[Collection]:
        has = {vchannel for part in self.parts(collection.id) for vchannel in part.stores}
        new = tuple(vchannel for vchannel in self._assignment.own(collection) if vchannel not in has)
        return [replace(collection, vchannels=new)] if new else []

    def unwanted(self) -> Sequence[Pipeline]:
        return [part for part in self._rows() if not self._is_wanted(part)]

    def _is_wanted(self, part: RowPipeline) -> bool:
        """A part that others have by now is kept by vchannel, see `Handover`; unless it is of no use to them yet."""
        collection = self.catalog.catalog.by_id(part.collection.id)
        if collection is None or not collection.replicas:
            return False
        return bool(part.vchannels) or not set(self._assignment.own(collection)).isdisjoint(part.stores)

    def _rows(self) -> list[RowPipeline]:
        return [part for part in list(self._pipelines.values()) if isinstance(part, RowPipeline)]

    def parts(self, id: int) -> list[RowPipeline]:
        """The pipelines of the collection with this id."""
        found = map(self._pipelines.get, self._keys_of(id))
        return [part for part in found if isinstance(part, RowPipeline)]

    async def find_loaded(self, name: str) -> Collection:
        """The collection `name`, as the catalog has it. Raises `CollectionNotFound` and `CollectionNotLoaded`."""
        collection = self.catalog.catalog.collections.get(name)
        if collection is None or collection.state != READY or not collection.replicas:
            collection = (await self.catalog.catch_up()).collection(name)
        check_loaded(name, collection)
        if not self.parts(collection.id):
            self._start_pipelines()
        return collection

    def wrong_with(self, part: RowPipeline) -> TidewalError | None:
        """What is wrong with the tables of this part, or that memory lacks for its rows, if anything."""
        return self._unreadable.get(part_key(part.collection)) or part.failure

    # ---- what is there ----------------------------------------------------------------------------------------------

    def held(self) -> Sequence[tuple[Collection, Sequence[str]]]:
        """`Holdings.held`."""
        catalog = self.catalog.catalog
        ids = dict.fromkeys(part.collection.id for part in self._rows())
        return [(found, self._held_of(id)) for id in ids if (found := catalog.by_id(id)) is not None]

    def _held_of(self, id: int) -> list[str]:
        return [vchannel for part in self.parts(id) for vchannel in part.vchannels]

    async def discard(self, collection: Collection, vchannels: Iterable[str]) -> None:
        """`Holdings.discard`."""
        gone = set(vchannels)
        for part in self.parts(collection.id):
            for vchannel in gone.intersection(part.vchannels):
                part.discard(vchannel)
            if not part.stores:
                await self._end_pipeline(part_key(part.collection))

    async def _held(self, request: Request) -> Answer:
        """What other nodes may let go of, as this one is to have it."""
        id: int = request.params["id"]
        collection = self.catalog.catalog.by_id(id)
        self._assignment.refresh()
        own = self._assignment.own(collection) if collection is not None else ()
        return {"vchannels": [vchannel for vchannel in self._held_of(id) if vchannel in own]}

    async def _load_state(self, request: Request) -> Answer:
        """Where the rows of a collection are in memory, as of a catalog that is read now."""
        collection = (await self.catalog.catch_up()).collection(request.params["collection"])
        if not collection.replicas:
            return {"replicas": 0, "vchannels": {}}
        self._start_pipelines()
        there = await self._handover.holders(collection, collection.vchannels)
        for vchannel in self._held_of(collection.id):
            there[vchannel].add(self.node.incarnation)
        for part in self.parts(collection.id):
            if (error := self.wrong_with(part)) and not all(there[vchannel] for vchannel in part.stores):
                raise error
        names = {each.incarnation: each.name for each in self.node.cluster.members(self.role)}
        shown = {each: sorted(names.get(node, node) for node in nodes) for each, nodes in there.items()}
        return {"replicas": collection.replicas, "vchannels": shown}


def check_loaded(name: str, collection: Collection | None) -> None:
    """Raise `CollectionNotFound` or `CollectionNotLoaded` where QueryNodes do not have `collection`, as the catalog has
    it now."""
    if collection is None or collection.state != READY:
        raise CollectionNotFound(f"collection {name} was dropped", collection=name)
    if not collection.replicas:
        raise CollectionNotLoaded(f"collection {name} is released: load_collection loads it", collection=name)
