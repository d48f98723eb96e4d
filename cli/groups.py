"""`tidewal groups`: show consumer groups, move their positions, drop them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from ..runtime.errors import ChannelNotFound, GroupNotFound, InvalidRequest
from ..runtime.log.wal import From, FromId, FromTime, GroupInfo, Start, Wal
from .connect import over_log
from .open_log import LogUrl
from .results import print_rows

groups = typer.Typer(help="Show consumer groups, move their positions, drop them.", no_args_is_help=True)


@groups.command("list")
def list_groups(url: LogUrl, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show all groups: their members, and for each channel the group's position and the end of the channel."""
    described = over_log(url, describe_groups, read_only=True)
    if as_json or not described:
        typer.echo(json.dumps(described, indent=2) if as_json else "none")
    else:
        print_rows(("group", "channel", "member", "acknowledged to", "state"), _rows(described))


@groups.command()
def seek(
    url: LogUrl,
    group: Annotated[str, typer.Argument(help="The group.")],
    channel: Annotated[str, typer.Argument(help="The channel, which must not be assigned to a member.")],
    to: Annotated[str, typer.Argument(help="earliest, latest, a message id in hex (with it), or an ISO 8601 time.")],
    create: Annotated[bool, typer.Option("--create", help="Make the group where there is none of this name.")] = False,
) -> None:
    """Move a group's position in a channel: the entries from there on are delivered, again or for the first time."""
    start = start_of(to)
    over_log(url, lambda wal: _seek(wal, group, channel, start, create=create))


async def _seek(wal: Wal, group: str, channel: str, start: Start, *, create: bool) -> None:
    known = [info.name for info in await wal.groups()]
    if not create and group not in known:
        near = "".join(f"; the nearest is {each}" for each in get_close_matches(group, known, n=1))
        raise GroupNotFound(f"no group {group} has a position here{near}; --create makes one", group=group)
    await wal.seek_group(group, channel, start)


@groups.command()
def drop(url: LogUrl, group: Annotated[str, typer.Argument(help="The group, which must not have members.")]) -> None:
    """Drop a group and its positions."""
    over_log(url, lambda wal: wal.drop_group(group))


def start_of(text: str) -> Start:
    """The start in a channel that a command's argument names. Raises `InvalidRequest`."""
    if text in ("earliest", "latest"):
        return From(text)
    if len(text) == 16 and all(each in "0123456789abcdefABCDEF" for each in text):
        return FromId(bytes.fromhex(text), inclusive=True)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text!r}: earliest, latest, an id of 16 hex digits or an ISO 8601 time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return FromTime.at(moment)


async def describe_groups(wal: Wal) -> list[dict[str, Any]]:
    """All groups with their members and positions, as JSON has them; `behind` says whether entries are not yet
    acknowledged."""
    return [await _describe(wal, info) for info in await wal.groups()]


async def _describe(wal: Wal, info: GroupInfo) -> dict[str, Any]:
    positions: dict[str, Any] = {}
    for channel, position in sorted(info.positions.items()):
        try:
            latest = await wal.latest_id(channel)
        except ChannelNotFound:  # dropped meanwhile
            continue
        positions[channel] = {
            "acknowledged_to": position.hex() if position else None,
            "latest_id": latest.hex() if latest else None,
            "behind": latest is not None and (position or b"") < latest,
        }
    members = {member: sorted(channels) for member, channels in sorted(info.members.items())}
    return {"name": info.name, "members": members, "positions": positions}


def _rows(described: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """A row for each channel of each group; a group without any has one, too."""
    for group in described:
        positions = group["positions"]
        holders = {channel: member for member, channels in group["members"].items() for channel in channels}
        for channel in sorted({*positions, *holders}) or [None]:
            row: dict[str, object] = {"group": group["name"], "channel": channel, "member": holders.get(channel)}
            if channel in positions:
                row |= {"acknowledged to": positions[channel]["acknowledged_to"], "state": _state(positions[channel])}
            yield row


def _state(position: dict[str, Any]) -> str:
    return f"behind {position['latest_id']}" if position["behind"] else "at the end"


def lines(described: list[dict[str, Any]]) -> list[str]:
    """The lines that show groups on a terminal."""
    shown: list[str] = []
    for group in described:
        shown.append(f"{group['name']}: {len(group['members'])} members")
        shown += [f"  member {member}: {', '.join(channels) or '-'}" for member, channels in group["members"].items()]
        for channel, position in group["positions"].items():
            shown.append(f"  {channel}: acknowledged to {position['acknowledged_to'] or '-'}, {_state(position)}")
    return shown
