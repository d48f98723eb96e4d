"""A migration of a log that a process of this machine has open: by its node, or by the command through that process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ..actors.connection import connect
from ..actors.migration_client import MigrationClient
from ..runtime.config.loading import load_settings, wal_options
from ..runtime.errors import ConfigError, Unavailable
from ..runtime.log.migration_state import migration_state
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.migration.migration import MigrationProof
from ..runtime.migration.node_log import NodeLog
from .open_log import opened

NODE_S = 5.0  # for the node to answer, where there is one


async def is_open_elsewhere(url: str) -> bool:
    """Whether another process has the log at `url` open, where one process at a time owns it."""
    backend = find_backend(url)
    try:
        return backend.capabilities().one_machine and not await backend.abandoned(url)
    except ConfigError:  # there is no log
        return False


@asynccontextmanager
async def log_in_use(url: str) -> AsyncGenerator[Wal]:
    """The log at `url`, which another process has open, through that one, whatever its migrations' state. It may be
    written to. Raises `Unavailable` where no process has it open."""
    options = {**wal_options(load_settings(), url), "in_use_only": False}
    async with await find_backend(url).open(url, own=False, **options) as wal:
        yield wal


async def is_moved_by_node(old: Wal) -> bool:
    """Whether the one node that uses `old` is to migrate it. Where several do, or all have left for it, the command
    does."""
    if not (await migration_state(old)).phase.in_use:
        return False
    node = await NodeLog.read_states(old)
    return node is None or node.cluster is None or len(node.cluster.members) < 2


async def migrated_by_node(url: str, to: str, on_line: Callable[[str], object]) -> MigrationProof:
    """Have the node on the log at `url` migrate it to that at `to`, and return what is in both. Raises `Unavailable`
    where no node answers, and what `MigrationClient.migrate` does."""
    async with _node_on(url) as node:
        await node.migrate(shown_url(to), on_line=on_line)
    async with opened(url) as old:
        return MigrationProof.from_wire((await migration_state(old)).proof)


async def cancelled_by_node(url: str, to: str) -> None:
    """Have the node on the log at `url` take the migration to that at `to` back. Raises as `migrated_by_node`."""
    async with _node_on(url) as node:
        await node.cancel(shown_url(to))


@asynccontextmanager
async def _node_on(url: str) -> AsyncGenerator[MigrationClient]:
    try:
        connecting = connect(url, settings=load_settings(), deadline_s=NODE_S)
        client = await connecting.__aenter__()
    except Unavailable as error:
        raise Unavailable(
            f"a process has {shown_url(url)} open: stop it, and go on. A node would migrate it, but none answers"
        ) from error
    try:
        yield MigrationClient(client)
    finally:
        await connecting.__aexit__(None, None, None)
