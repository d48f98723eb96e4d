"""Open a log that only this command may write, past the check that `open_wal` makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from ..runtime.config.loading import load_settings, wal_options
from ..runtime.errors import ConfigError, DirectoryInUse, Unavailable
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal

AGAIN_S = 0.1  # until a directory that another process has open is tried again


@asynccontextmanager
async def owned_log(url: str, *, create: bool = False, serve: bool = False, wait_s: float = 0.0) -> AsyncGenerator[Wal]:
    """The log at `url`, whatever its state, owned by this process where one process owns it; with `serve` others can
    read it meanwhile. Raises `Unavailable` or `DirectoryInUse` where another process has an embedded log open for
    longer than `wait_s` seconds, and `ConfigError`, or `Unavailable` for a log on brokers or in an object store, where
    none is there, unless `create`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while True:
        try:
            wal = await _owned(url, create=create, serve=serve)
            break
        except (Unavailable, DirectoryInUse):
            if not find_backend(url).capabilities().one_machine or loop.time() >= until:
                raise
        await asyncio.sleep(AGAIN_S)
    async with wal:
        yield wal


async def _owned(url: str, *, create: bool, serve: bool) -> Wal:
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
    return await backend.open(url, own=True, **options)
