"""`tidewal topics`: create, list, describe, alter and drop topics, send messages to one, now or later, cancel what is
due later, and show what it has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.catalog.topics import RETENTION_S, Topic
from ..runtime.filters.subscription import filter_of
from ..runtime.log.names import DEFAULT_PREFIX, Names, pchannel_of
from ..runtime.log.wal import Wal
from .collections import Yes, ask
from .connect import over_client, over_log
from .due import DeliverAfter, DeliverAt, moment_of, seconds_of
from .logging_setup import logged
from .open_log import LogUrl, NodeUrl, Prefix, catalog_of, shown_time
from .results import AsJson, JsonLines, print_rows
from .send import NONE, given_messages, lines_of_stdin, tag_of
from .tail import Chosen, TailStart, Where, show_records

if TYPE_CHECKING:
    from ..actors.client import Client

COLUMNS = ("topic", "partitions", "retention_s", "retention_bytes", "created")
SENT_AT_ONCE = 1_000  # lines of standard input

topics: typer.Typer = typer.Typer(
    help="Topics: create, list, describe, alter, drop, send, cancel, tail.", no_args_is_help=True
)

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]


@topics.command()
@logged
def create(
    url: NodeUrl,
    topic: TopicName,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions, which are written and read side by side.")] = 8,
    retention: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="For how long messages are kept; two weeks without.")
    ] = None,
    retention_bytes: Annotated[int | None, typer.Option(min=0, help="How much of a partition is kept.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep messages for ever.")] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Create a topic; where it is there already with the same options, say so and succeed."""
    retention_s = None if keep else RETENTION_S if retention is None else retention
    made = over_client(
        url,
        prefix,
        lambda client: client.create_topic(topic, partitions, retention_s=retention_s, retention_bytes=retention_bytes),
    )
    typer.echo(json.dumps(_described(made)) if as_json else f"{topic} is there: {len(made.partitions)} partitions")


@topics.command("list")
@logged
def list_topics(url: NodeUrl, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """List the topics."""
    found = list(map(_described, over_client(url, prefix, lambda client: client.list_topics())))
    if as_json or not found:
        typer.echo(json.dumps(found, indent=2) if as_json else "none")
    else:
        print_rows(COLUMNS, [{**each, "partitions": len(each["partitions"])} for each in found])


@topics.command()
@logged
def describe(url: NodeUrl, topic: TopicName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Show a topic: its retention, the channel of each partition, and which epochs that are over may have messages yet
    that are due later."""
    found = _described(over_client(url, prefix, lambda client: client.describe_topic(topic)))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    print_rows(COLUMNS, [{**found, "partitions": len(found["partitions"])}])
    typer.echo()
    print_rows(("partition", "channel"), [{"partition": at, "channel": at_} for at, at_ in found["partitions"].items()])
    if pending := found["pending_epochs"]:
        typer.echo(f"\nmessages may be pending in epochs that are over: {', '.join(map(str, pending))}")


@topics.command()
@logged
def alter(
    url: NodeUrl,
    topic: TopicName,
    partitions: Annotated[int, typer.Option(min=1, help="How many partitions it is to have from now on.")],
    own_partitioner: Annotated[
        bool, typer.Option("--own-partitioner", help="Senders have a partitioner of their own: keys may go anywhere.")
    ] = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Give a topic another number of partitions, more or fewer, while it is written and read.

    Messages of one key keep their order. A multiple or a divisor is best: with 16 after 8 each new partition waits for
    one of those before, with 9 for all of them.
    """
    made = over_client(url, prefix, lambda client: client.alter_topic(topic, partitions, hashed=not own_partitioner))
    typer.echo(json.dumps(_described(made)) if as_json else f"{topic} has {len(made.partitions)} partitions")


@topics.command()
@logged
def drop(
    url: NodeUrl, topic: TopicName, yes: Yes = False, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX
) -> None:
    """Drop a topic with its messages, for good; asks before, unless --yes is given."""
    over_client(url, prefix, lambda client: client.describe_topic(topic))
    if not yes:
        ask(f"Drop topic {topic} with all its messages?")
    over_client(url, prefix, lambda client: client.drop_topic(topic))
    typer.echo(json.dumps({"topic": topic, "dropped": True}) if as_json else f"{topic} is dropped")


@topics.command()
@logged
def send(
    url: NodeUrl,
    topic: TopicName,
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Each is one; without any, stdin, a line each.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of each message: it says which partition gets them.")] = None,
    tag: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="A tag of each message.")] = NONE,
    deliver_after: DeliverAfter = None,
    deliver_at: DeliverAt = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Send messages to a topic, and say how many and what the last one's timestamp is: they are durable then.

    With --deliver-after or --deliver-at they are delivered later, and their ids are printed: `topics cancel` takes one.
    """
    tags, after_s, moment = dict(map(tag_of, tag)), seconds_of(deliver_after), moment_of(deliver_at)
    ids: list[str] = []

    async def work(client: Client) -> tuple[int, int]:
        sent = ts = 0
        async for lines in given_messages(messages) if messages else lines_of_stdin():
            for at in range(0, len(lines), SENT_AT_ONCE):
                part = lines[at : at + SENT_AT_ONCE]
                result = await client.send(topic, part, key=key, tags=tags, deliver_at=moment, deliver_after_s=after_s)
                sent, ts = sent + result.messages, result.ts
                ids.extend(result.ids)
        return sent, ts

    sent, ts = over_client(url, prefix, work)
    at = {"ts": ts or None, "time": shown_time(ts) if ts else None}
    if as_json:
        typer.echo(json.dumps({"topic": topic, "messages": sent, **at, **({"ids": ids} if ids else {})}))
    else:
        typer.echo("".join(f"{id}\n" for id in ids), nl=False)
        typer.echo(f"{sent:,} messages sent to {topic}" + (f", the last at ts {ts} ({at['time']})" if sent else ""))


@topics.command()
@logged
def cancel(
    url: NodeUrl,
    topic: TopicName,
    id: Annotated[
        str, typer.Argument(metavar="ID", help="Of a message that is due later, as `topics send` printed it.")
    ],
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Cancel a message that is due later, and say whether that was in time; exit status 1 where it was due already."""
    cancelled = over_client(url, prefix, lambda client: client.cancel(topic, id))
    typer.echo(json.dumps({"topic": topic, "id": id, "cancelled": cancelled}) if as_json else _said(cancelled))
    raise typer.Exit(0 if cancelled else 1)


def _said(cancelled: bool) -> str:
    return "cancelled: it is not delivered" if cancelled else "too late: it was due already"


@topics.command()
@logged
def tail(
    url: LogUrl,
    topic: TopicName,
    start: Annotated[TailStart, typer.Option("--from", help="Where to begin.")] = TailStart.earliest,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more at the end.")] = True,
    where: Where = None,
    as_json: JsonLines = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Print the messages of a topic: a line for each. No group notices that.

    Needs no node. The order within a partition is the log's; those of several appear as they are read.
    """

    passing = filter_of(where)

    async def show(wal: Wal) -> None:
        catalog = (await catalog_of(wal, Names(prefix))).state
        chosen = Chosen.of_topic(catalog.topics.ready(topic))
        await show_records(wal, catalog, chosen, start, where=passing, limit=limit, follow=follow, as_json=as_json)

    over_log(url, show, read_only=True)


def _described(topic: Topic) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "id": topic.id,
        "epoch": topic.epoch,
        "pending_epochs": list(topic.pending_epochs),
        "partitions": dict(enumerate(map(pchannel_of, topic.partitions))),
        "retention_s": topic.retention_s,
        "retention_bytes": topic.retention_bytes,
        "created": shown_time(topic.created_ts),
    }
