"""DataNode: stores the rows of the log in Delta tables, rows and position in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...runtime.catalog.catalog import Collection
from ...runtime.rpc.server import Request
from ...runtime.tables.table_store import TableStore
from ..collection_reader import CollectionReaderRole, Pipeline, part_key
from ..node import Node
from ..pchannels import pchannels_of
from ..requests import Answer, Method, OfCollection
from .delta_errors import storage_errors
from .pipeline import FlushPipeline


class DataNode(CollectionReaderRole):
    """Runs one flush pipeline for each collection that is its own, and compacts on request. Of several DataNodes each
    collection has one: the first in the rendezvous order of the members, which changes with these. Two that think so at
    once do no harm, for only one of them can store what is next."""

    role = "datanode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._seen: object = None  # the members by which the pipelines were looked at last

    def handlers(self) -> dict[str, Method]:
        return {
            **super().handlers(),
            "compact": Method(self._compact, OfCollection),
            "check": Method(self._check, OfCollection),
        }

    def serves(self, collection: Collection) -> bool:
        """Whether this node is to store `collection`, by the members that it knows of."""
        return self.node.cluster.first(self.role, str(collection.id)) == self.node.incarnation

    def missing(self, collection: Collection) -> Sequence[Collection]:
        return [collection] if part_key(collection) not in self._pipelines and self.serves(collection) else []

    def unwanted(self) -> Sequence[Pipeline]:
        members = self.node.cluster.members(self.role)
        seen, self._seen = self._seen, [(each.incarnation, each.draining) for each in members]
        if seen == self._seen:
            return []
        return [pipeline for pipeline in self._pipelines.values() if not self.serves(pipeline.collection)]

    def answers(self, request: Request) -> bool:
        """What is asked about a collection is for the DataNode that has it."""
        collection = self.catalog.catalog.collections.get(str(request.params.get("collection")))
        return super().answers(request) if collection is None else self.serves(collection)

    def pipeline(self, part: Collection) -> FlushPipeline:
        return FlushPipeline(self, part)

    async def forget(self, collection: Collection) -> None:
        """Release the holds on the log, and remove the tables. Raises `DirectoryUnwritable` and the like where they
        cannot be removed: the collection stays then, since the next one of its name would find its rows."""
        for channel in pchannels_of(collection):
            await self.node.wal.hold(channel, collection.holder, None)
        await self.node.blocking(partial(_remove, self.node.tables, collection.name))

    async def _compact(self, request: Request) -> Answer:
        pipeline = await self.find_pipeline(request.params["collection"])
        assert isinstance(pipeline, FlushPipeline)
        result = await pipeline.compact()
        return {"time": result.t, "rows": result.rows, "merged": result.merged}

    async def _check(self, request: Request) -> Answer:
        """Raise what is wrong with the tables of a collection, as far as it is known."""
        await self.find_pipeline(request.params["collection"])
        return None


def _remove(tables: TableStore, collection: str) -> None:
    with storage_errors(f"{tables}/{collection}"):
        tables.remove(collection)
