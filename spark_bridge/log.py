"""The log as Spark's processes read it: read only, blocking, chosen by the URL of option `wal`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol, cast
from urllib.parse import unquote

from ..runtime.errors import ConfigError, Unavailable
from ..runtime.log.redaction import shown_url, split_url
from ..runtime.log.wal import Entry
from ..runtime.remote import BlockingClient

SUPPORTED = "rocksmq:///absolute/path, rocksmq://./relative/path, kafka://… and pulsar://…"
BROKERS = ("kafka", "pulsar")


class BridgeLog(Protocol):
    """What the bridge needs of a log. Several reads may be under way at once, and other calls between them."""

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
        batches; with `inclusive` `after` too. Raises `PositionLost` when retention has removed what comes next."""
        ...

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet. Raises
        `ChannelNotFound`."""
        ...

    def alive(self) -> bool:
        """Whether the log is connected, as far as that is known without a request."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


class RocksMQLog:
    """The RocksMQ in `directory`, through the process that has it open. The error where there is none says what to
    do."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._client = BlockingClient(directory)

    def channels(self) -> list[str]:
        """The names of all channels, sorted. Raises `Unavailable`."""
        with self._advice():
            return self._client.channels()

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last entry of `channel`, None when there was none ever. Raises `ChannelNotFound`,
        `Unavailable`."""
        with self._advice():
            return self._client.latest_id(channel)

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """The entries of `channel` behind `after` up to and including `upto`, as `BridgeLog.read` says. Raises
        `PositionLost`, `Unavailable`."""
        with self._advice():
            yield from self._client.read(channel, after, upto, inclusive=inclusive)

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry of `channel` whose timestamp is ≥ `timestamp`, None when there is none yet. Raises
        `ChannelNotFound`, `Unavailable`."""
        with self._advice():
            return self._client.id_at(channel, timestamp)

    def alive(self) -> bool:
        """Whether the log is connected, as far as that is known without a request."""
        return self._client.alive()

    def close(self) -> None:
        """Release the connection."""
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


def first_entries(batches: Iterator[list[Entry]]) -> list[Entry]:
    """The first entries of the read `batches`, which is closed; none where there are none."""
    try:
        return next(batches, list[Entry]())
    finally:
        cast("Generator[list[Entry]]", batches).close()


def open_log(url: str) -> BridgeLog:
    """The log at `url`, which connects at its first call.

    Raises `ConfigError` for a URL that the bridge cannot read.
    """
    parts = split_url(url)
    if parts.scheme.partition("+")[0] in BROKERS and parts.netloc:
        from .broker import BrokerLog  # with all settings, which a RocksMQ's readers need not load

        return BrokerLog(url)
    if parts.scheme != "rocksmq" or parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"option wal is {shown_url(url)!r}; the Spark bridge reads {SUPPORTED}", key="wal")
    return RocksMQLog(os.path.abspath(parts.netloc + unquote(parts.path)))
