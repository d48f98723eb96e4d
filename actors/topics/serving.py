"""Serving requests over topics: a handler is called for each message, and what it returns is the reply."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...runtime.arguments import checked
from ...runtime.clock import HybridClock, physical_ms
from ...runtime.errors import AckTimeout, Fenced, InvalidRequest, MessageTooLarge, TidewalError
from ...runtime.groups.ack_timer import check_ack_timeout
from ...runtime.groups.processing import Semantics, process
from ...runtime.groups.retry_policy import RetryPolicy
from ...runtime.groups.work import check_awaitable
from ...runtime.metrics.metrics import Metrics
from .member import TopicMember
from .messages import TopicMessage, TopicPack

TopicHandler = Callable[[TopicMessage], Awaitable[bytes | str | None]]

_log = logging.getLogger("tidewal.client")


@checked
async def serve(
    member: TopicMember,
    handle: TopicHandler,
    *,
    retry: RetryPolicy | None = None,
    count: int | None = None,
    timeout_s: float | None = None,
    metrics: Metrics | None = None,
    clock: HybridClock | None = None,
) -> None:
    """Call `handle` with each message of the member's topics, one after the other, and send what it returns (bytes, a
    text, or None for nothing) as the reply to those that wait for one (`Client.ask`). It goes on, and raises, as
    `process` at least once does, which has the same `retry`, `count` (of packs), `timeout_s`, `metrics` and `clock`.

    A request is served at least once: again where its member died or lost the partition before it was acknowledged.
    `message.request.id` is the same then. A member remembers its last 16,384 replies of up to 16 KiB (16 MiB together)
    and repeats them without calling `handle`. A request whose client waits no more is acknowledged unserved.

    A `TidewalError` that `handle` raises and that is not `retryable` is the reply: `ask` raises it. So is the error of
    a reply that cannot be sent. Other errors are failures of the handler: without `retry` they are raised here, with it
    the request is tried again, and becomes a dead letter without a reply."""
    known = clock or HybridClock()

    async def serve_pack(pack: TopicPack) -> None:
        for message in pack.messages:
            await _serve(member, handle, message, known)

    await process(
        member.wal,
        member,
        serve_pack,
        Semantics.AT_LEAST_ONCE,
        retry=retry,
        count=count,
        timeout_s=timeout_s,
        metrics=metrics,
        clock=known,
    )


async def _serve(member: TopicMember, handle: TopicHandler, message: TopicMessage, clock: HybridClock) -> None:
    request = message.request
    if request is not None and request.is_over(physical_ms(clock.now())):
        return
    if request is not None and await _sent(member.repeat_reply(message)):
        return
    try:
        answer = handle(message)
        check_awaitable(answer, handle)
        body = await answer
        check_ack_timeout()
    except TidewalError as error:
        if request is None or error.retryable or isinstance(error, Fenced | AckTimeout):
            raise
        check_ack_timeout()
        await _sent(member.refuse(message, error))
        return
    if request is None:
        return
    try:
        await _sent(member.reply(message, b"" if body is None else body))
    except (InvalidRequest, MessageTooLarge) as error:  # of the reply
        await _sent(member.refuse(message, error))


async def _sent(reply: Awaitable[object]) -> bool:
    """Send a reply, if there is one. Returns whether there is: also where the log refuses it for now, since the client
    repeats its request then."""
    try:
        return await reply is not False
    except TidewalError as error:
        if not error.retryable:
            raise
        _log.warning("a reply is sent when its request is repeated: %s", error)
        return True
