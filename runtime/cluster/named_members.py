"""Members as people name them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidRequest
from ..nearest import nearest
from .state import ClusterState, NodeMember


def members_named(cluster: ClusterState, node: str, role: str = "") -> Sequence[NodeMember]:
    """The member with the incarnation `node`, or else those of this name, the latest life last: of all members, or of
    those that offer `role`. Raises `InvalidRequest` where there is none."""
    members = cluster.with_role(role) if role else list(cluster.members.values())
    found = [each for each in members if each.incarnation == node] or [each for each in members if each.name == node]
    if found:
        return sorted(found, key=lambda each: (each.since_ms, each.incarnation))
    if node in cluster.gone:
        raise InvalidRequest(f"{node} is no member any more: {cluster.gone[node].how}", argument="node")
    near = nearest(node, [*(each.name for each in members), *(each.incarnation for each in members)])
    advice = near or "; `tidewal inspect cluster` shows all"
    offering = f" that offers {role}" if role else ""
    raise InvalidRequest(f"the cluster has no member {node!r}{offering}{advice}", argument="node")
