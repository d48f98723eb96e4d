"""Which QueryNodes are to have which vchannels, and which of them have them, by what a log says of its cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..runtime.catalog.catalog import DROPPING, Collection
from ..runtime.catalog.placement_wishes import DRAINED
from ..runtime.cluster.replica_order import replica_order
from ..runtime.cluster.roles import QUERY_NODE
from ..runtime.cluster.state import NodeMember
from .reported_rows import READY, state_of
from .stored_cluster import StoredCluster

REPLICA_COLUMNS = ("collection", "vchannel", "replicas", "querynodes", "ready")


def replicas(found: StoredCluster) -> list[dict[str, Any]]:
    """Each vchannel, and the names of the QueryNodes that are to have it, none of a collection that is released; and
    what each of these said of it with its last renewal."""
    members = {each.incarnation: each for each in found.nodes.with_role(QUERY_NODE)}
    drained = {name for name, state in found.catalog.wishes.nodes.items() if state == DRAINED}
    return [
        _replica(collection, vchannel, [members[node] for node in order[: collection.replicas]])
        for collection in _collections(found)
        for vchannel in collection.vchannels
        for order in [replica_order(vchannel, members.values(), drained)]
    ]


def _replica(collection: Collection, vchannel: str, nodes: Iterable[NodeMember]) -> dict[str, Any]:
    states = [state_of(each, vchannel) for each in nodes]
    return {
        "collection": collection.name,
        "vchannel": vchannel,
        "replicas": collection.replicas,
        "querynodes": [each["node"] for each in states],
        "ready": [each["node"] for each in states if each["state"] == READY],
        "states": states,
    }


def too_few(found: StoredCluster) -> Iterator[str]:
    """Where there are fewer QueryNodes than replicas. A cluster with one has no replicas, which is no fault of it."""
    there = len(found.nodes.with_role(QUERY_NODE))
    for collection in _collections(found) if there > 1 else ():
        if collection.replicas > there:
            yield f"{collection.name} is to have {collection.replicas} replicas, and there are {there} QueryNodes"


def _collections(found: StoredCluster) -> list[Collection]:
    return [each for _, each in sorted(found.catalog.collections.items()) if each.state != DROPPING]
