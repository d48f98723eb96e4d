"""`tidewal inspect`: the content of a log: channels, catalog, leases, cuts."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from ..runtime.catalog.catalog import Catalog
from ..runtime.catalog.cuts import Cut
from ..runtime.errors import BadRecord, ChannelNotFound
from ..runtime.log.backend import Inspection
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.opening import find_backend
from ..runtime.log.record import decode
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.replicated.fold import Fold
from .groups import describe_groups
from .groups import lines as group_lines
from .open_log import LogUrl, catalog_of, opened, shown_time, stored
from .signals import INTERRUPTED, Interrupted, until_stopped


def inspect(
    url: LogUrl,
    count: Annotated[bool, typer.Option("--count/--no-count", help="Count the entries, which reads them all.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    prefix: Annotated[str, typer.Option(help="Prefix of the cluster's channels.")] = DEFAULT_PREFIX,
) -> None:
    """Show the channels of a log with their policies, the catalog and the stored cuts.

    Reads through the process that has the log open, or opens the directory when there is none.
    """
    import uvloop

    async def look() -> tuple[Inspection | None, dict[str, Any]]:
        async with opened(url) as wal:
            names = Names(prefix)
            beyond = await asyncio.to_thread(find_backend(url).inspect, url)
            return beyond, {
                "wal": shown_url(url),
                **({} if beyond is None else {beyond.title: beyond.content}),
                "channels": await _channels(wal, count),
                "groups": await describe_groups(wal) if wal.capabilities.groups else [],
                **_catalog(await catalog_of(wal, names)),
                "cuts": await _cuts(wal, names),
            }

    try:
        beyond, found = uvloop.run(until_stopped(look()))
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found, beyond)


async def _channels(wal: Wal, count: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in await wal.channels():
        try:
            info = await wal.describe(name)
            policy = info.policy
            channel: dict[str, Any] = {
                "name": name,
                "ephemeral": policy.ephemeral,
                "acks": policy.acks.value,
                "retention_s": policy.retention_s,
                "retention_bytes": policy.retention_bytes,
                "max_message_bytes": policy.max_message_bytes,
                "delivery": policy.delivery.value,
                "first_id": info.first_id.hex() if info.first_id else None,
                "latest_id": info.latest_id.hex() if info.latest_id else None,
            }
            if count and not policy.ephemeral:
                channel |= await _counts(wal, name)
        except ChannelNotFound:  # dropped meanwhile, as a client's replies are
            continue
        found.append(channel)
    return found


async def _counts(wal: Wal, name: str) -> dict[str, int]:
    counted = size = 0
    async for entry in stored(wal, name):
        counted += 1
        size += len(entry.payload)
    return {"entries": counted, "bytes": size}


def _catalog(fold: Fold[Catalog]) -> dict[str, Any]:
    catalog, claim = fold.state, fold.claim
    collections = [
        {
            "name": each.name,
            "id": each.id,
            "state": each.state,
            "primary_key": each.schema.primary_key,
            "fields": {field.name: field.type for field in each.schema.fields},
            "vchannels": list(each.vchannels),
            "created": shown_time(each.created_ts),
        }
        for each in catalog.collections.values()
    ]
    leases = [
        {
            "channel": name,
            "owner": state.owner,
            "term": state.term,
            "limit": state.limit,
            "until": shown_time(state.limit),
        }
        for name, state in sorted(catalog.channels.items())
    ]
    return {"leader": {"node": claim.node, "term": claim.term}, "collections": collections, "leases": leases}


async def _cuts(wal: Wal, names: Names) -> list[dict[str, Any]]:
    """For each collection the number of stored cuts, and the newest."""
    newest: dict[str, Cut] = {}
    counted: dict[str, int] = {}
    async for entry in stored(wal, names.cuts):
        try:
            cut = Cut.from_record(decode(entry.payload, entry.id))
        except BadRecord:  # `tail` shows it with its reason
            continue
        counted[cut.collection] = counted.get(cut.collection, 0) + 1
        if cut.collection not in newest or cut.time > newest[cut.collection].time:
            newest[cut.collection] = cut
    return [
        {
            "collection": name,
            "stored": counted[name],
            "newest": cut.time,
            "time": shown_time(cut.time),
            "ends": {channel: {"term": end.term, "cseq": end.cseq} for channel, end in cut.ends.items()},
        }
        for name, cut in sorted(newest.items())
    ]


def _print(found: dict[str, Any], beyond: Inspection | None) -> None:
    def section(title: str, lines: list[str]) -> None:
        typer.echo(f"{title}\n" + "".join(f"  {line}\n" for line in lines or ["none"]))

    if beyond is not None:
        section(beyond.title, beyond.lines)
    section(
        "channels",
        [
            f"{each['name']:44} {'ephemeral' if each['ephemeral'] else 'acks=' + each['acks']:10}"
            f" {_range(each)}{_counted(each)}"
            for each in found["channels"]
        ],
    )
    section("groups", group_lines(found["groups"]))
    section("leader", [f"{found['leader']['node']}, term {found['leader']['term']}"] if found["leader"]["node"] else [])
    section(
        "collections",
        [
            f"{each['name']} (id {each['id']}, {each['state']}): {len(each['vchannels'])} shards, key "
            f"{each['primary_key']}, " + ", ".join(f"{name} {kind}" for name, kind in each["fields"].items())
            for each in found["collections"]
        ],
    )
    section(
        "leases",
        [
            f"{each['channel']}: {each['owner'] or 'released'}, term {each['term']}, to {each['until']}"
            for each in found["leases"]
        ],
    )
    section(
        "cuts",
        [
            f"{each['collection']}: {each['stored']} stored, newest {each['newest']} ({each['time']})"
            for each in found["cuts"]
        ],
    )


def _range(channel: dict[str, Any]) -> str:
    return f"{channel['first_id'] or '-'} to {channel['latest_id'] or '-'}"


def _counted(channel: dict[str, Any]) -> str:
    return f"  {channel['entries']:,} entries, {channel['bytes']:,} bytes" if "entries" in channel else ""
