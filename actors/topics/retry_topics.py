"""The retry topics of a group: one for each topic that it reads, with what failed there or was given back.

A retry topic is a topic as any, with messages that are due later. A message goes to the partition of its key. It has
the tags that it was sent with and those of `retried.py`; so what failed again in the retry topic goes there again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgpack

from ...runtime.catalog.topics import Topic, check_topic_name
from ...runtime.errors import InvalidRequest, OutcomeUnknown
from ...runtime.log.checks import check_name
from ...runtime.log.record import DECODE_ERRORS, Record
from ...runtime.ownership.batch import OWNERS_TAGS
from ...runtime.replicated.records import typed
from ...runtime.rows.hashing import hash_key_bytes
from .messages import PlacedMessage, TopicMessage, TopicPack, check_header, header_bytes
from .retried import Origin, Retried

PARTITIONS_MAX: Final = 4  # of a retry topic: it has as many as its topic where these are fewer
_MARK: Final = ".retry."

SendCopies = Callable[[Topic, Sequence[PlacedMessage], float, str, int], Awaitable[None]]
"""Sends messages to a partition of a topic, to be due in so many seconds, as those of a producer under a number; where
that has no name, as any others of the client."""


def retry_topic_name(topic: str, group: str) -> str:
    """The name of the retry topic of a group for a topic: of no other two. Raises `InvalidRequest` for a topic that is
    one itself, names of which that cannot be said, and where it is no name of a topic."""
    name = f"{topic}{_MARK}{group}"
    if name.count(_MARK) > 1 or _MARK + _MARK[1:] in name:  # which two it is made of could not be told
        raise InvalidRequest(
            f"topic {topic} and group {group} have no retry topic: there are no retries of retries, so no topic is "
            f"called …{_MARK}… or …{_MARK[:-1]} and no group …{_MARK}… or {_MARK[1:]}…",
            argument="topics",
        )
    check_name("group", group)
    check_topic_name(name)
    return name


def check_no_retry_topic(name: str) -> None:
    """Raise `InvalidRequest` for the name of a retry topic: `subscribe` makes these."""
    if _MARK in name:
        raise InvalidRequest(
            f"{name} is the name of a group's retry topic, which subscribe(…, retry_topic=True) makes: leave {_MARK!r} "
            "out of the name",
            argument="name",
        )


class CopyId(NamedTuple):
    """Which copy it is of those that a member has decided on, by the `number` from 1 on. A member's id is its own, so
    no two decisions have one id, whatever clocks and positions say."""

    member: str
    number: int

    def to_bytes(self) -> bytes:
        """The wire form."""
        return cast(bytes, msgpack.packb(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> CopyId:
        """What `to_bytes` wrote. Raises `InvalidRequest`."""
        try:
            member, number = cast("list[object]", msgpack.unpackb(data))
            return cls(typed(member, str), typed(number, int))
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"no id of a copy: {error}", argument="copy_id") from error


class RetryTopics:
    """The retry topics of a group by the names of its topics, and how to `send` there."""

    def __init__(self, topics: Mapping[str, Topic], send: SendCopies) -> None:
        self.topics: Sequence[Topic] = list(topics.values())
        self._of = {**topics, **{topic.name: topic for topic in topics.values()}}
        self._send = send

    @property
    def channels(self) -> list[str]:
        """The pchannels of their partitions. They get no others: they have messages that are due later."""
        return [channel for topic in self.topics for channel in topic.pchannels]

    async def send(
        self, group: str, pack: TopicPack, failed: int, reason: str, delay_s: float, copy_id: CopyId | None
    ) -> None:
        """Send a copy of each message of `pack`, with `failed` attempts more, one request for each partition, one after
        the other. The largest message goes first: where the topic does not take that, nothing is sent. With a `copy_id`
        owners take it once: they know the producer, which is the member in the partition of `pack`, and its number.
        Raises `OutcomeUnknown` where they have a later number of it and not this one."""
        topic = self._of[pack.topic]
        parts: dict[int, list[PlacedMessage]] = {}
        for record, message in zip(pack.passing, pack.messages, strict=True):
            placed = _copy(topic, record, message, failed, reason)
            parts.setdefault(placed[0], []).append(placed)
        producer = "" if copy_id is None else f"retries of {group} in {pack.channel} by {copy_id.member}"
        number = 0 if copy_id is None else copy_id.number
        for part in sorted(parts.values(), key=_largest, reverse=True):
            await self._send_part(topic, part, delay_s, producer, number)

    async def _send_part(
        self, topic: Topic, part: Sequence[PlacedMessage], delay_s: float, producer: str, number: int
    ) -> None:
        try:
            await self._send(topic, part, delay_s, producer, number)
        except OutcomeUnknown as error:
            forgotten = error.fields.get("forgotten")
            if not (producer and isinstance(forgotten, int) and forgotten >= number):
                raise
            # it is there, so long ago that its outcome is forgotten: a number is sent once those before it are there


def _largest(part: Sequence[PlacedMessage]) -> int:
    return max(header_bytes(key, tags) + len(body) for _, key, tags, body in part)


def _copy(topic: Topic, record: Record, message: TopicMessage, failed: int, reason: str) -> PlacedMessage:
    origin = Origin(message.topic, message.partition, message.ts, message.id)
    sent = {name: tag for name, tag in record.tags.items() if name not in OWNERS_TAGS}
    tags = {**sent, **Retried(message.attempts + failed, reason, origin).tags()}
    check_header(record.key, tags)
    place = hash_key_bytes(record.key) if record.key else message.partition
    return place % len(topic.partitions), record.key, tags, bytes(record.body)
