"""What a writer tells its owner as it goes: override what you need. Calls come on any thread, under the writer's
lock: be quick, and never call back into the writer."""

from __future__ import annotations

from ..errors import BadRecord, TidewalError
from ..record import Record
from ..wal import Entry
from .batch import Batch
from .owned import SyncPoint


class WriterObserver:
    """Does nothing."""

    def recovered(self, channel: str, record: Record) -> None:
        """A record was read while the channel was taken over."""

    def bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        """An entry was passed over while the channel was taken over: it cannot be read, or no owner wrote it."""

    def opened(self, channel: str, term: int) -> None:
        """The channel takes appends from now on."""

    def decided(self, batch: Batch) -> None:
        """A batch is durable, or has failed (`batch.error`)."""

    def repeated(self) -> None:
        """An append was recognised as a retry, and was not written again."""

    def stalled(self, error: TidewalError) -> None:
        """An append's outcome is unknown: the channels must be taken again under a new term."""

    def ticked(self, channels: int, error: TidewalError | None) -> None:
        """Ticks were stored, or not."""

    def announced(self, point: SyncPoint) -> None:
        """A time was announced for these channels."""

    def silent(self, error: TidewalError) -> None:
        """Nothing could be announced or snapshotted now."""
