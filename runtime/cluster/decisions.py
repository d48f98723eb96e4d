"""What a coordinator is to do: a pure function of what it has read. Nothing waits here, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from ..catalog.catalog import Catalog, PChannelState
from ..catalog.rising_limit import RisingLimit
from ..replicated.records import FIRST_LEVEL, Claim, Event
from .limits import LIMIT_MS, timestamp_limit
from .roles import COORDINATOR
from .state import ClusterState

FIRST_TERM = 1  # of a leader

Assignment: TypeAlias = Mapping[str, str]  # pchannel to the incarnation that is to own it


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a coordinator, `own`, has read: the catalog and its last winning claim, the members; those that are silent
    for so long that the leader, or any coordinator, ends their leases; whether nothing can rest on the lease of a
    process any more; its own wall clock; how far ahead an owner may stamp at first; whether it has led for as long as
    members that it does not know of could still show themselves (`settled`); the catalog's feature level; and the boot
    of its machine, with the present moment of that (`Clock.boot`, `monotonic_ms`)."""

    own: str
    catalog: Catalog
    leader: Claim
    cluster: ClusterState
    silent: Set[str]
    long_silent: Set[str]
    is_over: Callable[[str], bool]
    wall_ms: int
    limit_ms: int = LIMIT_MS
    settled: bool = False
    catalog_level: int = FIRST_LEVEL
    boot: str = ""
    boot_ms: int = 0


@dataclass(frozen=True, slots=True)
class ClusterDecision:
    """Records to propose, each for itself: evictions of incarnations, a claim of leadership, grants and moves by the
    leader, and feature levels that it raises the cluster and the catalog to (0: none). Whether they still hold where
    they lie in the log is decided there. `released` gives channels up for owners that have ended."""

    evict: tuple[str, ...] = ()
    claim: bool = False
    released: tuple[Event, ...] = ()
    grants: tuple[Event, ...] = ()
    moves: tuple[Event, ...] = ()
    level: int = 0
    catalog_level: int = 0


def decide(view: ClusterView, wanted: Assignment) -> ClusterDecision:
    """What to propose now. Any coordinator ends leases, the others a little later than the leader: an eviction is right
    whoever writes it. The first of the coordinators claims leadership where the leader is no member any more. The
    leader grants the channels of `wanted` that nothing rests on any more, and lets their owners give up those that
    others are to have. It raises the feature level once all members know a higher one, unless that is held."""
    leads = view.leader.node == view.own
    evict = tuple(sorted(view.silent if leads else view.long_silent))
    claim = not leads and view.leader.node not in view.cluster.members and view.own == _first_coordinator(view.cluster)
    if not leads:
        return ClusterDecision(evict, claim)
    released, moves = _released(view), _moves(view, wanted)
    grants = () if released else _grants(view, wanted)  # these rest on the limits of the owners before
    return ClusterDecision(evict, claim, released, grants, moves, _next_level(view), _next_catalog_level(view))


def _released(view: ClusterView) -> tuple[Event, ...]:
    """The channels of owners that have ended on this machine without having given them up, with what their limits had
    risen to at most: less than what is stored."""
    released: dict[RisingLimit, dict[str, tuple[int, int, bytes]]] = {}
    for name, rising in sorted(view.catalog.rising.items()):
        state, risen = view.catalog.channels[name], rising.at(view.boot, view.boot_ms)
        if risen is not None and risen < state.limit and view.is_over(state.owner):
            released.setdefault(rising, {})[name] = (state.term, risen, b"")
    return tuple({"kind": "released", "channels": channels, "rising": rising} for rising, channels in released.items())


def _next_level(view: ClusterView) -> int:
    """Members that are about to return may know less: one lease is waited, as for all that is missing at first. Before
    the first leader of a log there was none."""
    cluster = view.cluster
    complete = view.settled or view.leader.term == FIRST_TERM
    raises = complete and not cluster.level_held and cluster.known_level > cluster.level
    return cluster.known_level if raises else 0


def _next_catalog_level(view: ClusterView) -> int:
    """The catalog's level follows that of the cluster: all members know that one, and who does not is none."""
    return view.cluster.level if view.cluster.level > view.catalog_level else 0


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


def _moves(view: ClusterView, wanted: Assignment) -> tuple[Event, ...]:
    """One record for all channels that their owners, which are members, are to give up for others, or are not to any
    more."""
    members, channels = view.cluster.members, {}
    for name, node in sorted(wanted.items()):
        state = view.catalog.channels.get(name)
        if state is not None and state.owner in members and node in members:
            target = "" if node == state.owner else node
            if target != state.target:
                channels[name] = (state.term, target)
    return ({"kind": "move", "channels": channels, "at_ms": view.wall_ms},) if channels else ()


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
