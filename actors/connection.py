"""Connecting to a node from any process: by the URL of its log, or by its directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ..runtime.config.loading import load_settings, url_of, wal_options
from ..runtime.config.settings import Settings
from ..runtime.errors import DeadlineExceeded, Unavailable
from ..runtime.log.opening import open_wal
from ..runtime.log.redaction import shown_url, split_url
from .client import Client

CONNECT_DEADLINE_S = 10.0


@asynccontextmanager
async def connect(
    where: str | Path, *, settings: Settings | None = None, deadline_s: float = CONNECT_DEADLINE_S
) -> AsyncGenerator[Client]:
    """Connect to the node whose log is at `where`, from any process: `async with tidewal.connect(where) as client`.

    `where` is the URL of the log, or a path: the directory of a node, or that of an embedded log. `settings` has the
    credentials and the prefix of the channels; by default those of the environment (`load_settings`). The connection
    never owns the log, outlives restarts of the node, and belongs to the event loop that made it; leaving the block
    closes it.

    Raises `Unavailable` when no node is ready within `deadline_s` seconds, and `ConfigError` for a URL that no adapter
    opens and where the adapter's packages are missing.
    """
    settings = settings or load_settings()
    url = _url_of_log(where)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(deadline_s):
                wal = await open_wal(url, own=False, **wal_options(settings, url))
                stack.push_async_callback(wal.close)
                prefix = settings.msg_channel.chan_name_prefix.cluster
                client = await stack.enter_async_context(Client(wal, prefix=prefix))
                await client.ready(deadline_s=deadline_s)
        except (TimeoutError, DeadlineExceeded):
            raise Unavailable(
                f"no node at {shown_url(url)} answered within {deadline_s:g} s: start one "
                f"(tidewal run --wal {shown_url(url)}), or give it more time (deadline_s)",
                deadline_s=deadline_s,
            ) from None
        yield client


def _url_of_log(where: str | Path) -> str:
    """The URL of the log at `where`. A node keeps an embedded log in `log/` of its directory."""
    below = Path(where) / "log"
    return url_of(str(where if split_url(str(where)).scheme or not below.is_dir() else below))
