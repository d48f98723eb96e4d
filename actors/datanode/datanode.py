"""DataNode: stores what the log says in Delta tables, rows and position in one commit."""

from __future__ import annotations

import shutil
from functools import partial

from ...runtime.catalog import Collection
from ...runtime.errors import CollectionNotFound
from ...runtime.names import physical
from ...runtime.rpc import Request
from ..following import Follower
from ..node import Node
from ..role import Answer, Handler
from .pipeline import FlushPipeline


class DataNode(Follower):
    """Runs one flush pipeline for each collection, and compacts on request."""

    role = "datanode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._flushers: dict[str, FlushPipeline] = {}

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), "compact": self._compact}

    def pipeline(self, collection: Collection) -> FlushPipeline:
        flusher = self._flushers[collection.name] = FlushPipeline(self, collection)
        return flusher

    async def forget(self, collection: Collection) -> None:
        """Remove the tables, and let go of the log."""
        self._flushers.pop(collection.name, None)
        for vchannel in collection.vchannels:
            await self.node.wal.hold(physical(vchannel), f"datanode-{collection.id}", None)
        await self.node.blocking(partial(shutil.rmtree, self.node.tables / collection.name, ignore_errors=True))

    async def _compact(self, request: Request) -> Answer:
        name = request.params["collection"]
        flusher = self._flushers.get(name)
        if flusher is None:
            raise CollectionNotFound(f"no collection {name!r} to compact", collection=name)
        result = await flusher.compact()
        return {"time": result.t, "rows": result.rows, "merged": result.merged}
