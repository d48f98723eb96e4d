"""What a writer tells its owner as it goes: override what you need. Calls come on any thread, under the writer's
lock: be quick, and never call back into the writer."""

from __future__ import annotations

from ..errors import TidewalError
from ..record import Record


class WriterObserver:
    """Does nothing."""

    def recovered(self, channel: str, record: Record) -> None:
        """A record was read while the channel was taken over."""

    def stalled(self, error: TidewalError) -> None:
        """An append's outcome is unknown: the channels must be taken again under a new term."""

    def ticked(self, channels: int, error: TidewalError | None) -> None:
        """Ticks were stored, or not."""

    def watermark(self, time: int) -> None:
        """A time was announced."""

    def silent(self, error: TidewalError) -> None:
        """Nothing could be announced or snapshotted now."""
