"""What QueryNodes have reported of the vchannels that they are to have: which can be asked for, and since when not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime.clock import compose
from ..runtime.cluster.roles import QUERY_NODE
from ..runtime.cluster.state import ROWS, NodeMember
from ..runtime.replicated.records import typed
from .open_log import shown_time
from .stored_cluster import StoredCluster

READY, UNKNOWN = "ready", "unknown"  # states of a vchannel at a node, beside why it waits


@dataclass(frozen=True, slots=True)
class ReportedRows:
    """How many vchannels of a QueryNode are ready, and how many wait; since when none waits, or some; and of those that
    wait some: since when, and why."""

    ready: int
    waiting: int
    since_ms: int
    vchannels: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, member: NodeMember) -> ReportedRows | None:
        """What `member` reported last; None where it said nothing, or what this version cannot read."""
        said: Any = member.report.get(ROWS)
        try:
            named = {
                typed(name, str): (typed(ms, int), typed(why, str)) for name, (ms, why) in said["vchannels"].items()
            }
            return cls(typed(said["ready"], int), typed(said["waiting"], int), typed(said["since_ms"], int), named)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def to_wire(self) -> dict[str, Any]:
        """The numbers, as JSON has them."""
        return {"ready": self.ready, "waiting": self.waiting, "since": _time(self.since_ms)}


def state_of(member: NodeMember, vchannel: str) -> dict[str, Any]:
    """What `member` has said of a vchannel that it is to have, and since when that waits."""
    rows = ReportedRows.of(member)
    if rows is not None and vchannel in rows.vchannels:
        since_ms, why = rows.vchannels[vchannel]
        return {"node": member.name, "state": why, "since": _time(since_ms)}
    named_all = rows is not None and rows.waiting == len(rows.vchannels)
    return {"node": member.name, "state": READY if named_all else UNKNOWN, "since": None}


def not_ready(found: StoredCluster) -> Iterator[str]:
    """A sentence for each QueryNode that cannot be asked for all of its vchannels."""
    for member in found.nodes.with_role(QUERY_NODE):
        rows = ReportedRows.of(member)
        if rows is not None and rows.waiting:
            waiting = [f"{each} ({why} since {_time(ms)})" for each, (ms, why) in sorted(rows.vchannels.items())]
            if more := rows.waiting - len(waiting):
                waiting.append(f"and {more} more")
            yield f"{member.name} has {rows.ready} vchannels ready, and not yet: {', '.join(waiting)}"


def _time(ms: int) -> str:
    return shown_time(compose(max(0, ms), 0))
