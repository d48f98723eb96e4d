"""Messages that a client sends to be due later: one request for each partition, and ids by which they are cancelled.

An id is text: the channel of the message's partition, and its place in the order of release (`DelayedId`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import cast

from ...runtime.catalog.topics import Topic
from ...runtime.delays.delayed import DelayedId, moment_ms, span_ms
from ...runtime.errors import InvalidRequest, TidewalError, TopicEpochEnded, TopicNotFound, of_unknown_outcome
from ...runtime.log.names import pchannel_of
from ...runtime.rpc.protocol import Params, Reply
from .messages import PlacedMessage, SendResult
from .sender import Sending

SendPart = Callable[[Sequence[PlacedMessage]], Awaitable[Reply]]


def due_params(deliver_at: datetime | None, deliver_after_s: float | None) -> Params:
    """The parameters of a request that say when messages are due; none for now. Raises `InvalidRequest`."""
    if deliver_at is not None and deliver_after_s is not None:
        raise InvalidRequest("say when the messages are due once: either deliver_at or deliver_after_s")
    if deliver_at is not None:
        return {"due_ms": moment_ms(deliver_at)}
    return {} if deliver_after_s is None else {"after_ms": span_ms(deliver_after_s)}


async def send_delayed(topic: Topic, sending: Sending, send: SendPart) -> SendResult:
    """Send what is left of messages that are due later, with one `send` for each partition: what its reply says is part
    of their ids. Raises what one has raised, with `outcome_unknown` where others are durable; `TopicEpochEnded` where
    the epoch has ended for some, and the others are durable."""
    placed = sending.place(topic)
    parts: dict[int, list[int]] = {}
    for at, (partition, *_) in enumerate(placed):
        parts.setdefault(partition, []).append(at)
    sends = [asyncio.ensure_future(send([placed[at] for at in places])) for places in parts.values()]
    try:
        results = await asyncio.gather(*sends, return_exceptions=True)
    finally:
        for each in sends:
            each.cancel()
    failed = [result for result in results if isinstance(result, BaseException)]
    written: list[str] = []
    for (partition, places), reply in zip(parts.items(), results, strict=True):
        if isinstance(reply, Reply):
            channel, ts = pchannel_of(topic.partitions[partition]), reply.values["ts"]
            stored = [DelayedId.of(reply.values["digest"], ts, number).to_bytes() for number in range(len(places))]
            sending.keep({at: id_text(channel, id) for at, id in zip(places, stored, strict=True)}, ts)
            written.append(channel)
    if failed:
        raise _failure(failed, written)
    return sending.result()


def _failure(failed: Sequence[BaseException], written: Sequence[str]) -> BaseException:
    """What a call raises of which some parts have failed, and those for the pchannels `written` are durable."""
    error = next((each for each in failed if not isinstance(each, TopicEpochEnded)), None)
    if isinstance(error, TidewalError):
        return of_unknown_outcome(error) if written else error
    if error is not None:
        return error
    ended = cast(TopicEpochEnded, failed[0])
    return TopicEpochEnded(ended.message, topic=ended.topic, written=",".join(written))


async def cancel_delayed(
    id: str,
    known: Topic | None,
    describe: Callable[[], Awaitable[Topic]],
    ask: Callable[[Topic, Params], Awaitable[bool]],
) -> bool:
    """Cancel the message of that id, and return whether that was in time. `known` is the topic as the client knows it;
    `ask` sends a request to the topic, which says the message by its parameters. Raises `InvalidRequest`, and what
    `describe` and `ask` raise."""
    channel, message = read_id(id)
    of_message: Params = {"channel": channel, "message": message}
    if known is not None and known.delays:
        try:
            return await ask(known, of_message)
        except (TopicNotFound, InvalidRequest) as error:  # the client may be behind
            if error.fields.get("outcome_unknown"):
                raise
    return await ask(await describe(), of_message)


def id_text(channel: str, id: bytes) -> str:
    """The id of a message that is due later in `channel`, as clients have it."""
    return f"{channel}:{id.hex()}"


def read_id(text: str) -> tuple[str, bytes]:
    """The channel and the id of a text that `id_text` has made. Raises `InvalidRequest`."""
    channel, _, digits = text.rpartition(":")
    try:
        id = bytes.fromhex(digits)
    except ValueError:
        id = b""
    if not channel or not id:
        raise InvalidRequest(f"{text!r} is no id of a delayed message: take one of SendResult.ids", argument="id")
    DelayedId.from_bytes(id)
    return channel, id
