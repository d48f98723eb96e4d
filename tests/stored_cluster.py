"""A log with a cluster in it, as nodes leave it, for the commands that look at one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.catalog.catalog_log import CatalogLog
from tidewal.runtime.clock import HybridClock, SystemClock, compose
from tidewal.runtime.cluster.cluster_log import ClusterLog
from tidewal.runtime.cluster.membership import NodeMembership
from tidewal.runtime.cluster.state import NodeMember
from tidewal.runtime.cluster.version import THIS_VERSION, TidewalVersion
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.rows.schema import CollectionSchema, Field

ALL_ROLES = ("mixcoord", "streamingnode", "proxy", "datanode", "querynode")
LIMIT = compose(1_900_000_000_000)
UNTIL = "2030-03-17T17:46:40.000Z"  # the same


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A process that has joined the cluster of a log."""

    log: ClusterLog
    membership: NodeMembership
    catalog: CatalogLog

    async def grant(self, *channels: str, fenced: bool = True) -> None:
        """Lead, and grant itself the first term of these channels."""
        name = self.log.author
        if self.catalog.leader.node != name:
            await self.catalog.claim(name)
        terms = dict.fromkeys(channels, (1, 0))
        await self.catalog.append({"kind": "grant", "node": name, "channels": terms, "limit": LIMIT})
        if fenced:
            fences = dict.fromkeys(channels, (1, bytes(8)))
            await self.catalog.append({"kind": "fenced", "node": name, "channels": fences})

    async def create(self, id: int, *pchannels: str) -> None:
        """A collection `c{id}` with a shard on each of these channels."""
        schema = CollectionSchema(f"c{id}", (Field("id", "int64"),), "id")
        vchannels = tuple(Names().vchannel(channel, id, shard) for shard, channel in enumerate(pchannels))
        await self.catalog.append({"kind": "create", "collection": Collection(id, schema, vchannels, 1).to_wire()})


@asynccontextmanager
async def stored_node(
    wal: Wal,
    incarnation: str,
    *,
    roles: Sequence[str] = ALL_ROLES,
    replaces: str = "",
    lease_ms: int = 3_000,
    version: TidewalVersion = THIS_VERSION,
) -> AsyncIterator[StoredNode]:
    """A process that joins, and neither renews nor leaves. Its name is what stands before the dash."""
    clock = HybridClock(SystemClock())
    log = ClusterLog(wal, Names(), clock, incarnation, version=version)
    catalog = CatalogLog(wal, Names(), clock, author=incarnation)
    member = NodeMember(
        incarnation,
        incarnation.partition("-")[0],
        tuple(roles),
        lease_ms,
        version.levels.highest,
        min_level=version.levels.lowest,
        version=version.number,
        address="127.0.0.1:7",
        host="box",
        since_ms=1_700_000_000_000,
    )
    node = StoredNode(log, NodeMembership(log, SystemClock(), member, report=lambda: {"load": 0.5}), catalog)
    await log.open()
    await catalog.open()
    try:
        await node.membership.join(replaces)
        if version is THIS_VERSION and log.fold.level < version.levels.highest:
            await log.raise_level(version.levels.highest)
        yield node
    finally:
        await log.close()
        await catalog.close()
