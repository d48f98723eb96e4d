"""Replay a dead letter: write what is in it to the place that it came from, with a new timestamp."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from ..runtime.clock import HybridClock
from ..runtime.errors import (
    BadRecord,
    ChannelNotFound,
    CollectionNotFound,
    InvalidRequest,
    PositionLost,
    TopicNotFound,
    Unsupported,
)
from ..runtime.log.names import Names, pchannel_of
from ..runtime.log.record import Record, RecordType, Tags, decode, stamp
from ..runtime.log.wal import Append, Entry, FromId, Payload, Wal
from .letters import DeadLetter, resolution
from .open_log import catalog_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ..actors.client import Client

REPLAYED = "replayed"

ToNode = Callable[[], Awaitable["Client"]]


async def replay(wal: Wal, names: Names, record: Record, letter: DeadLetter, to_node: ToNode) -> None:
    """Write a letter's entry again, and note that. Rows of a collection and messages of a topic go through the node,
    for which `to_node` connects, a message from the retry topic of a group to that; other entries are appended to their
    channel. Raises `BadRecord` for what cannot be read, `InvalidRequest` and `Unsupported` for what cannot be written
    again."""
    clock = HybridClock()
    payload = await _whole(wal, record, letter)
    inside = _record_in(payload)
    if inside is not None and inside.type is RecordType.ROWS and inside.vchannel:
        await _write_rows(wal, names, inside, to_node)
        await wal.append_many([resolution(names, letter, REPLAYED, clock)])
        return
    if letter.group and inside is not None and inside.type is RecordType.MESSAGE and inside.vchannel:
        await _send_message(wal, names, letter, inside, to_node)
        await wal.append_many([resolution(names, letter, REPLAYED, clock)])
        return
    if not letter.group:
        why = "it is no record with rows of a collection" if inside is not None else "its record cannot be read"
        raise BadRecord(f"letter {letter.id}: {why}: `tidewal dlq show` prints its bytes, `dlq drop` removes it")
    if inside is not None and inside.term:
        raise Unsupported(f"the record is an owner's of {letter.channel}: only it can write there", capability="replay")
    ts = clock.now()
    again = Append(letter.channel, payload if inside is None else stamp(inside, ts, 0, 0), ts)
    done = resolution(names, letter, REPLAYED, clock)
    try:
        if wal.capabilities.atomic_batches:
            await wal.append_many([again, done])
        else:
            await wal.append_many([again])
            await wal.append_many([done])
    except ChannelNotFound as error:
        if error.fields.get("channel") != letter.channel:
            raise
        raise InvalidRequest(f"the channel {letter.channel} of letter {letter.id} is gone: drop the letter") from error


async def _write_rows(wal: Wal, names: Names, record: Record, to_node: ToNode) -> None:
    from ..runtime.rows.row_codec import decode_rows

    catalog = (await catalog_of(wal, names)).state
    found = next((each for each in catalog.collections.values() if record.vchannel in each.vchannels), None)
    if found is None:
        raise CollectionNotFound(f"the collection of {record.vchannel} is dropped: drop the letter")
    if record.schema_version != found.schema.version:
        raise BadRecord(
            f"its rows are of version {record.schema_version} of the schema of {found.name}", reason="schema"
        )
    rows = decode_rows(record.body, found.schema.row_arrow())
    client = await to_node()
    await client.apply(found.name, rows)


async def _send_message(wal: Wal, names: Names, letter: DeadLetter, record: Record, to_node: ToNode) -> None:
    from ..actors.topics.messages import RetriedMessage, own_tags
    from ..actors.topics.retried import retried_of
    from ..actors.topics.retry_topics import retry_topic_name

    topics = (await catalog_of(wal, names)).state.topics
    found = next((each for each in topics if pchannel_of(record.vchannel) in each.pchannels), None)
    retried = retried_of(record.tags)
    if found is None and retried is not None:  # its retry topic was dropped: another may have been made since
        name = retry_topic_name(retried.origin.topic, letter.group)
        found = topics.find(name)
        if found is None:
            raise TopicNotFound(
                f"there is no topic {name}: let a member subscribe with retry_topic, or drop the letter"
            )
    if found is None:
        raise TopicNotFound(f"the topic of {record.vchannel} is dropped: drop the letter")
    anew: Tags = {} if retried is None else retried._replace(attempts=0).tags()
    client = await to_node()
    tags = {**own_tags(record.tags), **anew}
    await client.send(found.name, RetriedMessage(bytes(record.body), record.key or None, tags))


async def _whole(wal: Wal, record: Record, letter: DeadLetter) -> Payload:
    """The bytes of the entry. Where the letter was cut they are read in its channel."""
    if len(record.body) >= letter.size:
        return record.body
    if letter.moved:
        raise InvalidRequest(
            f"letter {letter.id} has only the beginning of its entry, and was brought here from another log since, "
            "where the entry had another id"
        )
    try:
        start = FromId(bytes.fromhex(letter.entry), inclusive=True)
        reader = cast("AsyncGenerator[Sequence[Entry]]", wal.read(letter.channel, start))
        async with aclosing(reader):
            first = (await anext(reader))[0]
        if first.id.hex() == letter.entry:
            return first.payload
    except (ChannelNotFound, PositionLost, StopAsyncIteration):
        pass
    raise InvalidRequest(
        f"letter {letter.id} has only the beginning of its entry, which {letter.channel} keeps no more"
    )


def _record_in(payload: Payload) -> Record | None:
    try:
        return decode(payload)
    except BadRecord:
        return None
