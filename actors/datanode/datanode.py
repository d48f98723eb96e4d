"""DataNode: stores what the log says in Delta tables, rows and position in one commit."""

from __future__ import annotations

import shutil
from functools import partial

from ...runtime.catalog import Collection
from ...runtime.names import physical
from ...runtime.rpc import Request
from ..following import Follower
from ..requests import Answer, Method, OfCollection
from .pipeline import FlushPipeline


class DataNode(Follower):
    """Runs one flush pipeline for each collection, and compacts on request."""

    role = "datanode"

    def handlers(self) -> dict[str, Method]:
        return {**super().handlers(), "compact": Method(self._compact, OfCollection)}

    def pipeline(self, collection: Collection) -> FlushPipeline:
        return FlushPipeline(self, collection)

    async def forget(self, collection: Collection) -> None:
        """Remove the tables, and let go of the log."""
        for vchannel in collection.vchannels:
            await self.node.wal.hold(physical(vchannel), f"datanode-{collection.id}", None)
        await self.node.blocking(partial(shutil.rmtree, self.node.tables / collection.name, ignore_errors=True))

    async def _compact(self, request: Request) -> Answer:
        flusher = await self.find_pipeline(request.params["collection"])
        assert isinstance(flusher, FlushPipeline)
        result = await flusher.compact()
        return {"time": result.t, "rows": result.rows, "merged": result.merged}
