"""`tidewal status`: one screen of how a log and the node on it are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import typer

from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from .connect import completed
from .groups import lag_shown
from .letters import open_letters
from .logging_setup import logged
from .open_log import LogUrl, Prefix, opened
from .results import AsJson, print_rows
from .throttles import throttles_in_words

if TYPE_CHECKING:
    from ..runtime.rpc.protocol import Params

UNHEALTHY = 1  # exit status
OPEN_S = 5.0  # for a log whose owner has not answered within 2 s, or that has none
NEAR = 0.8  # of a limit


@logged
def status(url: LogUrl, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Show health, lag, sizes and what is near its limit: of the node that runs on a log, and of the log.

    Exits with 0 where all roles of the node answer and announce the time, its log takes appends and all tables can be
    read; with 1 where not, or where no node runs, or where the process that has the log open does not answer within
    about 7 seconds.
    """
    try:
        found = completed(_look(url, Names(prefix)))
    except TimeoutError:
        _print_silence(url, as_json)
        raise typer.Exit(UNHEALTHY) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    if not found["healthy"]:
        raise typer.Exit(UNHEALTHY)


def _print_silence(url: str, as_json: bool) -> None:
    why = "the process that has the log open does not answer: it hangs, or it recovers the log"
    if as_json:
        typer.echo(json.dumps({"wal": shown_url(url), "healthy": False, "error": why}, indent=2))
    else:
        typer.echo(f"node     of {shown_url(url)} is not healthy: {why}", err=True)


async def _look(url: str, names: Names) -> dict[str, Any]:
    backend = find_backend(url)
    runs = not await backend.abandoned(url)
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(None if runs else OPEN_S):  # else it waits long for a process that hangs
            wal = await stack.enter_async_context(opened(url, read_only=not runs))
        answers: Mapping[str, Params | None] = await _ask(wal, names) if runs else {}
        node = next((each for each in answers.values() if each is not None), None)
        beyond = await asyncio.to_thread(backend.inspect, url)
        return {
            "wal": shown_url(url),
            "healthy": node is not None
            and None not in answers.values()
            and _announces(node)
            and not node["refused"]
            and not any(each["unreadable"] for each in node["collections"]),
            "roles": {role: answer is not None for role, answer in answers.items()},
            "node": node,
            "sizes": [] if beyond is None else [f"{beyond.title}: {line}" for line in beyond.lines],
            "groups": await _groups(wal) if wal.capabilities.groups else [],
            "dead_letters": len(await open_letters(wal, names)),
        }


async def _ask(wal: Wal, names: Names) -> Mapping[str, Params | None]:
    from ..actors.client import Client

    async with Client(wal, prefix=names.prefix) as client:
        return await client.status()


def _announces(node: Params) -> bool:
    from ..actors.node_status import SILENT_S

    age_s = node["watermark_age_s"]
    return age_s is None or age_s < SILENT_S


async def _groups(wal: Wal) -> list[dict[str, Any]]:
    return [
        {
            "group": group.name,
            "channel": channel,
            "members": len(group.members),
            **await lag_shown(wal, channel, position),
        }
        for group in await wal.groups()
        for channel, position in sorted(group.positions.items())
    ]


def _print(found: dict[str, Any]) -> None:
    node = found["node"]
    typer.echo(f"log      {found['wal']}")
    if node is None:
        typer.echo("node     none answers: start one with `tidewal run` and the --data or --wal of this log")
    else:
        silent = [role for role, answers in found["roles"].items() if not answers]
        unreadable = sum(bool(each["unreadable"]) for each in node["collections"])
        if node["refused"] and not silent:
            state = "not healthy: the log refuses appends"
        elif unreadable and not silent:
            state = f"not healthy: tables of {unreadable} collections cannot be read"
        else:
            state = "healthy" if found["healthy"] else f"not healthy; no answer of: {', '.join(silent) or 'none'}"
        at = f" at {node['address']}" if node.get("address") else ""  # nodes of earlier versions say none
        typer.echo(f"node     {node['node']}{at}, {state}; time announced {_seconds(node['watermark_age_s'])} ago")
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
    if node["refused"]:
        typer.echo(f"refused  {node['refused']}")
    for said in throttles_in_words(node.get("throttled")):
        typer.echo(f"slowed   {said}")
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
