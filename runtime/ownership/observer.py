"""What a channel owner reports as it works: override the methods you need. Calls come on any thread, under the channel
owner's lock: return quickly, and never call back into the channel owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import BadRecord, TidewalError
from ..log.record import Record
from ..log.wal import Entry
from .batch import AppendBatch


class ChannelOwnerObserver:
    """Ignores all reports."""

    def recovered(self, channel: str, record: Record) -> None:
        """A record was read while the channel was acquired."""

    def bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        """An entry was skipped while the channel was acquired: it cannot be read, or no owner wrote it."""

    def opened(self, channel: str, term: int) -> None:
        """The channel takes appends from now on."""

    def decided(self, batch: AppendBatch) -> None:
        """A batch is durable, or has failed (`batch.error`)."""

    def repeated(self) -> None:
        """An append was recognised as a retry, and was not written again."""

    def stalled(self, channels: Sequence[str], error: TidewalError) -> None:
        """The outcome of an append is unknown: `channels` must be acquired again under a new term. Empty where those of
        the append had stalled before."""

    def ticked(self, channels: int, error: TidewalError | None) -> None:
        """Ticks were stored in so many channels, or not (`error`)."""

    def announced(self, times: Mapping[str, int]) -> None:
        """A time was announced for each of these channels."""

    def silent(self, error: TidewalError) -> None:
        """Ticks, announcements or snapshots failed now (`error`); they are tried again."""
