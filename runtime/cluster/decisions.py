"""What a coordinator is to do: a pure function of what it has read. Nothing waits here, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from ..catalog.catalog import Catalog, PChannelState
from ..replicated.records import Claim, Event
from .limits import LIMIT_MS, timestamp_limit
from .roles import COORDINATOR, STREAMING_NODE
from .state import ClusterState, rendezvous_rank

Assignment: TypeAlias = Mapping[str, str]  # pchannel to the incarnation that is to own it


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a coordinator, `own`, has read: the catalog and its last winning claim, the members; those that are silent
    for so long that the leader, or any coordinator, ends their leases; whether nothing can rest on the lease of a
    process any more; its own wall clock; and how far ahead an owner may stamp at first."""

    own: str
    catalog: Catalog
    leader: Claim
    cluster: ClusterState
    silent: Set[str]
    long_silent: Set[str]
    is_over: Callable[[str], bool]
    wall_ms: int
    limit_ms: int = LIMIT_MS


@dataclass(frozen=True, slots=True)
class ClusterDecision:
    """Records to propose, each for itself: evictions of incarnations, a claim of leadership, grants by the leader.
    Whether they still hold where they lie in the log is decided there."""

    evict: tuple[str, ...] = ()
    claim: bool = False
    grants: tuple[Event, ...] = ()


def decide(view: ClusterView, wanted: Assignment) -> ClusterDecision:
    """What to propose now. Any coordinator ends leases, the others a little later than the leader: an eviction is right
    whoever writes it. The first of the coordinators claims leadership where the leader is no member any more. The
    leader grants the channels of `wanted` that nothing rests on any more."""
    leads = view.leader.node == view.own
    evict = tuple(sorted(view.silent if leads else view.long_silent))
    claim = not leads and view.leader.node not in view.cluster.members and view.own == _first_coordinator(view.cluster)
    return ClusterDecision(evict, claim, _grants(view, wanted) if leads else ())


def _first_coordinator(cluster: ClusterState) -> str:
    """The one of all that may lead that is to; none that is about to leave while there are others."""
    able = [(member.draining, member.incarnation) for member in cluster.with_role(COORDINATOR)]
    return min(able)[1] if able else ""


def _grants(view: ClusterView, wanted: Assignment) -> tuple[Event, ...]:
    """One grant for each node: its channels begin together, and one that another grant came before refuses only the
    channels of that node, until the next look."""
    channels: dict[str, list[str]] = {}
    for name, node in sorted(wanted.items()):
        owner = view.catalog.channels.get(name, PChannelState()).owner
        if node in view.cluster.members and (not owner or view.is_over(owner)):
            channels.setdefault(node, []).append(name)
    return tuple(_grant(view, node, names) for node, names in channels.items())


def _grant(view: ClusterView, node: str, names: Iterable[str]) -> Event:
    """The limit is a suggestion: an owner whose own clock is beyond it raises it before it begins. It is never below
    that of a term before, whose fence may have any time up to there."""
    states = {name: view.catalog.channels.get(name, PChannelState()) for name in names}
    used = max(state.used_limit for state in states.values())
    limit = timestamp_limit(view.wall_ms, used, view.limit_ms)
    terms = {name: (state.term + 1, state.term) for name, state in states.items()}
    return {
        "kind": "grant",
        "node": node,
        "channels": terms,
        "limit": max(limit, *(state.limit for state in states.values())),
    }


def assign_by_rendezvous(view: ClusterView, channels: Iterable[str]) -> Assignment:
    """Each channel to the member with the role that ranks first for it (`rendezvous_rank`). Those that are silent get
    none."""
    nodes = [member for member in view.cluster.with_role(STREAMING_NODE) if member.incarnation not in view.silent]
    if not nodes:
        return {}
    return {channel: max(nodes, key=lambda node: rendezvous_rank(channel, node)).incarnation for channel in channels}
