"""`tidewal level`: the feature level of a cluster: show it, hold it, or let it rise."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal
from uuid import uuid4

import typer

from ..runtime.clock import HybridClock, SystemClock
from ..runtime.cluster.cluster_log import ClusterLog
from ..runtime.cluster.state import ClusterState, NodeMember
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.wal import Wal
from .connect import over_log
from .logging_setup import logged
from .one_line import one_line
from .open_log import LogUrl, Prefix
from .results import AsJson
from .stored_cluster import check_cluster, cluster_of


@logged
def level(
    url: LogUrl,
    state: Annotated[
        Literal["hold", "raise", ""],
        typer.Argument(metavar="[hold|raise]", help="Whether the level stays as it is.", show_default=False),
    ] = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Show the feature level of a cluster, hold it before an upgrade, or let it rise.

    The level says what nodes may write. It rises by itself once all nodes are of a version that knows the next one, and
    never falls: nodes of the version before do not start any more. `hold` keeps it as it is, also when no node runs;
    `raise` ends that.
    """

    async def look(wal: Wal) -> dict[str, Any]:
        names = Names(prefix)
        if state:
            return described_level(await hold_level(wal, names, held=state == "hold"))
        return described_level((await cluster_of(wal, names)).nodes)

    found = over_log(url, look, read_only=not state)
    typer.echo(json.dumps(found, indent=2) if as_json else one_line(level_sentence(found)))


async def hold_level(wal: Wal, names: Names, *, held: bool) -> ClusterState:
    """Let the feature level of the cluster stay as it is from now on, or rise, and return the cluster once that counts.

    Raises `ChannelNotFound` where the log has no cluster, and what the log raises."""
    await check_cluster(wal, names)  # opening would create its channel
    log = ClusterLog(wal, names, HybridClock(SystemClock()), f"level-{uuid4().hex}")
    try:
        await log.open()
        await log.propose({"kind": "hold", "held": held})
        return log.cluster
    finally:
        await log.close()


def described_level(cluster: ClusterState) -> dict[str, Any]:
    """The level as JSON has it: the `present` one, the highest one that any member knows (`known`), and the members
    that know only lower ones, each with those that it knows, while it is not the present one."""
    known = max((member.level for member in cluster.members.values()), default=cluster.level)
    lacking = [member for member in cluster.members.values() if member.level < known]
    return {
        "present": cluster.level,
        "held": cluster.level_held,
        "known": known,
        "waits_for": sorted(map(_shown, lacking)) if known > cluster.level else [],
    }


def _shown(member: NodeMember) -> str:
    return f"{member.name} ({member.version or 'of an unknown version'}, which knows {member.levels})"


def level_sentence(found: dict[str, Any]) -> str:
    """What `described_level` says, and what an operator can do."""
    present, known, waits_for = found["present"], found["known"], found["waits_for"]
    held = f"the feature level is held at {present}" if found["held"] else f"the feature level is {present}"
    if known == present:
        return f"{held}, and no member knows a later one"
    if waits_for:
        then = "could rise" if found["held"] else "rises"
        return f"{held}; it {then} to {known} once these are upgraded or have ended: {', '.join(waits_for)}"
    if found["held"]:
        return f"{held}, and all members know {known}: `tidewal level URL raise` lets it rise"
    return f"{held}, and rises to {known} once a node has led for a lease"
