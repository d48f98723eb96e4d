"""`tidewal evict`: end the lease of a node of a cluster."""

from __future__ import annotations

import json
from typing import Annotated, Any
from uuid import uuid4

import typer

from ..runtime.clock import HybridClock, SystemClock
from ..runtime.cluster.cluster_log import ClusterLog
from ..runtime.cluster.detector import MARGIN
from ..runtime.cluster.named_members import members_named
from ..runtime.cluster.state import ClusterState, NodeMember
from ..runtime.errors import InvalidRequest
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.wal import Wal
from .connect import over_log
from .logging_setup import logged
from .one_line import one_line
from .open_log import LogUrl, Prefix
from .results import AsJson
from .stored_cluster import check_cluster


@logged
def evict(
    url: LogUrl,
    node: Annotated[str, typer.Argument(help="The node: its name, or its incarnation.")],
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """End the lease of a cluster's node, so that others get what it has.

    Its channels are granted to others once the lease that it relies on has passed. The process stops acknowledging as
    soon as it reads the record, or its lease has passed; it ends, or comes back as a new incarnation. Where two members
    have the name, give the incarnation (`tidewal inspect cluster`).
    """
    evicted = over_log(url, lambda wal: evict_node(wal, Names(prefix), node))
    typer.echo(json.dumps(_as_json(evicted), indent=2) if as_json else one_line(_what_follows(evicted)))


async def evict_node(wal: Wal, names: Names, node: str) -> NodeMember:
    """Write the eviction of `node`, a name or an incarnation, and return the member that it was once the record counts.

    Raises `ChannelNotFound` where the log has no cluster, `InvalidRequest` where `node` is no member, or is the name of
    several, `PreconditionFailed` where it ended meanwhile, and what the log raises."""
    await check_cluster(wal, names)  # opening would create its channel
    log = ClusterLog(wal, names, HybridClock(SystemClock()), f"evict-{uuid4().hex}")
    try:
        await log.open()
        member = _the_member(log.cluster, node)
        await log.propose({"kind": "evict", "incarnation": member.incarnation})
        return member
    finally:
        await log.close()


def _the_member(cluster: ClusterState, node: str) -> NodeMember:
    found = members_named(cluster, node)
    if len(found) > 1:
        listed = ", ".join(each.incarnation for each in found)
        raise InvalidRequest(
            f"{len(found)} members are named {node!r}: give the incarnation of the one that is meant: {listed}",
            argument="node",
        )
    return found[0]


def _as_json(evicted: NodeMember) -> dict[str, Any]:
    return {
        "evicted": True,
        "node": evicted.name,
        "incarnation": evicted.incarnation,
        "roles": list(evicted.roles),
        "lease_ms": evicted.lease_ms,
        "granted_after_ms": _granted_after_ms(evicted),
    }


def _granted_after_ms(evicted: NodeMember) -> int:
    """For how long those who grant its channels to others wait since they read its last renewal."""
    return round(evicted.lease_ms * (1 + MARGIN))


def _what_follows(evicted: NodeMember) -> str:
    name, lease_ms, waited_ms = evicted.incarnation, evicted.lease_ms, _granted_after_ms(evicted)
    return (
        f"{name} is evicted. It may rely on its lease for {lease_ms} ms more: its channels are granted to others once "
        f"{waited_ms} ms have passed since they last heard of it. The process ends, or comes back as a new incarnation."
    )
