"""`tidewal migrate`: what a log has goes to another log, which takes its place."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import typer

from ..actors.datanode.moved_tables import MovedTables
from ..runtime.config.loading import url_of
from ..runtime.errors import BadRecord, ConfigError, InvalidRequest, Unavailable
from ..runtime.log.migration_state import MigrationPhase, MigrationState, migration_state
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.migration.beginning import has_ended
from ..runtime.migration.migration import MigrationProof, cancel_migration, cancellable_state, check_source
from ..runtime.migration.migration import migrate as migrate_log
from ..runtime.migration.node_log import NodeLog
from ..runtime.migration.preparation import prepare as prepare_log
from ..runtime.migration.preparation import until_unused
from ..runtime.migration.shared_migration import migrate_in_use
from ..runtime.migration.translation import translate_position
from ..runtime.streams.messages import Position
from ..runtime.tables.table_store import open_tables
from .connect import completed
from .online_migration import (
    cancelled_by_node,
    is_moved_by_node,
    is_open_elsewhere,
    log_in_use,
    migrated_by_node,
    old_log,
)
from .open_log import LogUrl, opened
from .owned_log import owned_log
from .results import AsJson

TARGET_S = 20.0  # for nodes to close a directory into which they look


def migrate(
    url: LogUrl,
    to: Annotated[
        str, typer.Option(help="Where it goes: the URL of a log that is empty or not there yet.", callback=url_of)
    ] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Take a migration back that has not ended.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show how far it is, and change nothing.")] = False,
    tables: Annotated[
        str,
        typer.Option(
            help="Where nodes have the tables that they fill from the old log: a directory (DATA/tables) or a URL."
        ),
    ] = "",
    position: Annotated[
        str, typer.Option(help="Print, in hex, where a saved position (hex of Position.to_bytes) is in the new log.")
    ] = "",
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="Of a log without nodes: copy first, while programs use it, then wait until none does."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy all that a log has to another one, prove that both are equal, and let that one take its place.

    Where one node alone uses the log of a directory, it does so itself while it runs, with its own tables and settings.
    Where several do, and on brokers, this command copies while nodes run; for what is left they stop their roles. In
    both ways nodes and clients go on with the new log. Else no program may have the old log open: nodes are stopped
    before, and started on the new log afterwards. The tables that nodes have filled go on with the new log. A migration
    that was interrupted goes on with the same command. When it has ended, opening the old log to write raises Moved,
    with the URL of the new one. The environment has the credentials for both. Exits with 0 when the new log is open.
    """
    url, to = _absolute(url), _absolute(to)
    if cancel + status + bool(position) > 1:
        raise InvalidRequest("--cancel, --status and --position exclude each other: give one of them")
    if status:
        state = completed(_state(url))
        typer.echo(json.dumps(_fields(state), indent=2) if as_json else _text(state))
        return
    if not to:
        raise InvalidRequest("--to is missing: the URL of the log that it is to go to", argument="to")
    if position:
        typer.echo(completed(_translated(url, to, position)).to_bytes().hex())
    elif cancel:
        completed(_cancelled(url, to))
        typer.echo(f"taken back: {shown_url(url)} is in use again")
    else:
        proof = completed(_migrated(url, to, tables, prepare=prepare))
        typer.echo(json.dumps(proof.to_wire(), indent=2) if as_json else "\n".join(_lines(proof)))


async def _state(url: str) -> MigrationState:
    async with opened(url) as wal:
        return await migration_state(wal)


async def _migrated(url: str, to: str, tables: str, *, prepare: bool) -> MigrationProof:
    def on_progress(line: str) -> None:
        typer.echo(line, err=True)

    moved = MovedTables(open_tables(tables)) if tables else None
    if await is_open_elsewhere(url):
        async with log_in_use(url) as old:
            if not await is_moved_by_node(old):
                await check_source(old, to)
                if (proof := await _proof_of_ended(old, to)) is not None:
                    return proof
                async with _target(old, to) as new:
                    return await migrate_in_use(old, new, url, to, tables=moved, on_progress=on_progress)
        return await migrated_by_node(url, to, on_progress)
    async with old_log(url) as old:
        await check_source(old, to)
        async with _target(old, to) as new:
            if not old.capabilities.one_node and await NodeLog.read_states(old) is not None:
                return await migrate_in_use(old, new, url, to, tables=moved, on_progress=on_progress)
            compared = None
            if prepare:
                compared = await prepare_log(old, new, url, to, tables=moved, on_progress=on_progress)
                await until_unused(old, moved, on_progress)
            return await migrate_log(old, new, url, to, tables=moved, on_progress=on_progress, compared=compared)


async def _proof_of_ended(old: Wal, to: str) -> MigrationProof | None:
    """What is in both logs, where an earlier run has ended the migration: nodes may use the new one then."""
    state = await migration_state(old)
    if state.phase is MigrationPhase.MIGRATED:
        with suppress(ConfigError, Unavailable):  # it goes on, and says what there is
            async with opened(to) as new:
                if await has_ended(new, state, to):
                    return MigrationProof.from_wire(state.proof)
    return None


@asynccontextmanager
async def _target(old: Wal, to: str) -> AsyncGenerator[Wal]:
    """The log at `to`, to which `old` goes. Once `old` is migrated nodes look now and then whether `to` is in use yet,
    by opening it."""
    is_looked_at = (await migration_state(old)).phase is MigrationPhase.MIGRATED
    async with owned_log(to, create=True, wait_s=TARGET_S if is_looked_at else 0.0) as new:
        yield new


async def _cancelled(url: str, to: str) -> None:
    if await is_open_elsewhere(url):
        async with log_in_use(url) as old:
            if not await is_moved_by_node(old):
                await _taken_back(old, to)
                return
        await cancelled_by_node(url, to)
        return
    async with old_log(url) as old:
        await _taken_back(old, to)


async def _taken_back(old: Wal, to: str) -> None:
    await cancellable_state(old, to)
    if await _proof_of_ended(old, to) is not None:  # nodes have it open
        raise InvalidRequest("nothing can be taken back: it is migrated already, and the other log is in use")
    async with _target(old, to) as new:
        await cancel_migration(old, new, to)


async def _translated(url: str, to: str, position: str) -> Position:
    try:
        saved = Position.from_bytes(bytes.fromhex(position))
    except (ValueError, BadRecord) as error:
        raise InvalidRequest(f"no position: {error}", argument="position") from None
    async with opened(url) as old, opened(to) as new:
        return await translate_position(old, new, saved)


def _absolute(url: str) -> str:
    """`url`, in the form in which both logs keep it: a directory from the root on, so that it means the same one to
    all processes."""
    if not url:
        return url
    url = find_backend(url).absolute_url(url)
    scheme, _, rest = url.partition("://")
    path, mark, options = rest.partition("?")
    return f"{scheme}://{os.path.abspath(path)}{mark}{options}" if path.startswith("/") else url


def _fields(state: MigrationState) -> dict[str, Any]:
    proof: Mapping[str, Any] = state.proof if state.phase is MigrationPhase.MIGRATED else {}
    return {"phase": str(state.phase), "id": state.id, "other": state.other, **proof}


def _text(state: MigrationState) -> str:
    with_other = f", the other log is {state.other}" if state.other else ""
    lines = [f"{state.phase}{with_other}"]
    is_proven = state.phase is MigrationPhase.MIGRATED
    return "\n".join(lines + (_lines(MigrationProof.from_wire(state.proof)) if is_proven else []))


def _lines(proof: MigrationProof) -> list[str]:
    channels = [
        f"{name}: {each.entries:,} entries, {each.bytes:,} bytes, checksum {each.checksum}"
        for name, each in proof.channels.items()
    ]
    return [*channels, f"{len(channels)} channels and {len(proof.groups)} groups"]
