"""The retry topics of a group: one for each topic that it reads, with what failed there or was given back.

A retry topic is a topic as any, with messages that are due later. A message goes to the partition of its key. It has
the tags that it was sent with and those of `retried.py`; so what failed again in the retry topic goes there again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgpack

from ...runtime.catalog.topics import Topic, check_topic_name
from ...runtime.errors import InvalidRequest, OutcomeUnknown, TopicEpochEnded, TopicNotFound
from ...runtime.log.checks import check_name
from ...runtime.log.names import Names
from ...runtime.log.record import DECODE_ERRORS, Record
from ...runtime.ownership.batch import OWNERS_TAGS
from ...runtime.replicated.records import typed
from ...runtime.rows.hashing import hash_key_bytes
from .messages import PlacedMessage, TopicMessage, TopicPack, check_header, header_bytes
from .retried import Origin, Retried

AGAIN_S: Final = 0.1  # between two looks for an epoch that an owner knows
PARTITIONS_MAX: Final = 4  # of a retry topic: it has as many as its topic where these are fewer
_MARK: Final = ".retry."

SendCopies = Callable[[Topic, int, Sequence[PlacedMessage], float, str, int], Awaitable[None]]
"""Sends messages to a partition of an epoch of a topic, to be due in so many seconds, as those of a producer under a
number; where that has no name, as any others of the client."""
Describe = Callable[[str], Awaitable[Topic]]
"""The present topic of that name."""


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
    no two decisions have one id, whatever clocks and positions say. It is in the retry topic's epoch of that number, or
    in a later one."""

    member: str
    number: int
    epoch: int

    def to_bytes(self) -> bytes:
        """The wire form."""
        return cast(bytes, msgpack.packb(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> CopyId:
        """What `to_bytes` wrote. Raises `InvalidRequest`."""
        try:
            member, number, epoch = cast("list[object]", msgpack.unpackb(data))
            return cls(typed(member, str), typed(number, int), typed(epoch, int))
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"no id of a copy: {error}", argument="copy_id") from error


class RetryTopics:
    """The retry topics of a group by the names of its topics, and how to `send` there, also where one gets another
    number of partitions; `describe` tells of these."""

    def __init__(self, topics: Mapping[str, Topic], names: Names, send: SendCopies, describe: Describe) -> None:
        self.topics: Sequence[Topic] = list(topics.values())
        self._of = {**topics, **{topic.name: topic for topic in topics.values()}}
        self._channels = tuple(names.topic_pattern(topic.id).rstrip("*") for topic in topics.values())
        self._send, self._describe = send, describe

    def has(self, channel: str) -> bool:
        """Whether a channel is one of their partitions, of any epoch."""
        return channel.startswith(self._channels)

    def epoch_of(self, topic: str) -> int:
        """In which epoch, or a later one, a copy will be that is decided now of a message of `topic`."""
        return self._of[topic].epoch

    async def send(
        self, group: str, pack: TopicPack, failed: int, reason: str, delay_s: float, copy_id: CopyId | None
    ) -> None:
        """Send a copy of each message of `pack`, with `failed` attempts more, one request for each partition, one after
        the other. The largest message goes first: where the topic does not take that, nothing is sent. With a `copy_id`
        owners take it once: they know the producer, which is the member in the partition of `pack`, and its number; the
        epochs are asked one after the other, from that of the id on. Raises `OutcomeUnknown` where they have a later
        number of it and not this one."""
        messages = zip(pack.passing, pack.messages, strict=True)
        left = [_copy(record, message, failed, reason) for record, message in messages]
        epoch = self.epoch_of(pack.topic) if copy_id is None else copy_id.epoch
        producer = "" if copy_id is None else f"retries of {group} in {pack.channel} by {copy_id.member}"
        number = 0 if copy_id is None else copy_id.number
        while left:
            topic = await self._with_epoch(pack.topic, epoch)
            epoch = max(epoch, topic.first_epoch)
            left = await self._send_to(topic, epoch, left, delay_s, producer, number)
            epoch += 1

    async def _with_epoch(self, name: str, epoch: int) -> Topic:
        """The retry topic, once it is known to have that epoch."""
        while self._of[name].epoch < epoch:
            await self._look(name)
            if self._of[name].epoch < epoch:
                await asyncio.sleep(AGAIN_S)
        return self._of[name]

    async def _look(self, name: str) -> None:
        found = await self._describe(self._of[name].name)
        if found.id != self._of[name].id:
            raise TopicNotFound(f"topic {found.name} was dropped", topic=found.name)
        self._of.update((each, found) for each, topic in list(self._of.items()) if topic.id == found.id)

    async def _send_to(
        self, topic: Topic, epoch: int, copies: Sequence[PlacedMessage], delay_s: float, producer: str, number: int
    ) -> list[PlacedMessage]:
        """Send copies to an epoch; returns, in order, those that it has not and will not have, for it is over."""
        count = len(topic.partitions_of(epoch))
        parts: dict[int, list[PlacedMessage]] = {}
        for place, key, tags, body in copies:
            parts.setdefault(place % count, []).append((place % count, key, tags, body))
        over: set[int] = set()
        for partition, part in sorted(parts.items(), key=lambda each: _largest(each[1]), reverse=True):
            try:
                await self._send_part(topic, epoch, part, delay_s, producer, number)
            except TopicEpochEnded:
                over.add(partition)
            except TopicNotFound:
                await self._look(topic.name)
                if self._of[topic.name].first_epoch <= epoch:
                    raise
                over.add(partition)  # with all that was released there
        return [copy for copy in copies if copy[0] % count in over]

    async def _send_part(
        self, topic: Topic, epoch: int, part: Sequence[PlacedMessage], delay_s: float, producer: str, number: int
    ) -> None:
        try:
            await self._send(topic, epoch, part, delay_s, producer, number)
        except OutcomeUnknown as error:
            forgotten = error.fields.get("forgotten")
            if not (producer and isinstance(forgotten, int) and forgotten >= number):
                raise
            # it is there, so long ago that its outcome is forgotten: a number is sent once those before it are there


def _largest(part: Sequence[PlacedMessage]) -> int:
    return max(header_bytes(key, tags) + len(body) for _, key, tags, body in part)


def _copy(record: Record, message: TopicMessage, failed: int, reason: str) -> PlacedMessage:
    """The copy of a message, with a place that is its partition modulo the number of these."""
    origin = Origin(message.topic, message.partition, message.ts, message.id)
    sent = {name: tag for name, tag in record.tags.items() if name not in OWNERS_TAGS}
    tags = {**sent, **Retried(message.attempts + failed, reason, origin).tags()}
    check_header(record.key, tags)
    place = hash_key_bytes(record.key) if record.key else message.partition
    return place, record.key, tags, bytes(record.body)
