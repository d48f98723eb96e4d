"""`tidewal status`: one screen of how a log and the node on it are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from ..runtime.clock import physical_ms
from ..runtime.errors import ChannelNotFound, PositionLost
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import FromId, GroupInfo, Wal
from .connect import AsJson, Prefix, completed
from .open_log import LogUrl, entries, opened, stored
from .results import print_rows

if TYPE_CHECKING:
    from ..runtime.rpc.protocol import Params

UNHEALTHY = 1  # exit status
SILENT_S = 5.0  # without an announced time until a node counts as unhealthy, as `/healthz` has it
NEAR = 0.8  # of a limit
COUNTED_MAX = 10_000  # entries of a group's lag; more are as many


def status(url: LogUrl, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Show health, lag, sizes and what is near its limit: of the node that runs on a log, and of the log.

    Exits with 0 where all roles of the node answer and announce the time, with 1 where not, or where no node runs.
    """
    found = completed(_look(url, Names(prefix)))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    if not found["healthy"]:
        raise typer.Exit(UNHEALTHY)


async def _look(url: str, names: Names) -> dict[str, Any]:
    backend = find_backend(url)
    runs = not await backend.abandoned(url)
    async with opened(url, read_only=not runs) as wal:
        answers: Mapping[str, Params | None] = await _ask(wal, names) if runs else {}
        node = next((each for each in answers.values() if each is not None), None)
        beyond = await asyncio.to_thread(backend.inspect, url)
        return {
            "wal": shown_url(url),
            "healthy": node is not None and None not in answers.values() and _announces(node),
            "roles": {role: answer is not None for role, answer in answers.items()},
            "node": node,
            "sizes": [] if beyond is None else [f"{beyond.title}: {line}" for line in beyond.lines],
            "groups": await _groups(wal) if wal.capabilities.groups else [],
            "dead_letters": await _count(wal, names.dead_letters),
        }


async def _ask(wal: Wal, names: Names) -> Mapping[str, Params | None]:
    from ..actors.client import Client

    async with Client(wal, prefix=names.prefix) as client:
        return await client.status()


def _announces(node: Params) -> bool:
    age_s = node["watermark_age_s"]
    return age_s is None or age_s < SILENT_S


async def _groups(wal: Wal) -> list[dict[str, Any]]:
    return [await _lag(wal, group, channel) for group in await wal.groups() for channel in sorted(group.positions)]


async def _lag(wal: Wal, group: GroupInfo, channel: str) -> dict[str, Any]:
    """How far a group is behind in a channel: in entries, up to `COUNTED_MAX`, and by the age of the oldest of them."""
    position, behind, oldest = group.positions[channel], 0, 0
    try:
        info = await wal.describe(channel)
        latest = info.latest_id
        if info.first_id is not None and latest is not None and (position or b"") < latest:
            begin = (
                FromId(position) if position and position >= info.first_id else FromId(info.first_id, inclusive=True)
            )
            async for entry in entries(wal, channel, begin, latest):
                behind, oldest = behind + 1, oldest or entry.timestamp
                if behind == COUNTED_MAX:
                    break
    except (ChannelNotFound, PositionLost):  # dropped, or emptied, meanwhile
        pass
    age_s = round(max(0.0, time.time() - physical_ms(oldest) / 1000), 1) if oldest else 0.0
    lag = {"lag_entries": behind, "lag_s": age_s}
    return {"group": group.name, "channel": channel, "members": len(group.members), **lag}


async def _count(wal: Wal, channel: str) -> int:
    counted = 0
    async for _ in stored(wal, channel):
        counted += 1
    return counted


def _print(found: dict[str, Any]) -> None:
    node = found["node"]
    typer.echo(f"log      {found['wal']}")
    if node is None:
        typer.echo("node     none answers: start one with `tidewal run` and the --data or --wal of this log")
    else:
        silent = [role for role, answers in found["roles"].items() if not answers]
        state = "healthy" if found["healthy"] else f"not healthy; no answer of: {', '.join(silent) or 'none'}"
        typer.echo(f"node     {node['node']}, {state}; time announced {_seconds(node['watermark_age_s'])} ago")
    for size in found["sizes"]:
        typer.echo(f"size     {size}")
    typer.echo(
        f"letters  {found['dead_letters']:,} dead letters" + (": tidewal dlq list" * bool(found["dead_letters"]))
    )
    if node is not None:
        _print_node(node)
    if found["groups"]:
        print_rows(("group", "channel", "members", "lag_entries", "lag_s"), found["groups"])


def _print_node(node: Params) -> None:
    near = [each for each in node["limits"] if each["used"] >= NEAR * each["limit"]]
    for each in near:
        share = f"{each['used'] / each['limit']:.0%} of {each['limit']:,} bytes"
        typer.echo(f"limit    {' '.join(filter(None, (each['key'], each['collection'])))}: {share}")
    if not near:
        typer.echo(f"limits   none is used to {NEAR:.0%}")
    for each in node["collections"]:
        if each["unreadable"]:
            typer.echo(f"tables   of {each['name']} cannot be read: {each['unreadable']}")
    if node["collections"]:
        print_rows(
            ("name", "rows", "memory_bytes", "unflushed_bytes", "query_lag_s", "table_lag_s"), node["collections"]
        )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
