"""`tidewal inspect`: the content of a log: channels, catalog, leases, cuts; `tidewal inspect cluster`: its nodes."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
from .connect import over_log
from .groups import COLUMNS as GROUP_COLUMNS
from .groups import describe_groups
from .groups import rows as group_rows
from .inspect_cluster import cluster
from .logging_setup import logged
from .open_log import LogUrl, Prefix, catalog_of, shown_time, stored
from .results import AsJson, print_titled

CHANNEL_COLUMNS = ("name", "acks", "first id", "latest id", "entries", "bytes")
COLLECTION_COLUMNS = ("name", "id", "state", "shards", "key", "fields")
LEASE_COLUMNS = ("channel", "owner", "term", "until")
CUT_COLUMNS = ("channels", "collection", "stored", "newest", "time")


DEFAULT = "content"  # what `tidewal inspect URL` calls; no name that a log's directory is likely to have


class ContentByDefault(TyperGroup):
    """Commands of which one need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [DEFAULT, *args])


inspect: typer.Typer = typer.Typer(
    cls=ContentByDefault,
    help="Show what a log has: its channels with their policies, the catalog and the stored cuts; or its cluster's "
    "nodes.\n\n`tidewal inspect URL` is `tidewal inspect content URL`.",
)
inspect.command()(cluster)


@inspect.command(DEFAULT)
@logged
def content(
    url: LogUrl,
    count: Annotated[bool, typer.Option("--count/--no-count", help="Count the entries, which reads them all.")] = True,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Show the channels of a log with their policies, the catalog and the stored cuts.

    Reads through the process that has the log open, or opens the directory when there is none.
    """

    async def look(wal: Wal) -> tuple[Inspection | None, dict[str, Any]]:
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

    beyond, found = over_log(url, look, read_only=True)
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
    """For the cuts of the same channels, the number of stored ones, and the newest. What an earlier Tidewal has stored
    is about one collection alone."""
    found: dict[tuple[str, ...], list[Cut]] = {}
    async for entry in stored(wal, names.cuts):
        try:
            cut = Cut.from_record(decode(entry.payload, entry.id))
        except BadRecord:  # `tail` shows it with its reason
            continue
        found.setdefault((cut.collection, *sorted(cut.ends)), []).append(cut)
    return [_shown_cuts(found[key]) for key in sorted(found)]


def _shown_cuts(cuts: list[Cut]) -> dict[str, Any]:
    newest = max(cuts, key=lambda cut: cut.time)
    return {
        "collection": newest.collection or None,
        "channels": len(newest.ends),
        "stored": len(cuts),
        "newest": newest.time,
        "time": shown_time(newest.time),
        "ends": {channel: {"term": end.term, "cseq": end.cseq} for channel, end in newest.ends.items()},
    }


def _print(found: dict[str, Any], beyond: Inspection | None) -> None:
    if beyond is not None:
        typer.echo("\n".join([beyond.title, *(f"  {line}" for line in beyond.lines or ["none"]), ""]))
    leader = found["leader"]
    for title, columns, rows in (
        ("channels", CHANNEL_COLUMNS, [_channel_row(each) for each in found["channels"]]),
        ("groups", GROUP_COLUMNS, list(group_rows(found["groups"]))),
        ("leader", ("node", "term"), [leader] if leader["node"] else []),
        ("collections", COLLECTION_COLUMNS, [_collection_row(each) for each in found["collections"]]),
        ("leases", LEASE_COLUMNS, [{**each, "owner": each["owner"] or "released"} for each in found["leases"]]),
        ("cuts", CUT_COLUMNS, found["cuts"]),
    ):
        print_titled(title, columns, rows)


def _channel_row(channel: dict[str, Any]) -> dict[str, object]:
    return {
        **channel,
        "acks": "ephemeral" if channel["ephemeral"] else channel["acks"],
        "first id": channel["first_id"],
        "latest id": channel["latest_id"],
        "entries": f"{channel['entries']:,}" if "entries" in channel else None,
        "bytes": f"{channel['bytes']:,}" if "bytes" in channel else None,
    }


def _collection_row(collection: dict[str, Any]) -> dict[str, object]:
    fields = ", ".join(f"{name} {kind}" for name, kind in collection["fields"].items())
    return {**collection, "shards": len(collection["vchannels"]), "key": collection["primary_key"], "fields": fields}
