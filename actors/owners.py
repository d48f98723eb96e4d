"""Questions to the owner of pchannels: the StreamingNode of this process is called directly; where it has none, the
question is a request."""

from __future__ import annotations

import asyncio

from ..runtime.catalog.catalog import Collection
from ..runtime.errors import DeadlineExceeded, TidewalError
from ..runtime.log.names import pchannel_of
from ..runtime.ownership import ChannelPoint, SyncPoint
from ..runtime.rpc.client import RpcClient
from .node import Node

FLUSH_DEADLINE_S = 300.0


async def sync_point(node: Node, rpc: RpcClient, channels: list[str], *, to: str = "", deadline_s: float) -> SyncPoint:
    """The present time of the owner of `channels`, and the last acknowledged record of each. `to` is the incarnation of
    the owner's node; empty: any. Raises `DeadlineExceeded` where it does not own them within `deadline_s`."""
    local = node.local_owner
    if local.expected and to in ("", node.incarnation):
        if not local.is_open(channels):
            try:
                async with asyncio.timeout(deadline_s):
                    await local.until_open(channels)
            except TimeoutError:
                raise DeadlineExceeded(f"{', '.join(channels)} did not get an owner within {deadline_s:g} s") from None
        return await local.owner.sync(channels)
    params = {"channels": channels, "to": to} if to else {"channels": channels}
    reply = await rpc.call("streamingnode", "sync", params, deadline_s=deadline_s)
    points = {channel: ChannelPoint(*point) for channel, point in reply.values["channels"].items()}
    return SyncPoint(reply.values["time"], points)


async def flush(node: Node, rpc: RpcClient, collection: Collection) -> int:
    """Have all of `collection` stored that was acknowledged before this; returns the timestamp up to which it is."""
    local = node.local_owner
    if not local.expected:
        reply = await rpc.call("streamingnode", "flush", {"id": collection.id}, deadline_s=FLUSH_DEADLINE_S)
        return int(reply.values["ts"])
    while True:
        owner = await local.until_open({pchannel_of(vchannel) for vchannel in collection.vchannels})
        try:
            return await owner.flush(collection.id)
        except TidewalError:
            if await local.until_open(()) is owner:
                raise  # else it has ended meanwhile, and the next one is asked
