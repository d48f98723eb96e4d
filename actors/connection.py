"""Connecting to a node from any process: by the URL of its log, or by its directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..runtime.arguments import checked
from ..runtime.config.loading import load_settings, url_of, wal_options
from ..runtime.config.settings import Settings
from ..runtime.errors import DeadlineExceeded, InvalidRequest, TidewalError, Unavailable
from ..runtime.log.opening import open_wal
from ..runtime.log.redaction import shown_url
from ..runtime.log.start_command import LOG_FOLDER, start_command
from ..runtime.log.wal import Wal
from .client import Client
from .followed_log import FollowedLog
from .open_logs import SettingsOpener

CONNECT_DEADLINE_S = 10.0
CLOSE_WAL_S = 0.2  # how long leaving waits for a log that does not answer: what it has to finish then goes on beside
LOOK_S = 0.1  # between two looks at a directory that has no node yet

_log = logging.getLogger(__name__)


class _ConnectedClient(Client):
    """A client that closes the log with itself."""

    def __init__(self, wal: Wal, *, prefix: str) -> None:
        super().__init__(wal, prefix=prefix)

    async def close(self) -> None:
        """`Client.close`, and the log's. Never raises what the log raises: the error of the caller's block counts."""
        answered = await self._rpc.close()
        try:
            async with asyncio.timeout(None if answered else CLOSE_WAL_S):
                await self._wal.close()
        except TimeoutError:
            _log.info("%s was left before its log was closed", self._rpc.name)
        except TidewalError as error:
            _log.warning("%s was left, and its log was not closed: %s", self._rpc.name, error)


class _Connecting(AbstractAsyncContextManager[Client]):
    """What `connect` returns: it says what to write where it is awaited."""

    def __init__(self, connected: AbstractAsyncContextManager[Client]) -> None:
        self._connected = connected

    async def __aenter__(self) -> Client:
        return await self._connected.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._connected.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # checkers refuse it themselves

        def __await__(self) -> object:
            raise InvalidRequest("connect is not awaited: write `async with tidewal.connect(where) as client`")


@checked
def connect(
    where: str | Path, *, settings: Settings | None = None, deadline_s: float = CONNECT_DEADLINE_S
) -> AbstractAsyncContextManager[Client]:
    """Connect to the node whose log is at `where`, from any process: `async with tidewal.connect(where) as client`.

    `where` is the URL of the log, or a path: the directory of a node, which may come later, or that of an embedded log.
    `settings` has the
    credentials and the prefix of the channels; by default those of the environment (`load_settings`). The connection
    never owns the log, outlives restarts of the node, and belongs to the event loop that made it; leaving the block
    closes it, also where the node is gone: that takes a second at most, is logged, and raises nothing. Where the log is
    migrated while the node runs, it goes on with the new one, which is opened with the same `settings`: calls raise
    `Moved` where these do not fit.

    Raises `Unavailable` when no node is ready within `deadline_s` seconds, and `ConfigError` for a URL that no adapter
    opens and where the adapter's packages are missing.
    """
    return _Connecting(_connected(where, settings, deadline_s))


@asynccontextmanager
async def _connected(where: str | Path, settings: Settings | None, deadline_s: float) -> AsyncGenerator[Client]:
    settings = settings or load_settings()
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(deadline_s):
                log = FollowedLog(*await _open(str(where), settings), _opener(settings))
                client = _ConnectedClient(log.following, prefix=settings.msg_channel.chan_name_prefix.cluster)
                stack.push_async_callback(client.close)
                stack.push_async_callback(log.stop)
                await client.__aenter__()
                await client.ready(deadline_s=deadline_s)
        except (TimeoutError, DeadlineExceeded):
            raise Unavailable(
                f"no node at {shown_url(url_of(str(where)))} answered within {deadline_s:g} s: start one "
                f"({_start_command(str(where))}), or give one that is starting more time",
                deadline_s=deadline_s,
            ) from None
        yield client


def _opener(settings: Settings) -> SettingsOpener:
    return SettingsOpener(settings, None, owns=False, is_node=False)


async def _open(where: str, settings: Settings) -> tuple[str, Wal]:
    """The log at `where`, with its URL. The caller bounds the wait. A directory is looked at anew all the while: a node
    may only now make it, and the log in it."""
    while True:
        url = url_of(where)
        opening = asyncio.create_task(open_wal(url, own=False, **wal_options(settings, url)))
        try:
            while not opening.done() and url_of(where) == url:
                await asyncio.wait([opening], timeout=None if url == where else LOOK_S)
            if opening.done():
                return url, await opening
        except Unavailable:
            if url == where:
                raise
            await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            await _abandon(opening)
            raise
        await _abandon(opening)


async def _abandon(opening: asyncio.Task[Wal]) -> None:
    """Open the log no further, and close it where it is open already."""
    opening.cancel()
    (result,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(result, BaseException):
        await result.close()


def _start_command(where: str) -> str:
    """The command that starts a node where `connect(where)` finds it: as `start_command` for a URL, `--wal` for the
    directory of a log that is no node's, else `--data`, which puts log and tables where a later node looks for them."""
    url, path = url_of(where), Path(where)
    if url == where:
        return start_command(url)
    if path.name == LOG_FOLDER:
        return f"tidewal run --data {path.parent}"
    is_other_log = path.is_dir() and any(path.iterdir()) and not (path / "tables").exists()
    if is_other_log and not (path / "log").exists():
        return f"tidewal run --wal {shown_url(url)}"
    return f"tidewal run --data {path}"
