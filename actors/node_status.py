"""What a node says of itself when a client asks for its status: how far behind it is, what it holds, and how near its
limits are. It is taken from the node's metrics, which count what it does anyway."""

from __future__ import annotations

from ..runtime.catalog.catalog import Catalog, Collection
from ..runtime.cluster.state import THROTTLED
from ..runtime.rpc.protocol import Params
from .node import Node

SILENT_S = 5.0  # without an announced time until a node counts as unhealthy


def watermark_age_s(node: Node) -> float | None:
    """Seconds since `node` last announced a time; None where it has announced none yet."""
    last_s = node.metrics.value("wal_last_confirmed_time_tick")
    return round(max(0.0, node.clock.clock.wall_ms() / 1000 - last_s), 3) if last_s else None


def refused_appends(node: Node) -> str:
    """Why the log of `node` refuses appends at present, and what to do; empty where it takes them."""
    refusal = node.wal.refusal()
    return "" if refusal is None else f"{type(refusal).__name__}: {refusal.message}"


def node_status(node: Node, catalog: Catalog) -> Params:
    """The status of `node`: its name, its `address` for other nodes, `watermark_age_s` since it last announced a time,
    why appends are `refused` (both empty where they are not), and of each collection the rows and bytes in memory, the
    bytes that are not in its table yet, how far queries are behind, and for how long the oldest row has waited for the
    table (0 where none waits); both in seconds. `limits` has what is used of each limit, and the limit; both in
    bytes. `throttled` says which limits slow down or refuse the writes that come to it (`Throttle.to_wire`)."""
    metrics, settings = node.metrics, node.settings
    collections = _Collections(node).described(catalog)
    inflight = int(metrics.value("streamingnode_inflight_bytes"))
    limits = [_limit("streamingNode.maxInflightBytes", "", inflight, settings.streaming_node.max_inflight_bytes)]
    memory = sum(each["memory_bytes"] for each in collections)
    limits.append(_limit("queryNode.memoryLimitBytes", "", memory, settings.query_node.memory_limit_bytes))
    for each in collections:
        most = settings.streaming_node.max_unflushed_bytes
        limits.append(_limit("streamingNode.maxUnflushedBytes", each["name"], each["unflushed_bytes"], most))
    throttled = node.cluster.reports.get(THROTTLED)  # where the process has a StreamingNode
    return {
        "node": node.name,
        "address": node.connections.address,
        "watermark_age_s": watermark_age_s(node),
        "refused": refused_appends(node),
        "collections": collections,
        "limits": limits,
        "throttled": (throttled and throttled()) or [],
    }


def _limit(key: str, collection: str, used: int, limit: int) -> Params:
    return {"key": key, "collection": collection, "used": used, "limit": limit}


class _Collections:
    """The collections of a node. Each metric is read once, however many collections there are."""

    def __init__(self, node: Node) -> None:
        read = node.metrics.series
        self._rows = read("querynode_entity_num")
        self._memory = read("querynode_memory_bytes")
        self._unflushed = read("streamingnode_unflushed_bytes")
        self._query_ms = read("querynode_consume_tt_lag_ms")
        self._table_lag_s = read("streamingnode_unflushed_age_seconds")
        self._unreadable = {name: error.message for (_, name), error in node.unreadable.items()}

    def described(self, catalog: Catalog) -> list[Params]:
        return [self._describe(each) for _, each in sorted(catalog.collections.items())]

    def _describe(self, collection: Collection) -> Params:
        name, vchannels = collection.name, [(each,) for each in collection.vchannels]
        query_ms = max(self._query_ms.get(each, 0) for each in vchannels)
        return {
            "name": name,
            "rows": int(self._rows.get((name,), 0)),
            "memory_bytes": int(self._memory.get((name,), 0)),
            "unflushed_bytes": int(self._unflushed.get((name,), 0)),
            "query_lag_s": round(query_ms / 1000, 3),
            "table_lag_s": round(self._table_lag_s.get((name,), 0.0), 3),
            "unreadable": self._unreadable.get(name, ""),
        }
