"""`tidewal groups`: show consumer groups, move their positions, drop them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ..runtime.errors import ChannelNotFound, GroupNotFound, InvalidRequest
from ..runtime.groups.lag import COUNTED_MAX, lag_of
from ..runtime.groups.positions import resolve
from ..runtime.log.wal import ChannelInfo, Delivery, From, FromId, FromTime, GroupInfo, Start, Wal
from ..runtime.nearest import nearest
from .connect import over_log
from .logging_setup import logged
from .open_log import LogUrl, entries
from .results import AsJson, print_rows

COLUMNS = ("group", "channel", "member", "acknowledged to", "state")
LAG_COLUMNS = ("group", "channel", "member", "acknowledged to", "lag_entries", "lag_s")

groups: typer.Typer = typer.Typer(help="Show consumer groups, move their positions, drop them.", no_args_is_help=True)


@groups.command("list")
@logged
def list_groups(url: LogUrl, as_json: AsJson = False) -> None:
    """Show all groups: their members, and for each channel the group's position, the entries that it has not
    acknowledged (counted up to 10,000), and the age of the oldest of them in seconds ("-" where they
    have no time)."""
    described = over_log(url, lambda wal: describe_groups(wal, lag=True), read_only=True)
    if as_json or not described:
        typer.echo(json.dumps(described, indent=2) if as_json else "none")
    else:
        print_rows(LAG_COLUMNS, rows(described))


@groups.command()
@logged
def seek(
    url: LogUrl,
    group: Annotated[str, typer.Argument(help="The group.")],
    channel: Annotated[str, typer.Argument(help="The channel, which must not be assigned to a member.")],
    to: Annotated[str, typer.Argument(help="earliest, latest, a message id in hex (with it), or an ISO 8601 time.")],
    create: Annotated[bool, typer.Option("--create", help="Make the group where there is none of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move a group's position in a channel: the entries from there on are delivered, again or for the first time.

    Says from where to where, and how many entries are passed over or delivered again (counted up to 10,000). What is
    passed over counts as done: in a queue it is removed. At a time, entries without one that lie before the first that
    has one are delivered.
    """
    start = start_of(to)
    moved = over_log(url, lambda wal: _seek(wal, group, channel, start, create=create))
    typer.echo(json.dumps(moved, indent=2) if as_json else _moved(moved))


async def _seek(wal: Wal, group: str, channel: str, start: Start, *, create: bool) -> dict[str, Any]:
    known = {info.name: info for info in await wal.groups()}
    if not create and group not in known:
        raise GroupNotFound(
            f"no group {group!r} has a position here{nearest(group, known)}; --create makes one", group=group
        )
    before = (known[group].positions.get(channel) if group in known else None) or b""
    after = await resolve(wal, channel, start)
    info = await wal.describe(channel)
    between = await _count(wal, info, min(before, after), max(before, after))  # now: a queue removes what is done
    await wal.seek_group(group, channel, start)
    return {
        "group": group,
        "channel": channel,
        "from": before.hex() or None,
        "to": after.hex() or None,
        "passed_over": between if after > before else 0,
        "delivered_again": between if after < before else 0,
        "removed": after > before and info.policy.delivery is Delivery.QUEUE,
    }


async def _count(wal: Wal, info: ChannelInfo, behind: bytes, upto: bytes) -> int:
    """How many entries there are behind the one position up to the other, up to `COUNTED_MAX`."""
    upto = min(upto, info.latest_id or b"")
    if info.first_id is None or behind >= upto or upto < info.first_id:
        return 0
    begin = FromId(behind) if behind >= info.first_id else FromId(info.first_id, inclusive=True)
    count = 0
    async for entry in entries(wal, info.name, begin, upto):
        count += entry.id <= upto
        if count == COUNTED_MAX:
            break
    return count


def _moved(moved: dict[str, Any]) -> str:
    begin, end = (moved[side] or "the beginning" for side in ("from", "to"))
    line = f"{moved['group']}  {moved['channel']}  from {begin} to {end}"
    for key, words in (("passed_over", "passed over"), ("delivered_again", "delivered again")):
        if count := moved[key]:
            line += f"; {words}: {count:,}{' or more' if count == COUNTED_MAX else ''} entries"
    return line + (", which are removed: the channel is a queue" if moved["removed"] and moved["passed_over"] else "")


@groups.command()
@logged
def drop(url: LogUrl, group: Annotated[str, typer.Argument(help="The group, which must not have members.")]) -> None:
    """Drop a group and its positions."""
    over_log(url, lambda wal: _drop(wal, group))


async def _drop(wal: Wal, group: str) -> None:
    known = [info.name for info in await wal.groups()]
    if group not in known:
        raise GroupNotFound(f"there is no group {group!r}{nearest(group, known)}", group=group)
    await wal.drop_group(group)


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


async def describe_groups(wal: Wal, *, lag: bool = False) -> list[dict[str, Any]]:
    """All groups with their members and positions, as JSON has them; `behind` says whether entries are not yet
    acknowledged, and with `lag` each position has what `lag_shown` returns."""
    return [await _describe(wal, info, lag) for info in await wal.groups()]


async def lag_shown(wal: Wal, channel: str, position: bytes | None) -> dict[str, float | None]:
    """How far `position` is behind in a channel: in entries, up to `COUNTED_MAX`, and by the age of the oldest of
    them that has a time; None where none of them has one."""
    lag = await lag_of(wal, channel, position)
    seconds = lag.seconds(time.time())
    return {"lag_entries": lag.entries, "lag_s": seconds if seconds is None else round(seconds, 1)}


async def _describe(wal: Wal, info: GroupInfo, lag: bool) -> dict[str, Any]:
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
            **(await lag_shown(wal, channel, position) if lag else {}),
        }
    members = {member: sorted(channels) for member, channels in sorted(info.members.items())}
    return {"name": info.name, "members": members, "positions": positions}


def rows(described: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """A row for each channel of each group; a group without any has one, too."""
    for group in described:
        positions = group["positions"]
        holders = {channel: member for member, channels in group["members"].items() for channel in channels}
        for channel in sorted({*positions, *holders}) or [None]:
            row: dict[str, object] = {"group": group["name"], "channel": channel, "member": holders.get(channel)}
            if channel in positions:
                position = positions[channel]
                row |= {**position, "acknowledged to": position["acknowledged_to"], "state": _state(position)}
            yield row


def _state(position: dict[str, Any]) -> str:
    return f"behind {position['latest_id']}" if position["behind"] else "at the end"
