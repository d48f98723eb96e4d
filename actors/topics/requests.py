"""Requests over a topic: what a message that waits for a reply bears, and how it is sent until the reply has come.

A request is a message with three tags more: the name of the client whose reply channel takes the reply, the client's
number of the request, and for how many milliseconds the client waited when it was sent. Owners and partitions know
nothing of it. The reply travels as those of roles do, on the client's ephemeral channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

from ...runtime.clock import physical_ms
from ...runtime.errors import DeadlineExceeded, TidewalError, of_unknown_outcome
from ...runtime.log.record import Tags, TagValue
from ...runtime.rpc.protocol import Params
from ...runtime.waiting import ended

if TYPE_CHECKING:
    from ...runtime.rpc.client import RpcClient

CLIENT: Final = "tidewal.client"  # tags of a request
NUMBER: Final = "tidewal.request"
WAITS: Final = "tidewal.waits"
REQUEST_TAGS: Final = frozenset({CLIENT, NUMBER, WAITS})

FIRST_REPEAT_S = 5.0  # after which a request without a reply is sent again, then after twice as long, and so on
DRIFT_MS = 5_000  # by which clocks of machines may differ: for so long a request is served behind its time


@dataclass(frozen=True, slots=True)
class TopicRequest:
    """What a message that waits for a reply says of it: the `client` that waits, its `number` of the request, and until
    when, in ms by the wall clock. Repetitions of one request have the same client and number."""

    client: str
    number: int
    until_ms: int

    @property
    def id(self) -> str:
        """The same for all repetitions of a request, and for no other request."""
        return f"{self.client}-{self.number}"

    def is_over(self, now_ms: int) -> bool:
        """Whether the client waits no more, at `now_ms` by this machine's wall clock."""
        return now_ms > self.until_ms + DRIFT_MS


@dataclass(frozen=True, slots=True)
class TopicReply:
    """The reply to a request over a topic."""

    body: bytes
    tags: Tags


def request_of(tags: Tags, ts: int) -> TopicRequest | None:
    """The request in a message with these tags that was stored at the timestamp `ts`; None for one that waits for no
    reply."""
    match tags.get(CLIENT), tags.get(NUMBER), tags.get(WAITS):
        case str(client), int(number), int(waits_ms):
            return TopicRequest(client, number, physical_ms(ts) + waits_ms)
        case _:
            return None


class SendRequest(Protocol):
    """Sends a request with these tags; `number` decides about the partition of one without a key."""

    def __call__(self, number: int, tags: Mapping[str, TagValue], deadline_s: float, /) -> Awaitable[object]: ...


def partition_of_request(number: int, _: object, partitions: int) -> int:
    """The partition of a request without a key: repetitions of a request lie in one, and requests take turns."""
    return number % partitions


async def ask(rpc: RpcClient, topic: str, send: SendRequest, tags: Tags, deadline_s: float) -> TopicReply:
    """Send a request and return its reply. It is sent again under the same number while no reply comes. Raises what
    `send` and the server of the request raise, and `DeadlineExceeded`."""
    loop, pause_s, sent = asyncio.get_running_loop(), FIRST_REPEAT_S, 0
    end = loop.time() + deadline_s
    with rpc.expect() as (number, reply):
        while (left_s := end - loop.time()) > 0 and not reply.done():
            waits = {CLIENT: rpc.name, NUMBER: number, WAITS: int(left_s * 1000)}
            sending = asyncio.ensure_future(send(number, {**tags, **waits}, left_s))
            try:
                await asyncio.wait([sending, reply], return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    await sending
            except DeadlineExceeded:
                sent += 1
                break
            except TidewalError as error:
                if not sent or not error.retryable:
                    raise (of_unknown_outcome(error) if sent else error) from None
            finally:
                await ended(sending)
            sent += 1
            await asyncio.wait([reply], timeout=min(pause_s, max(0.0, end - loop.time())))
            pause_s *= 2
        if reply.done():
            answer = reply.result()
            return TopicReply(bytes(answer.body), _tags_in(answer.values))
    raise DeadlineExceeded(
        f"no reply to a request over topic {topic} within {max(deadline_s, 0):g} s: it may be served all the same, now "
        "or later",
        topic=topic,
        outcome_unknown=bool(sent),
    )


def _tags_in(values: Params) -> Tags:
    tags: object = values.get("tags")
    return cast(Tags, tags) if isinstance(tags, dict) else {}
