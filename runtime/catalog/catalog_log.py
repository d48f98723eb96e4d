"""The catalog as it changes: every node follows the `collection_schema` channel, the leader also writes it."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments import checked
from ..clock import HybridClock
from ..log.names import Names
from ..log.record import RecordType
from ..log.wal import ChannelPolicy, Wal
from ..replicated.fold import Applied
from ..replicated.records import LEVELS, Claim, Event, FeatureLevels
from ..replicated.replica import Replica, SnapshotPacing
from ..streams.channel_reader import Granted, OnBadRecord
from .catalog import Catalog

CATALOG_POLICY = ChannelPolicy(retention_s=None)
# While rows are written limits are renewed every 3 s: where channels share segments, what is in no snapshot keeps those
# of five minutes.
CATALOG_PACING = SnapshotPacing(records=100, retry_records=10)


class CatalogLog(Replica[Catalog]):
    """Follows the catalog; `catalog` is its state as far as it was read.

    `claim` makes this node the leader, after which `append` writes events. Only what the log order accepts counts, so
    of two nodes that both believe to lead only one has an effect. The clock follows the records that count, except a
    time that lies days ahead. A node that writes `NODE_KINDS` itself, by `propose_own`, has a name `author` that was
    never used before. `create` and `levels` are those of the process' version.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        names: Names,
        clock: HybridClock,
        *,
        author: str = "",
        create: Callable[[], Catalog] = Catalog,
        levels: FeatureLevels = LEVELS,
        on_bad: OnBadRecord | None = None,
    ) -> None:
        super().__init__(
            wal,
            names.catalog,
            create,
            RecordType.CATALOG,
            led=True,
            author=author,
            now=clock.now,
            levels=levels,
            on_bad=on_bad,
            pacing=CATALOG_PACING,
        )
        self._wal = wal
        self._clock = clock

    async def open(self) -> None:
        """Create the channel where it is missing, and read all that is in it."""
        await self._wal.create_channel(self.channel, CATALOG_POLICY)
        await super().open()

    @property
    def catalog(self) -> Catalog:
        return self.fold.state

    @property
    def leader(self) -> Claim:
        """The last winning claim."""
        return self.fold.claim

    def granted(self, pchannel: str) -> Granted:
        """The grants of `pchannel`, as far as the catalog was read."""
        return self.catalog.granted(pchannel)

    async def append(self, event: Event) -> None:
        """`propose` an event, and store a snapshot of the catalog where one is due."""
        await self.propose(event)
        await self.snapshot_if_due()

    def on_applied(self, applied: Applied) -> None:
        super().on_applied(applied)
        ts = applied.proposed.record.ts
        if applied.error is None and self._clock.believes(ts):
            self._clock.observe(ts)
