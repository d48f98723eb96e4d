"""The log as Spark's processes see it: read only, blocking, chosen by the URL of option `wal`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast
from urllib.parse import unquote, urlsplit

from ..runtime.errors import ChannelNotFound, ConfigError, Unavailable
from ..runtime.wal import Entry

SUPPORTED = ("rocksmq:///directory",)


class Log(Protocol):
    """What the bridge asks of a log."""

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last entry, None when there was none ever. Raises `ChannelNotFound`."""
        ...

    def read(self, channel: str, after: bytes | None, upto: bytes | None) -> Iterator[list[Entry]]:
        """The entries behind `after` (None: from the first there is) up to and including `upto`, in order, in pieces.
        Raises `PositionLost` when retention has removed what comes next."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


def open_log(url: str) -> Log:
    """Connect to the log at `url`.

    Raises `ConfigError` for a URL that the bridge cannot read, `Unavailable` when nobody serves it.
    """
    parts = urlsplit(url)
    if parts.scheme != "rocksmq" or not parts.path or parts.netloc:
        raise ConfigError(f"option wal is {url!r}; the Spark bridge reads {', '.join(SUPPORTED)}", key="wal")
    from ..runtime.remote import BlockingClient

    try:
        return cast(Log, BlockingClient(unquote(parts.path)))
    except Unavailable as error:
        raise Unavailable(
            f"the log at {url} cannot be reached: {error.message}. Spark reads it through the process that has it "
            f"open: start one (tidewal run --wal {url}), or check the path"
        ) from error


class Follower:
    """Reads a channel from its first entry on: each call returns what is new. An absent channel is an empty one."""

    def __init__(self, log: Log, channel: str) -> None:
        self._log = log
        self._channel = channel
        self._position: bytes | None = None

    def new_entries(self) -> Iterator[Entry]:
        """The entries between the last one handed out and the last one there is now."""
        try:
            latest = self._log.latest_id(self._channel)
        except ChannelNotFound:
            return
        if latest is None or latest == self._position:
            return
        for entries in self._log.read(self._channel, self._position, latest):
            for entry in entries:
                self._position = entry.id
                yield entry
