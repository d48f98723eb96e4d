"""How the roles are divided among the processes of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.cluster.roles import COORDINATOR, DATA_NODE, PROXY, QUERY_NODE, ROLE_NAMES, STREAMING_NODE
from ..runtime.errors import InvalidRequest

OWNER = "owner"


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """The roles of one process, and what the process is called among those of its supervisor."""

    name: str
    roles: tuple[str, ...]

    def node_name(self, supervisor: str) -> str:
        """The name of the node that the process is, below a supervisor of that name."""
        return f"{supervisor}-{self.name}"

    @property
    def rank(self) -> int:
        """The place of its first role in the order of starting."""
        return min(ROLE_NAMES.index(role) for role in self.roles)


def divide_roles(processes: int) -> tuple[RoleGroup, ...]:
    """The groups of roles for that many processes, the owner first. Raises `InvalidRequest` for none.

    MixCoord and the StreamingNode are never apart: the StreamingNode's process opens the log as its owner, which on an
    embedded log only one process can be, and MixCoord writes little. Whatever else runs beside them shares their one
    core of Python, so it leaves in the order of what it costs: first the DataNode and the QueryNode, which decode all
    that is written; then each of these has its own; then the Proxy, which checks and splits what clients send. What is
    added after that are Proxies, which own nothing, and QueryNodes, each of which answers other clients, by turns: one
    DataNode stores more than one StreamingNode can append.
    """
    if processes < 1:
        raise InvalidRequest(f"a node has one process at least, not {processes}", argument="processes")
    if processes == 1:
        return (RoleGroup(OWNER, ROLE_NAMES),)
    if processes == 2:
        return RoleGroup(OWNER, (COORDINATOR, STREAMING_NODE, PROXY)), RoleGroup("readers", (DATA_NODE, QUERY_NODE))
    if processes == 3:
        owner, separate = (COORDINATOR, STREAMING_NODE, PROXY), (DATA_NODE, QUERY_NODE)
    else:
        owner, separate = (COORDINATOR, STREAMING_NODE), (PROXY, DATA_NODE, QUERY_NODE)
    groups = [RoleGroup(OWNER, owner), *(RoleGroup(role, (role,)) for role in separate)]
    for added in range(processes - len(groups)):
        role = (PROXY, QUERY_NODE)[added % 2]
        groups.append(RoleGroup(f"{role}-{added // 2 + 2}", (role,)))
    return tuple(groups)


def stopping_order(groups: Sequence[RoleGroup]) -> list[list[RoleGroup]]:
    """The groups as they are to stop: one list after the other, those of one list at once. The owner is last."""
    ranks = sorted({group.rank for group in groups}, reverse=True)
    return [[group for group in groups if group.rank == rank] for rank in ranks]
