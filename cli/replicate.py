"""`tidewal replicate` and `tidewal promote`: a log is mirrored into a replica, which takes its place."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..actors.datanode.moved_tables import MovedTables
from ..runtime.config.loading import load_settings, url_of, wal_options
from ..runtime.errors import InvalidRequest, TidewalError
from ..runtime.groups.lag import lag_of
from ..runtime.log.opening import find_backend, open_wal
from ..runtime.log.redaction import shown_url
from ..runtime.log.replication_state import ReplicationPhase, ReplicationState, replication_state
from ..runtime.log.wal import Wal
from ..runtime.metrics.metrics import Metrics
from ..runtime.metrics.server import Health, MetricsServer
from ..runtime.replication.forced_promotion import line_of, promote_at_line
from ..runtime.replication.promotion import (
    forget_replica,
    forget_source,
    promote_alone,
    replica_of,
)
from ..runtime.replication.promotion import promote as promote_replica
from ..runtime.replication.replication_lag import ReplicationLag
from ..runtime.replication.replicator import Replicator
from ..runtime.signals import Interrupted, until_stopped
from ..runtime.tables.table_store import open_tables
from ..runtime.waiting import ended
from .connect import completed
from .open_log import LogUrl, opened, shown_time
from .owned_log import owned_log
from .results import AsJson
from .salvage_file import check_new, write_left_out, write_salvaged

NODE_ID = "replicator"  # in the labels of its metrics
RETRY_S = 3.0  # from an error that may pass to the next attempt

_log = logging.getLogger(__name__)

SourceUrl = Annotated[str, typer.Option("--from", help="The source: the URL of a log, or its directory.")]


def replicate(
    source: SourceUrl = "",
    to: Annotated[str, typer.Option(help="The replica: the URL of a log that is empty or not there yet.")] = "",
    status: Annotated[
        bool, typer.Option("--status", help="Show what the replica has; with --from also what it lacks.")
    ] = False,
    forget: Annotated[
        str,
        typer.Option(help="With --from alone: the id of a replica that is lost, for which the source holds entries."),
    ] = "",
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics and /healthz; 0 is off.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Mirror all that a log has, and what comes to it, into a replica, until SIGTERM or SIGINT.

    Each entry is brought over once, in order, with its time; channels that come and go, and the positions of groups, go
    along. Programs can read the replica; opening it to write raises ReplicaReadOnly until it is promoted. A replicator
    that was killed goes on with the same command. The source may be the log of nodes, which run meanwhile.
    """
    source, to = _absolute(source), _absolute(to)
    if forget:
        if to or not source:
            raise InvalidRequest("--forget is given with --from, the source, and without --to", argument="forget")
        completed(_replica_forgotten(source, forget))
        typer.echo(f"{shown_url(source)} holds nothing for {forget} any more")
        return
    if not to:
        raise InvalidRequest("--to is missing: the URL of the replica", argument="to")
    if status:
        fields = completed(_status(source, to))
        typer.echo(json.dumps(fields, indent=2) if as_json else _text(fields))
        return
    if not source:
        raise InvalidRequest("--from is missing: the URL of the log that is to be mirrored", argument="from")
    _check_two(source, to)
    _run(source, to, metrics_port)


def promote(
    url: LogUrl,
    source: SourceUrl = "",
    force: Annotated[
        bool, typer.Option("--force", help="The source cannot be reached: use what the replica has.")
    ] = False,
    to: Annotated[
        str,
        typer.Option(help="With --force, of a log of nodes: an empty log, to which goes what the replica has."),
    ] = "",
    tables: Annotated[
        str,
        typer.Option(
            help="Where nodes have the tables that they fill from the source: a directory (DATA/tables) or a URL."
        ),
    ] = "",
    dropped: Annotated[
        list[str] | None,
        typer.Option(help="With --to: a collection that was dropped behind what goes there, whose table is gone."),
    ] = None,
    salvage: Annotated[
        Path | None,
        typer.Option(help="Write what the source has and the replica has not into this new file, JSON lines."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="The source of a promoted replica is given up: it is not salvaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a replica into use, in the place of its source.

    With --from the source is fenced first, so that opening it raises Moved, then what it has is brought over: no
    program may have either open. With --force the replica comes into use with what it has, and keeps how far that is;
    when the source is back, the same command with --from and --salvage fences it, and writes what it had beyond. Where
    it will not come back, --forget gives that up. Nodes are stopped before, and started on the replica afterwards, with
    the tables that they have filled. With --force the replica of their log goes to an empty one, --to, up to the last
    time up to which all of its channels are complete; the tables go back to that time, and --salvage writes what the
    replica has above it. Exits with 0 when the replica, or that log, is in use.
    """
    url, source, to = _absolute(url), _absolute(source), _absolute(to)
    if bool(source) + force + forget != 1:
        raise InvalidRequest(
            "give --from, the source, or --force where it cannot be reached, or --forget behind that", argument="from"
        )
    _check_two(source, url)
    if to and not force:
        raise InvalidRequest("--to is given with --force: with --from the replica itself comes into use", argument="to")
    if to == url:
        raise InvalidRequest("--to is the replica itself: give the URL of an empty log", argument="to")
    if tables and not (source or to):
        raise InvalidRequest(
            "--tables go on with the replica of a log of nodes: give --from, or --force and --to", argument="tables"
        )
    if dropped and not to:
        raise InvalidRequest("--dropped is given with --force and --to", argument="dropped")
    if salvage is not None and not (source or to):
        raise InvalidRequest("--salvage reads the source: give --from", argument="salvage")
    if salvage is not None:
        check_new(salvage)
    if forget:
        fields = completed(_forgotten(url))
    elif to:
        fields = completed(_promoted_at_line(url, to, tables, frozenset(dropped or ()), salvage))
    else:
        fields = completed(_promoted_alone(url) if force else _promoted(url, source, tables, salvage))
    typer.echo(json.dumps(fields, indent=2) if as_json else _text(fields))


# ---- replicate -----------------------------------------------------------------------------------------------------


def _run(source: str, to: str, metrics_port: int) -> None:
    import uvloop

    try:
        uvloop.run(until_stopped(_replicated(source, to, metrics_port)))
    except Interrupted:
        typer.echo(f"stopped: {shown_url(to)} goes on with the same command")


async def _replicated(source: str, to: str, metrics_port: int) -> None:
    """Replicate; errors that may pass are waited out once it has begun."""
    metrics, failed, begun = Metrics(NODE_ID), "", False
    lag = ReplicationLag(metrics)
    async with _served(metrics, metrics_port, lambda: Health(not failed, {"error": failed} if failed else {})):
        while True:
            try:
                async with _source(source) as old, _reported(lag, old), opened_replica(old, source, to) as new:
                    if not begun:
                        typer.echo(f"replicating {shown_url(source)} to {shown_url(to)}", err=True)
                    begun, failed = True, ""
                    given = load_settings().common.pre_created_topic
                    heartbeats = given.timeticker if given.enabled else ""
                    await Replicator(old, new, source, lag=lag, heartbeats=heartbeats).run()
            except TidewalError as error:
                if not (error.retryable and begun):
                    raise
                failed = str(error)
                _log.warning("replication is tried again in %g s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)


@asynccontextmanager
async def _served(metrics: Metrics, port: int, health: Any) -> AsyncGenerator[None]:
    if not port:
        yield
        return
    async with MetricsServer(metrics, health, port=port):
        yield


@asynccontextmanager
async def _reported(lag: ReplicationLag, source: Wal) -> AsyncGenerator[None]:
    """The lag is reported while the block runs, whether the replica answers or not."""
    reporting = asyncio.create_task(lag.run(source), name="replication lag")
    try:
        yield
    finally:
        await ended(reporting)


@asynccontextmanager
async def _source(url: str) -> AsyncGenerator[Wal]:
    """The source, which programs use meanwhile. Raises `ConfigError` where none is there."""
    await find_backend(url).abandoned(url)
    async with await open_wal(url, **wal_options(load_settings(), url)) as wal:
        yield wal


async def _replica_forgotten(source: str, id: str) -> None:
    async with _source(source) as wal:
        await forget_replica(wal, id)


@asynccontextmanager
async def opened_replica(source: Wal, source_url: str, url: str) -> AsyncGenerator[Wal]:
    """The replica at `url` of the log `source`, which is made where it is not there, to write it. Others can read it
    meanwhile, but not before it says what it is: a program that had opened it to write could go on with that. Raises as
    `owned_log` and `Replicator.run`."""
    async with owned_log(url, create=True) as wal:
        if (await replication_state(wal)).phase is ReplicationPhase.NONE:
            async with Replicator(source, wal, source_url).claimed():
                pass
    async with owned_log(url, serve=True) as wal:
        yield wal


async def _status(source: str, to: str) -> dict[str, Any]:
    async with opened(to) as wal:
        fields = _fields(await replication_state(wal))
    if source:
        async with opened(source) as wal:
            for name, each in fields["channels"].items():
                lag = await lag_of(wal, name, bytes.fromhex(each["source"]) or None)
                each["lag_entries"] = lag.entries
    return fields


# ---- promote -------------------------------------------------------------------------------------------------------


async def _promoted(url: str, source: str, tables: str, salvage: Path | None) -> dict[str, Any]:
    moved = MovedTables(open_tables(tables)) if tables else None
    async with owned_log(source) as old, owned_log(url) as new:
        state = await promote_replica(old, new, source, url, tables=moved)
        fields = _fields(state)
        if salvage is not None:
            fields["salvaged"] = await write_salvaged(old, state, salvage)
        return fields


async def _promoted_at_line(
    url: str, to: str, tables: str, dropped: frozenset[str], salvage: Path | None
) -> dict[str, Any]:
    def on_progress(line: str) -> None:
        typer.echo(line, err=True)

    moved = MovedTables(open_tables(tables)) if tables else None
    async with owned_log(url) as replica:
        state = await replica_of(replica)
        if state.phase is ReplicationPhase.REPLICA:
            line_of(state)  # else there may be a directory for nothing
        async with owned_log(to, create=True) as new:
            state = await promote_at_line(replica, new, url, to, tables=moved, dropped=dropped, on_progress=on_progress)
        fields = {**_fields(state), "to": shown_url(to)}
        if salvage is not None:
            fields["salvaged"] = await write_left_out(replica, state, salvage)
        return fields


async def _promoted_alone(url: str) -> dict[str, Any]:
    async with owned_log(url) as new:
        await replica_of(new)
        return _fields(await promote_alone(new))


async def _forgotten(url: str) -> dict[str, Any]:
    async with owned_log(url) as new:
        await forget_source(new)
        return _fields(await replica_of(new))


# ---- what is printed -----------------------------------------------------------------------------------------------


def _absolute(url: str) -> str:
    """`url` as it means the same log to all processes."""
    url = url_of(url) if url else ""
    return find_backend(url).absolute_url(url) if url else ""


def _check_two(source: str, replica: str) -> None:
    """Else it would be said that a process, this one, has the log open."""
    if source == replica:
        raise InvalidRequest("--from is the replica itself: the source and the replica are two logs", argument="from")


def _fields(state: ReplicationState) -> dict[str, Any]:
    channels = {
        name: {
            "source": each.source.hex(),
            "target": each.target.hex(),
            "time": shown_time(each.timestamp),
            "halted": each.halted,
            "behind": each.behind,
        }
        for name, each in state.channels.items()
    }
    return {
        "phase": str(state.phase),
        "id": state.log_id,
        "other": state.other,
        "of_node": state.of_node,
        "line": shown_time(state.line["time"]) if state.line else None,
        "line_kept": state.line_kept,
        "channels": channels,
    }


def _text(fields: dict[str, Any]) -> str:
    lines = [fields["phase"] + (f" of {fields['other']}" if fields["other"] else "")]
    if fields["id"]:
        lines.append(f"id {fields['id']}")
    if fields["of_node"]:
        lines.append("a log of nodes")
    if fields["line"] is not None:
        kept = f", keeps {fields['line_kept']:,} bytes for that" if fields["line_kept"] else ""
        lines.append(f"complete up to {fields['line']}{kept}")
    if "to" in fields:
        lines.append(f"{fields['to']} goes on")
    for name, each in fields["channels"].items():
        lag = f", lacks {each['lag_entries']:,} entries" if "lag_entries" in each else ""
        halted = f", halted: {each['halted']}" if each["halted"] else ""
        lines.append(f"{name}: up to {each['source'] or 'nothing'}, {each['time']}{lag}{halted}")
    if "salvaged" in fields:
        lines.append(f"{fields['salvaged']:,} entries salvaged")
    return "\n".join(lines)
