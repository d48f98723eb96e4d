"""The log as Spark's processes see it: read only, blocking, chosen by the URL of option `wal`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol, cast
from urllib.parse import unquote

from ..runtime.errors import ConfigError, Unavailable
from ..runtime.redaction import shown_url, split_url
from ..runtime.remote import BlockingClient
from ..runtime.wal import Entry

SUPPORTED = "rocksmq:///absolute/path, rocksmq://./relative/path, kafka://… and pulsar://…"
BROKERS = ("kafka", "pulsar")


class Log(Protocol):
    """What the bridge asks of a log. Several readings may be under way at once, and other questions between them."""

    def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        ...

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last entry, None when there was none ever. Raises `ChannelNotFound`."""
        ...

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """The entries behind `after` (None: from the first there is, if any) up to and including `upto`, in order, in
        pieces; with `inclusive` `after` too. Raises `PositionLost` when retention has removed what comes next."""
        ...

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet. Raises
        `ChannelNotFound`."""
        ...

    def alive(self) -> bool:
        """Whether it was connected, and is so still, as far as can be told without asking."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


class RocksMQLog:
    """The RocksMQ in `directory`, through the process that has it open. Says what to do when there is none."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._client = BlockingClient(directory)

    def channels(self) -> list[str]:
        """See `Log`. Raises `Unavailable`."""
        with self._advice():
            return self._client.channels()

    def latest_id(self, channel: str) -> bytes | None:
        """See `Log`. Raises `Unavailable`."""
        with self._advice():
            return self._client.latest_id(channel)

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """See `Log`. Raises `Unavailable`."""
        with self._advice():
            yield from self._client.read(channel, after, upto, inclusive=inclusive)

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """See `Log`. Raises `Unavailable`."""
        with self._advice():
            return self._client.id_at(channel, timestamp)

    def alive(self) -> bool:
        """See `Log`."""
        return self._client.alive()

    def close(self) -> None:
        """See `Log`."""
        self._client.close()

    @contextmanager
    def _advice(self) -> Generator[None]:
        try:
            yield
        except Unavailable as error:
            raise Unavailable(
                f"{error.message}. Spark reads a RocksMQ through the process that has it open: start one (tidewal run "
                f"--wal rocksmq://{self._directory}), or check option wal"
            ) from error


def first_piece(pieces: Iterator[list[Entry]]) -> list[Entry]:
    """The first entries of a reading, which ends here; none where there are none."""
    try:
        return next(pieces, list[Entry]())
    finally:
        cast("Generator[list[Entry]]", pieces).close()


def open_log(url: str) -> Log:
    """The log at `url`, which is connected to when it is first asked something.

    Raises `ConfigError` for a URL that the bridge cannot read.
    """
    parts = split_url(url)
    if parts.scheme.partition("+")[0] in BROKERS and parts.netloc:
        from .broker import BrokerLog  # with all settings, which a RocksMQ's readers need not load

        return BrokerLog(url)
    if parts.scheme != "rocksmq" or parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"option wal is {shown_url(url)!r}; the Spark bridge reads {SUPPORTED}", key="wal")
    return RocksMQLog(os.path.abspath(parts.netloc + unquote(parts.path)))
