"""A migration of a log that one process owns, while it does: by its node, or by the command through that process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ..actors.connection import connect
from ..actors.migration_client import MigrationClient
from ..actors.open_logs import IN_ANY_STATE, SettingsOpener
from ..runtime.config.loading import load_settings, wal_options
from ..runtime.errors import ConfigError, Unavailable
from ..runtime.log.migration_state import MigrationPhase, migration_state
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.migration.migration import MigrationProof
from ..runtime.migration.node_log import NodeLog
from .open_log import opened
from .owned_log import owned_log

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
    options = wal_options(load_settings(), url)
    async with await find_backend(url).open(url, own=False, **IN_ANY_STATE, **options) as wal:
        yield wal


@asynccontextmanager
async def old_log(url: str) -> AsyncGenerator[Wal]:
    """The log at `url` that no process of this machine has to itself, whatever its state. In an object store it is
    written to through its owner where nodes use it, and owned by this process where none does. Raises what `owned_log`
    does, and `ConfigError` where nodes could not write through this process."""
    if not await _is_linked(url):
        async with owned_log(url) as wal:
            yield wal
        return
    settings = load_settings()
    async with await find_backend(url).open(url, **IN_ANY_STATE, **wal_options(settings, url)) as wal:
        yield wal


async def _is_linked(url: str) -> bool:
    """Whether nodes use the log at `url`, in an object store, through the one of them that owns it, or have left it for
    a migration."""
    backend, settings = find_backend(url), load_settings()
    is_stored = backend.capabilities().one_node and not backend.capabilities().one_machine
    if not is_stored or not SettingsOpener(settings, None, owns=False).moved_by_command(url):
        return False
    async with await backend.open(url, read_only=True, **wal_options(settings, url)) as wal:
        node, state = await NodeLog.read_states(wal), await migration_state(wal)
    has_members = node is not None and node.cluster is not None and bool(node.cluster.members)
    if not has_members and state.phase is not MigrationPhase.MIGRATING:
        return False
    place = settings.of_backend(backend.name)
    if not (getattr(place, "listen", "") or getattr(place, "advertise", "")):
        raise ConfigError(
            f"this command may come to own {shown_url(url)}, which nodes use: say where they reach it, with "
            f"{backend.name}.listen, or stop them",
            key=f"{backend.name}.listen",
        )
    return True


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
