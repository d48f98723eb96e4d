"""The cluster as a log has it: its nodes, and who owns which pchannel. Read without a node."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..runtime.catalog.catalog import Catalog
from ..runtime.cluster.state import ClusterState
from ..runtime.errors import ChannelNotFound
from ..runtime.log.names import Names
from ..runtime.log.record import RecordType
from ..runtime.log.wal import Wal
from ..runtime.replicated.fold import Applied, Fold
from ..runtime.replicated.records import Claim
from .open_log import catalog_of, folded


@dataclass(slots=True)
class StoredCluster:
    """What the channels of the cluster and of the catalog say, and `leader`, the last winning claim there. `heard` has
    the timestamps of the last records by which members became or stayed such, `ended` those of their ends, both by
    incarnation and as far as the records lie behind the last snapshot."""

    catalog: Catalog
    leader: Claim
    nodes: ClusterState = field(default_factory=ClusterState)
    heard: dict[str, int] = field(default_factory=dict[str, int])
    ended: dict[str, int] = field(default_factory=dict[str, int])

    def name_of(self, incarnation: str) -> str | None:
        """The name of the node that has this incarnation; None for none that is a member."""
        member = self.nodes.members.get(incarnation)
        return None if member is None else member.name

    def note(self, applied: Applied) -> None:
        """Keep the time of a record that counts."""
        event, ts = applied.proposed.event, applied.proposed.record.ts
        if applied.error is not None:
            return
        match applied.proposed.kind:
            case "register":
                self.heard[event["incarnation"]] = ts
                if event["replaces"]:
                    self.ended.setdefault(event["replaces"], ts)  # it may have been evicted before
            case "renew":
                self.heard[event["incarnation"]] = ts
            case "evict" | "leave":
                self.ended[event["incarnation"]] = ts
            case _:
                pass


async def cluster_of(wal: Wal, names: Names) -> StoredCluster:
    """The cluster as the log has it now. Raises `ChannelNotFound` where it has none."""
    await check_cluster(wal, names)
    catalog = await catalog_of(wal, names)  # read first: an owner registers before it is granted anything
    found = StoredCluster(catalog.state, catalog.claim)
    found.nodes = (await folded(wal, names.cluster, _cluster_fold, found.note)).state
    return found


async def check_cluster(wal: Wal, names: Names) -> None:
    """Raise `ChannelNotFound` unless the log has a cluster under this prefix."""
    try:
        await wal.describe(names.cluster)
    except ChannelNotFound:
        raise ChannelNotFound(
            f"there is no cluster in this log: it has no channel {names.cluster}; "
            "check --prefix, or `tidewal inspect URL` for what the log has",
            channel=names.cluster,
        ) from None


def _cluster_fold() -> Fold[ClusterState]:
    return Fold(ClusterState, RecordType.CLUSTER, led=False)
