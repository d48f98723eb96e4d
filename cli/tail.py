"""`tidewal tail`: the records of a channel, or of all channels of a collection or a topic, decoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.catalog.catalog import Catalog
from ..runtime.catalog.cuts import Cut
from ..runtime.catalog.topics import Topic
from ..runtime.errors import BadRecord, ChannelNotFound, FormatTooNew
from ..runtime.filters.subscription import filter_of
from ..runtime.log.left_out import LeftOut
from ..runtime.log.names import DEFAULT_PREFIX, Names, pchannel_of
from ..runtime.log.record import Record, RecordType, claims_record, decode
from ..runtime.log.wal import Entry, From, Wal
from ..runtime.nearest import nearest
from ..runtime.replicated.records import decode_event
from ..runtime.rows.schema import OP_COLUMN, Op
from .connect import over_log
from .logging_setup import logged
from .one_line import one_line
from .open_log import LogUrl, Prefix, catalog_of, entries, shown_time, stored
from .results import JsonLines, plain, shown_bytes

if TYPE_CHECKING:
    from ..runtime.filters.record_filter import RecordFilter

Where = Annotated[
    str | None,
    typer.Option(help="Only records whose tags and header fields fit this filter: 'priority > 3 and _key == \"a\"'."),
]

HELD_ENTRIES = 256  # read ahead of what is printed


class TailStart(StrEnum):
    """Where to begin."""

    earliest = "earliest"
    latest = "latest"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Channels to read, and the vchannels whose records are shown: all where none is named. With `messages` these are
    shown alone."""

    channels: list[str]
    vchannels: frozenset[str] = field(default_factory=frozenset[str])
    messages: bool = False

    @classmethod
    def of_topic(cls, topic: Topic) -> Chosen:
        """The messages of a topic."""
        return cls(list(topic.places), messages=True)


@logged
def tail(
    url: LogUrl,
    channel: Annotated[str, typer.Argument(help="A channel, a vchannel, a collection or a topic.")],
    start: Annotated[TailStart, typer.Option("--from", help="Where to begin.")] = TailStart.earliest,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many records.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more at the end.")] = True,
    rows: Annotated[int, typer.Option(min=0, help="Rows shown of each record.")] = 5,
    where: Where = None,
    as_json: JsonLines = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Print the records of a channel: a line for each with its type and fields, and its rows where the schema is known.

    Reads through the process that has the log open, or opens the directory when there is none. Of several channels
    records appear as they are read; the order within a channel is the log's.
    """

    passing = filter_of(where)

    async def show(wal: Wal) -> None:
        catalog = (await catalog_of(wal, Names(prefix))).state
        chosen = await _choose(wal, catalog, channel)
        await show_records(
            wal, catalog, chosen, start, where=passing, limit=limit, follow=follow, rows=rows, as_json=as_json
        )

    over_log(url, show, read_only=True)


async def show_records(
    wal: Wal,
    catalog: Catalog,
    chosen: Chosen,
    start: TailStart,
    *,
    limit: int | None,
    follow: bool,
    as_json: bool,
    rows: int = 0,
    where: RecordFilter | None = None,
) -> None:
    """Print the records that are `chosen`, and that pass `where`: up to `limit` of them, and `rows` rows of each."""
    begin = From.EARLIEST if start is TailStart.earliest else From.LATEST
    shown = 0
    async for name, entry in _merged(wal, chosen.channels, begin, follow, where):
        fields = _fields(name, entry, catalog, chosen, rows) if _fits(entry, where) else None
        if fields is None:
            continue
        typer.echo(json.dumps(fields, default=plain) if as_json else _text(fields))
        shown += 1
        if shown == limit:
            return


async def _choose(wal: Wal, catalog: Catalog, name: str) -> Chosen:
    known = await wal.channels()
    if name in known:
        return Chosen([name])
    collection, topic = catalog.collections.get(name), catalog.topics.find(name)
    if topic is not None and collection is None:
        return Chosen.of_topic(topic)
    if collection is not None:
        return Chosen(sorted({pchannel_of(each) for each in collection.vchannels}), frozenset(collection.vchannels))
    if pchannel_of(name) in known:
        return Chosen([pchannel_of(name)], frozenset({name}))
    named = sorted([*catalog.collections, *(each.name for each in catalog.topics)])
    there = ", ".join([*named, *known]) or "none"
    near = nearest(name, [*named, *known])
    raise ChannelNotFound(f"no channel, collection or topic {name!r}{near}; there are: {there}", channel=name)


async def _merged(
    wal: Wal, channels: list[str], begin: From, follow: bool, where: RecordFilter | None
) -> AsyncIterator[tuple[str, Entry]]:
    """The entries of all `channels` as they come."""
    queue: asyncio.Queue[tuple[str, Entry] | Exception | None] = asyncio.Queue(HELD_ENTRIES)

    async def read(name: str) -> None:
        ended: Exception | None = None
        try:
            if follow or begin is From.EARLIEST:
                async for entry in entries(wal, name, begin, None, where) if follow else stored(wal, name, where):
                    await queue.put((name, entry))
        except Exception as error:  # raised again where the entries are consumed
            ended = error
        await queue.put(ended)

    readers = [asyncio.create_task(read(name)) for name in channels]
    running = len(readers)
    try:
        while running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _fits(entry: Entry, where: RecordFilter | None) -> bool:
    """Whether the entry is to be shown: with a filter a record for which it holds."""
    if where is None:
        return True
    try:
        return not isinstance(entry, LeftOut) and where.holds(decode(entry.payload, entry.id))
    except BadRecord:
        return False


def _fields(name: str, entry: Entry, catalog: Catalog, chosen: Chosen, rows: int) -> dict[str, Any] | None:
    """The fields of a record to print; None for a record of another vchannel than those chosen."""
    fields: dict[str, Any] = {"channel": name, "id": entry.id.hex()}
    try:
        record = decode(entry.payload, entry.id)
    except BadRecord as error:
        value = shown_bytes("value", entry.payload)
        if claims_record(entry.payload):
            return fields | {"type": "BAD", "reason": error.message} | value
        return fields | {"type": "RAW", "ts": entry.timestamp, "time": shown_time(entry.timestamp)} | value
    if chosen.vchannels and record.vchannel and record.vchannel not in chosen.vchannels:
        return None
    if chosen.messages and record.type is not RecordType.MESSAGE:
        return None
    fields |= {"type": record.type.name, "ts": record.ts, "time": shown_time(record.ts)}
    if record.term:
        fields |= {"term": record.term, "cseq": record.cseq}
    for key in ("vchannel", "producer", "pseq", "schema_version"):
        if value := getattr(record, key):
            fields[key] = value
    if record.key:
        fields |= shown_bytes("key", record.key)
    if record.tags:
        fields["tags"] = dict(record.tags)
    fields["body_bytes"] = len(record.body)
    try:
        return fields | _body(record, catalog, rows)
    except (BadRecord, FormatTooNew) as error:
        return fields | {"reason": error.message}


def _body(record: Record, catalog: Catalog, rows: int) -> dict[str, Any]:
    """The fields of the body, for catalog events, cuts and rows."""
    if record.type is RecordType.CATALOG:
        event = dict(decode_event(record))
        return {"kind": event.pop("kind"), "event": event}
    if record.type is RecordType.CUT:
        cut = Cut.from_record(record)
        ends = {name: {"term": end.term, "cseq": end.cseq, "id": end.id.hex()} for name, end in cut.ends.items()}
        named = {"collection": cut.collection} if cut.collection else {}
        return {**named, "cut": cut.time, "ends": ends}
    if record.type is RecordType.MESSAGE:
        return shown_bytes("value", record.body)
    if record.type is not RecordType.ROWS:
        return {}
    return _rows(record, catalog, rows) if record.vchannel else shown_bytes("value", record.body)


def _rows(record: Record, catalog: Catalog, rows: int) -> dict[str, Any]:
    from ..runtime.rows.row_codec import decode_rows

    of = next((each for each in catalog.collections.values() if record.vchannel in each.vchannels), None)
    if of is None or of.schema.version != record.schema_version:
        return {}
    batch = decode_rows(record.body, of.schema.row_arrow())
    few = batch.slice(0, rows).to_pylist()
    for row in few:
        row[OP_COLUMN] = Op(row[OP_COLUMN]).name.lower()
    return {"collection": of.name, "row_count": batch.num_rows, "rows": few}


def _text(fields: dict[str, Any]) -> str:
    """A record as text: one line, and one for each row."""
    words = [fields.get("time", "-"), fields["channel"], fields["type"]]
    hidden = {"time", "channel", "type", "id", "ts", "rows", "event", "ends"}
    words += [f"{key}={value}" for key, value in fields.items() if key not in hidden]
    if fields.get("event"):
        words.append(json.dumps(fields["event"], default=plain))
    lines = ["  ".join(map(one_line, words))]
    lines += ["    " + json.dumps(row, default=plain) for row in fields.get("rows", ())]
    if fields.get("row_count", 0) > len(fields.get("rows", ())):
        lines.append(f"    … {fields['row_count'] - len(fields['rows']):,} more")
    return "\n".join(lines)
