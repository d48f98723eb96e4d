"""`tidewal send`: messages into a channel that no node or program owns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ..runtime.clock import HybridClock
from ..runtime.errors import BadRecord, ChannelNotFound, InvalidRequest, TidewalError
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.record import Record, RecordType, decode, encode
from ..runtime.log.wal import Append, ChannelPolicy, FromId, Wal
from ..runtime.nearest import nearest
from .connect import over_log
from .logging_setup import logged
from .open_log import LogUrl, Prefix, catalog_of, entries, shown_time
from .results import AsJson
from .stdin import in_thread, read_stdin

READ_BYTES = 64 * 1024

NONE: list[str] = []


@dataclass(slots=True)
class Sent:
    """What was sent so far, and the id and timestamp of the last message."""

    messages: int = 0
    id: bytes = b""
    ts: int = 0


@logged
def send(
    url: LogUrl,
    channel: Annotated[str, typer.Argument(help="The channel.")],
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Each is one; without any, stdin, a line each.")
    ] = None,
    key: Annotated[str, typer.Option(help="The key of each message.")] = "",
    tag: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="A tag of each message.")] = NONE,
    create: Annotated[
        bool, typer.Option("--create", help="Make the channel where there is none of this name.")
    ] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Send messages to a channel, and say how many and what the last one's timestamp is: they are durable then.

    Needs no node. Channels of collections and those with an owner are refused: clients and their owner write those.
    """
    tags = dict(map(tag_of, tag))

    async def work(wal: Wal) -> Sent:
        await _prepare(wal, Names(prefix), channel, create)
        clock = HybridClock()
        sent = Sent()
        async for lines in given_messages(messages) if messages else lines_of_stdin():
            records = [Record(RecordType.ROWS, clock.now(), key=key.encode(), tags=tags, body=line) for line in lines]
            await _append(wal, channel, records, sent)
        return sent

    sent = over_log(url, work)
    at = {"id": sent.id.hex() or None, "ts": sent.ts or None, "time": shown_time(sent.ts) if sent.ts else None}
    if as_json:
        typer.echo(json.dumps({"channel": channel, "messages": sent.messages, **at}))
    else:
        last = f", the last with id {at['id']} at ts {sent.ts} ({at['time']})" if sent.messages else ""
        typer.echo(f"{sent.messages:,} messages sent to {channel}{last}")


def tag_of(text: str) -> tuple[str, str]:
    """The name and the value of an option --tag. Raises `InvalidRequest`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequest(f"--tag {text}: write NAME=VALUE")
    return name, value


async def _prepare(wal: Wal, names: Names, channel: str, create: bool) -> None:
    """Make the channel where that is wanted. Raises `ChannelNotFound`, and `InvalidRequest` where others write it."""
    catalog = (await catalog_of(wal, names)).state
    if channel.startswith(f"{names.prefix}-") or channel in catalog.channels:
        raise InvalidRequest(f"{channel} belongs to the nodes on this log: write to collections with `tidewal insert`")
    known = await wal.channels()
    if channel in known:
        await _refuse_owned(wal, channel)
    elif create:
        await wal.create_channel(channel, ChannelPolicy())
    else:
        near = nearest(channel, known)
        raise ChannelNotFound(f"there is no channel {channel!r}{near}; --create makes one", channel=channel)


async def _refuse_owned(wal: Wal, channel: str) -> None:
    info = await wal.describe(channel)
    if info.first_id is None or info.latest_id is None:
        return
    async for entry in entries(wal, channel, FromId(info.latest_id, inclusive=True), info.latest_id):
        with suppress(BadRecord):  # what another program's format has, no owner wrote
            if decode(entry.payload, entry.id).term:
                raise InvalidRequest(
                    f"{channel} has an owner, who alone writes it: messages beside its own break order"
                )


async def given_messages(messages: Sequence[str]) -> AsyncIterator[list[bytes]]:
    """The messages that a command was given as arguments."""
    yield [message.encode() for message in messages]


async def lines_of_stdin() -> AsyncIterator[list[bytes]]:
    """The lines of standard input, as many at a time as there are."""
    begun = b""
    while chunk := await in_thread(partial(read_stdin, READ_BYTES)):
        *lines, begun = (begun + chunk).split(b"\n")
        if lines:
            yield lines
    if begun:
        yield [begun]


async def _append(wal: Wal, channel: str, messages: Sequence[Record], sent: Sent) -> None:
    """Append `messages` in one commit."""
    try:
        ids = await wal.append_many([Append(channel, encode(each), each.ts) for each in messages])
    except TidewalError as error:
        error.message += f"; {sent.messages:,} messages were sent before"
        raise
    sent.messages += len(ids)
    sent.id, sent.ts = ids[-1], messages[-1].ts
