"""Open a log that only this command may write, past the check that `open_wal` makes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from ..runtime.config.loading import load_settings, wal_options
from ..runtime.errors import ConfigError, Unavailable
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal


@asynccontextmanager
async def owned_log(url: str, *, create: bool = False, serve: bool = False) -> AsyncGenerator[Wal]:
    """The log at `url`, whatever its state, owned by this process where one process owns it; with `serve` others can
    read it meanwhile. Raises `Unavailable` where another process has an embedded log open, and `ConfigError`, or
    `Unavailable` for a log on brokers or in an object store, where none is there, unless `create`."""
    backend = find_backend(url)
    options: dict[str, Any] = {}
    if backend.capabilities().one_node:
        options["serve"] = serve and backend.capabilities().one_machine  # others read what lies in a store there
    if backend.capabilities().one_machine:
        try:
            unused = await backend.abandoned(url)
        except ConfigError:
            if not create:
                raise
            unused = True
        if not unused:
            raise Unavailable(f"a process has {shown_url(url)} open: stop it, and go on")
    options = {**wal_options(load_settings(), url), **options}
    if not create and not backend.capabilities().one_machine:  # there opening makes a log, where its name is misspelt
        await (await backend.open(url, read_only=True, **options)).close()
    wal = await backend.open(url, own=True, **options)
    async with wal:
        yield wal
