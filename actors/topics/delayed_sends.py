"""Messages that a client sends to be due later: one request for each partition, and ids by which they are cancelled.

An id is text: the channel of the message's partition, and its place in the order of release (`DelayedId`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from ...runtime.catalog.topics import Topic
from ...runtime.delays.delayed import DelayedId, moment_ms, span_ms
from ...runtime.errors import InvalidRequest, TidewalError, TopicNotFound, of_unknown_outcome
from ...runtime.log.names import pchannel_of
from ...runtime.rpc.protocol import Params, Reply
from .messages import PlacedMessage, SendResult

SendPart = Callable[[Sequence[PlacedMessage]], Awaitable[Reply]]


def due_params(deliver_at: datetime | None, deliver_after_s: float | None) -> Params:
    """The parameters of a request that say when messages are due; none for now. Raises `InvalidRequest`."""
    if deliver_at is not None and deliver_after_s is not None:
        raise InvalidRequest("say when the messages are due once: either deliver_at or deliver_after_s")
    if deliver_at is not None:
        return {"due_ms": moment_ms(deliver_at)}
    return {} if deliver_after_s is None else {"after_ms": span_ms(deliver_after_s)}


async def send_delayed(topic: Topic, placed: Sequence[PlacedMessage], send: SendPart) -> SendResult:
    """Send messages that are due later, with one `send` for each partition: what its reply says is part of their ids.
    Raises what one has raised, with `outcome_unknown` where others are durable."""
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
    if failed:
        alone = len(failed) == len(results)
        raise failed[0] if alone or not isinstance(failed[0], TidewalError) else of_unknown_outcome(failed[0])
    ids = [""] * len(placed)
    for (partition, places), reply in zip(parts.items(), results, strict=True):
        assert isinstance(reply, Reply)
        for number, at in enumerate(places):
            id = DelayedId.of(reply.values["digest"], reply.values["ts"], number)
            ids[at] = id_text(pchannel_of(topic.partitions[partition]), id.to_bytes())
    last = max(reply.values["ts"] for reply in results if isinstance(reply, Reply))
    return SendResult(last, len(placed), frozenset(parts), tuple(ids))


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
