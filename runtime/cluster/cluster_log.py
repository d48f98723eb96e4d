"""The channel of the cluster's members, as one process follows and writes it."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments import checked
from ..clock import HybridClock
from ..log.names import Names
from ..log.record import RecordType
from ..log.wal import ChannelPolicy, Wal
from ..replicated.fold import Applied
from ..replicated.records import Event
from ..replicated.replica import Replica, SnapshotPacing
from ..streams.channel_reader import OnBadRecord
from .state import ClusterState
from .version import THIS_VERSION, TidewalVersion

CLUSTER_POLICY = ChannelPolicy(retention_s=None)  # time alone never removes what safety reads
CLUSTER_PACING = SnapshotPacing(records=1_000, retry_records=100)

OnRead = Callable[[Event | None], None]


class ClusterLog(Replica[ClusterState]):
    """Follows who belongs to the cluster, and writes to it as the process `author`.

    Those who `observe` it are called for each record that counts, once it is in the state, and with None where the
    state was read anew: all that it says was in the log before. `version` is that of this process.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        names: Names,
        clock: HybridClock,
        author: str,
        *,
        version: TidewalVersion = THIS_VERSION,
        on_bad: OnBadRecord | None = None,
    ) -> None:
        super().__init__(
            wal,
            names.cluster,
            version.cluster,
            RecordType.CLUSTER,
            led=False,
            author=author,
            now=clock.now,
            levels=version.levels,
            on_bad=on_bad,
            pacing=CLUSTER_PACING,
        )
        self.author: str = author
        self._wal = wal
        self._observers: list[OnRead] = []

    async def open(self) -> None:
        """Create the channel where it is missing, and read all that is in it."""
        await self._wal.create_channel(self.channel, CLUSTER_POLICY)
        await super().open()

    @property
    def cluster(self) -> ClusterState:
        return self.fold.state

    def observe(self, on_read: OnRead) -> None:
        """Call `on_read` as the log is read."""
        self._observers.append(on_read)

    def on_applied(self, applied: Applied) -> None:
        super().on_applied(applied)
        if applied.error is None:
            self._notify(applied.proposed.event)

    def on_restored(self) -> None:
        super().on_restored()
        self._notify(None)

    def _notify(self, event: Event | None) -> None:
        for on_read in self._observers:
            on_read(event)
