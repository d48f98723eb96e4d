"""Which QueryNodes are to have a vchannel in memory: computed by each node from the members, and stored nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Set

from .state import NodeMember, rendezvous_rank


def replica_order(vchannel: str, members: Iterable[NodeMember], drained: Set[str] = frozenset()) -> list[str]:
    """The incarnations of all `members` in the order in which they are to have `vchannel`: the first N of them, where
    it has N replicas, and behind them those that had it before, or get it next.

    Members that are about to leave, and those whose names operators have `drained`, come behind the others; and of
    two lives of one name the earlier one behind all, for its process is dead. When a node comes or goes, each vchannel
    changes hands at one of its replicas at most.
    """

    def rank(member: NodeMember) -> tuple[bool, tuple[int, str]]:
        return not (member.draining or member.name in drained), rendezvous_rank(vchannel, member)

    order = sorted(members, key=rank, reverse=True)
    latest: dict[str, str] = {}
    for each in order:
        latest[each.name] = max(each.incarnation, latest.get(each.name, ""))
    return [each.incarnation for each in sorted(order, key=lambda each: latest[each.name] != each.incarnation)]
