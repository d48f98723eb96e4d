"""Logs as processes without an event loop read them, such as Spark's workers. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .wal import Entry


class BlockingReader(Protocol):
    """A log that is open for reading, with calls that block. Several reads may be under way at once, and other calls
    between them. Every call raises `Unavailable` where the log cannot be reached."""

    def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        ...

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last entry, None when there was none ever. Raises `ChannelNotFound`."""
        ...

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """The entries behind `after` (None: from the first there is, if any) up to and including `upto` (None: the last
        one), in order, in batches; with `inclusive` `after` too. Raises `PositionLost` when retention has removed what
        comes next, and when the channel ends before `upto`."""
        ...

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet. Raises
        `ChannelNotFound`."""
        ...

    def alive(self) -> bool:
        """Whether the log is connected, as far as that is known without a request."""
        ...

    def close(self) -> None:
        """Release the connection. A second call does nothing."""
        ...
