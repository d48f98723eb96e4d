"""`tidewal inspect cluster`: the nodes of a cluster, who owns which pchannel, and what is not as it should be."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from statistics import median_low
from typing import Any, cast

import typer

from ..runtime.catalog.catalog import Catalog, PChannelState
from ..runtime.clock import SystemClock, compose, physical_ms
from ..runtime.cluster.roles import ROLE_NAMES
from ..runtime.cluster.state import CLOCK_MS, ROWS, THROTTLED, UNREACHABLE, UNREADABLE, NodeMember
from ..runtime.log.names import DEFAULT_PREFIX, Names, pchannel_of
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.replicated.records import FeatureLevels
from .connect import over_log
from .inspect_replicas import REPLICA_COLUMNS, replicas, too_few
from .level import described_level, level_sentence
from .logging_setup import logged
from .one_line import one_line
from .open_log import LogUrl, Prefix, shown_time
from .reported_rows import ReportedRows, not_ready
from .results import AsJson, plain, print_titled
from .stored_cluster import StoredCluster, cluster_of
from .throttles import throttles_in_words

CLOCKS_APART_S = 30.0  # a member that was killed has reported its clock last up to a lease and some ago
ENDED_SHOWN = 10  # in the table; the log remembers more

LEADER_COLUMNS = ("node", "incarnation", "term")
MEMBER_COLUMNS = (
    "node",
    "incarnation",
    "state",
    "roles",
    "version",
    "levels",
    "lease_ms",
    "host",
    "address",
    "since",
    "age_s",
    "rows",
    "report",
)
ENDED_COLUMNS = ("incarnation", "how", "time", "lease_ms")
PCHANNEL_COLUMNS = ("channel", "node", "term", "active", "until", "moves_to", "pinned_to", "collections")


@logged
def cluster(url: LogUrl, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Show the nodes of a log's cluster, who owns which pchannel, and in words what is not as it should be.

    Asks no node: it is what the log says. `age_s` is for how many seconds a member has not renewed its lease there, by
    its clock and that of this machine; "-" where it did not since the last snapshot. One that is alone in its cluster
    renews it without a record. A pchannel is active, and takes appends, once its owner's fence is in the log. Exits
    with 2 where the log has no cluster.
    """

    async def look(wal: Wal) -> dict[str, Any]:
        return {"wal": shown_url(url), **described(await cluster_of(wal, Names(prefix)), SystemClock().wall_ms())}

    found = over_log(url, look, read_only=True)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)


def described(found: StoredCluster, now_ms: int) -> dict[str, Any]:
    """The cluster as JSON has it, at the wall time `now_ms`."""
    identity, leader = found.nodes.identity, found.leader
    return {
        "cluster": None if identity is None else identity.id,
        "leader": {"node": found.name_of(leader.node), "incarnation": leader.node, "term": leader.term}
        if leader.node
        else None,
        "members": [_member(found, each, now_ms) for each in _sorted_members(found)],
        "ended": [
            {"incarnation": name, "how": gone.how, "time": _time(found.ended.get(name)), "lease_ms": gone.lease_ms}
            for name, gone in reversed(found.nodes.gone.items())
        ],
        "pchannels": [_pchannel(found, name, state) for name, state in sorted(_pchannels(found.catalog).items())],
        "replicas": replicas(found),
        "balance": found.catalog.wishes.balance,
        "level": described_level(found.nodes),
        "conditions": list(conditions(found, now_ms)),
    }


def _sorted_members(found: StoredCluster) -> list[NodeMember]:
    return sorted(found.nodes.members.values(), key=lambda member: (member.name, member.incarnation))


def _member(found: StoredCluster, member: NodeMember, now_ms: int) -> dict[str, Any]:
    heard, rows = found.heard.get(member.incarnation), ReportedRows.of(member)
    return {
        "node": member.name,
        "incarnation": member.incarnation,
        "state": "ending" if member.draining else found.catalog.wishes.nodes.get(member.name),
        "roles": list(member.roles),
        "lease_ms": member.lease_ms,
        "level": member.level,
        "min_level": member.min_level,
        "version": member.version or None,
        "host": member.host or None,
        "address": member.address or None,
        "since": _time(compose(max(0, member.since_ms))),
        "renewed": _time(heard),
        "age_s": None if heard is None else max(0.0, round((now_ms - physical_ms(heard)) / 1000, 1)),
        "rows": None if rows is None else rows.to_wire(),
        "report": _plain_report(member.report),
    }


def _plain_report(value: object) -> Any:
    """What a member reported, as JSON has it: it may be of a later version, and of any types."""
    if isinstance(value, dict):
        return {str(name): _plain_report(each) for name, each in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain_report(each) for each in cast("Iterable[object]", value)]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else plain(value)


def _time(ts: int | None) -> str | None:
    return shown_time(ts) if ts else None


def _pchannels(catalog: Catalog) -> dict[str, PChannelState]:
    """The pchannels that were ever granted, and those of collections."""
    used = (pchannel_of(vchannel) for collection in catalog.collections.values() for vchannel in collection.vchannels)
    return {**{name: PChannelState() for name in used}, **catalog.channels}


def _pchannel(found: StoredCluster, name: str, state: PChannelState) -> dict[str, Any]:
    return {
        "channel": name,
        "node": found.name_of(state.owner),
        "owner": state.owner or None,
        "term": state.term,
        "active": bool(state.owner) and state.term in state.fences,
        "limit": state.limit,
        "until": shown_time(state.limit),
        "moves_to": found.name_of(state.target),
        "pinned_to": found.catalog.wishes.pins.get(name),
        "collections": sorted(
            collection.name
            for collection in found.catalog.collections.values()
            if name in map(pchannel_of, collection.vchannels)
        ),
    }


# ---- what is not as it should be ------------------------------------------------------------------------------------


def conditions(found: StoredCluster, now_ms: int) -> Iterator[str]:
    """What is not as it should be, each in a sentence. Some of it passes by itself, as while channels move."""
    yield from _of_the_leader(found)
    yield from _of_members(found)
    yield from _of_versions(found)
    yield from _of_clocks(found, now_ms)
    yield from _of_tables(found)
    yield from _of_writes(found)
    yield from _of_addresses(found)
    yield from _of_owners(found)
    yield from too_few(found)
    yield from not_ready(found)


def _of_the_leader(found: StoredCluster) -> Iterator[str]:
    leader = found.leader.node
    if not leader:
        yield "no node leads: none has claimed leadership in this log"
    elif leader not in found.nodes.members:
        yield f"the leader {leader} is no member{_how_it_ended(found, leader)}: no node decides until another one leads"


def _of_members(found: StoredCluster) -> Iterator[str]:
    members = _sorted_members(found)
    if not members:
        yield "the cluster has no members"
        return
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for member in members:
        by_name[member.name].append(member.incarnation)
    for name, incarnations in by_name.items():
        if len(incarnations) > 1:
            listed = ", ".join(incarnations)
            yield f"{len(incarnations)} members are named {name}: {listed}; one hangs, or two nodes have one name"
    offered = {role for member in members for role in member.roles}
    for role in ROLE_NAMES:
        if role not in offered:
            yield f"no member offers the role {role}"


def _of_versions(found: StoredCluster) -> Iterator[str]:
    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for member in _sorted_members(found):
        by_version[member.version or "an unknown one"].append(member.name)
    if len(by_version) > 1:
        listed = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by_version.items()))
        yield f"members have {len(by_version)} versions of Tidewal: {listed}"
    level = described_level(found.nodes)
    if level["known"] > level["present"]:
        yield level_sentence(level)


def _of_clocks(found: StoredCluster, now_ms: int) -> Iterator[str]:
    """The clocks of members that are far from those of the others and of this machine, as they were reported last."""
    reported = {each.name: each.report.get(CLOCK_MS) for each in _sorted_members(found)}
    clocks = {name: clock for name, clock in reported.items() if isinstance(clock, int)}
    middle = median_low([*clocks.values(), now_ms])
    for name, clock in clocks.items():
        apart_s = (clock - middle) / 1000
        if abs(apart_s) > CLOCKS_APART_S:
            where = "ahead of" if apart_s > 0 else "behind"
            yield f"the clock of {name} is {abs(apart_s):.0f} s {where} the others': set it, or use NTP"


def _of_tables(found: StoredCluster) -> Iterator[str]:
    for member in _sorted_members(found):
        names = member.report.get(UNREADABLE)
        if isinstance(names, list | tuple) and names:
            listed = ", ".join(map(str, cast("Iterable[object]", names)))
            yield f"{member.name} cannot read or write the tables of: {listed}; `tidewal status` says why"


def _of_writes(found: StoredCluster) -> Iterator[str]:
    for member in _sorted_members(found):
        for said in throttles_in_words(member.report.get(THROTTLED)):
            yield f"at {member.name} {said}"


def _of_addresses(found: StoredCluster) -> Iterator[str]:
    for member in _sorted_members(found):
        unreachable = member.report.get(UNREACHABLE)
        if isinstance(unreachable, dict):
            for name, why in cast("dict[object, object]", unreachable).items():
                yield f"{member.name} cannot connect to {name} at {why}; its requests to it go through the log"


def _of_owners(found: StoredCluster) -> Iterator[str]:
    by_owner: defaultdict[str, list[str]] = defaultdict(list)
    for name, state in sorted(_pchannels(found.catalog).items()):
        if state.owner not in found.nodes.members:
            by_owner[state.owner].append(name)
    for owner, names in by_owner.items():
        if owner:
            yield f"the owner {owner} is no member{_how_it_ended(found, owner)}, and has: {', '.join(names)}"
        else:
            yield f"no node owns: {', '.join(names)}"
    for name, node in found.catalog.wishes.pins.items():
        if node not in (member.name for member in found.nodes.members.values()):
            yield f"{name} is pinned to {node}, which is no member"


def _how_it_ended(found: StoredCluster, incarnation: str) -> str:
    gone = found.nodes.gone.get(incarnation)
    return "" if gone is None else f" ({gone.how})"


# ---- as tables ------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    typer.echo(f"cluster  {one_line(found['cluster'] or 'without an id')}")
    typer.echo(f"level    {found['level']['present']}{', held' if found['level']['held'] else ''}\n")
    ended = found["ended"]
    before = len(ended) - ENDED_SHOWN
    print_titled("leader", LEADER_COLUMNS, [found["leader"]] if found["leader"] else [])
    print_titled("members", MEMBER_COLUMNS, [_member_row(each) for each in found["members"]])
    more = [f"and {before} before: --json has them"] if before > 0 else []
    print_titled("ended", ENDED_COLUMNS, ended[:ENDED_SHOWN], *more)
    print_titled("pchannels", PCHANNEL_COLUMNS, [_pchannel_row(each) for each in found["pchannels"]])
    print_titled("replicas", REPLICA_COLUMNS, [_replica_row(each) for each in found["replicas"]])
    typer.echo("conditions")
    for condition in found["conditions"] or ["none"]:
        typer.echo(f"  {one_line(condition)}")


def _member_row(member: Mapping[str, Any]) -> dict[str, object]:
    levels, rows = FeatureLevels(member["min_level"], member["level"]), member["rows"]
    report = {name: said for name, said in member["report"].items() if name != ROWS}
    return {
        **member,
        "roles": ", ".join(member["roles"]),
        "levels": str(levels),
        "rows": rows and f"{rows['ready']} of {rows['ready'] + rows['waiting']} ready since {rows['since']}",
        "report": report or None,
    }


def _replica_row(replica: Mapping[str, Any]) -> dict[str, object]:
    return {**replica, **{name: ", ".join(replica[name]) or None for name in ("querynodes", "ready")}}


def _pchannel_row(pchannel: Mapping[str, Any]) -> dict[str, object]:
    return {
        **pchannel,
        "node": pchannel["node"] or pchannel["owner"],
        "active": "yes" if pchannel["active"] else "no",
        "collections": ", ".join(pchannel["collections"]) or None,
    }
