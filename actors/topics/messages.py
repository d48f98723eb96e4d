"""Messages of topics, and what came of sending some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

import msgpack

from ...runtime.arguments import checked_fields
from ...runtime.delays.delayed import due_of
from ...runtime.errors import InvalidRequest
from ...runtime.groups.record_pack import RecordPack
from ...runtime.log.record import DECODE_ERRORS, Record, RecordType, Tags, TagValue
from ...runtime.log.wal import Payload
from ...runtime.ownership.batch import OWNERS_TAGS
from ...runtime.replicated.records import typed
from .requests import REQUEST_TAGS, TopicRequest, request_of
from .retried import RETRIED_TAGS, retried_of

if TYPE_CHECKING:
    from ...runtime.filters.record_filter import RecordFilter

HEADER_BYTES_MAX = 64 * 1024  # of a message's key and tags
MESSAGES_MAX = 10_000  # of one `send`
_OTHERS_TAGS = OWNERS_TAGS | REQUEST_TAGS | RETRIED_TAGS
_TAG_VALUES = (str, int, float, bytes, type(None))


@checked_fields()
@dataclass(frozen=True, slots=True)
class Message:
    """A message to be sent. Messages of one `key` keep their order; without a key it goes to any partition. A text is
    sent as UTF-8. Key and tags have up to 64 KiB together."""

    body: bytes | str
    key: bytes | str | None = None
    tags: Mapping[str, TagValue] = field(default_factory=dict[str, TagValue])


class RetriedMessage(Message):
    """A message for a group's retry topic, which may have the tags of what lies there (`retried.py`)."""


MessageBodies: TypeAlias = bytes | str | Message | Sequence[bytes | str | Message]
"""One message, or several: bodies, or `Message`s with a key and tags of their own."""
Partitioner: TypeAlias = Callable[[Message, int], int]
"""Says to which of so many partitions a message goes: a number from 0 on."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """Messages that are durable: their timestamp in the log, how many they are, and the numbers of the partitions in
    which they lie. A reader that starts at `ts` gets them first. Of messages that are due later, `ids` has the id of
    each, in their order, by which it can be cancelled; they lie in their partitions once they are due."""

    ts: int
    messages: int
    partitions: frozenset[int]
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """A message as a member of a group gets it. `ts` is its timestamp in the log, `id` that of its last entry;
    `request` says who waits for a reply (`Client.ask`), None for nobody. Of one that was sent to be due later, `due_ts`
    is the timestamp at which it was due; 0 of others.

    Of one that comes from the group's retry topic, `topic`, `partition`, `ts` and `id` are those of the original,
    `attempts` says how often it failed or was given back, and `reason` why it was the last time. `due_ts` is when it
    was to be tried again."""

    topic: str
    partition: int
    key: bytes
    tags: Tags
    body: Payload
    ts: int
    id: bytes
    request: TopicRequest | None = None
    due_ts: int = 0
    attempts: int = 0
    reason: str = ""


@dataclass(frozen=True)
class TopicPack(RecordPack):
    """A `RecordPack` of one partition of a topic, read with the filter `where`. With `retries` that is a retry topic of
    the member's group, whose messages say what they are copies of. `moves` is how often the log had been replaced by
    another when it was read."""

    topic: str = ""
    partition: int = 0
    where: RecordFilter | None = None
    retries: bool = False
    moves: int = 0

    def _message(self, record: Record) -> TopicMessage:
        retried = retried_of(record.tags) if self.retries else None
        place = (self.topic, self.partition, record.ts, record.id)
        topic, partition, ts, id = place if retried is None else retried.origin
        return TopicMessage(
            topic,
            partition,
            record.key,
            own_tags(record.tags),
            record.body,
            ts,
            id,
            request_of(record.tags, ts),
            due_of(record),
            0 if retried is None else retried.attempts,
            "" if retried is None else retried.reason,
        )

    @property
    def passing(self) -> list[Record]:
        """The records of `messages`, in their order."""
        return [
            each
            for each in self.records
            if each.type is RecordType.MESSAGE and (self.where is None or self.where.holds(each))
        ]

    @cached_property
    def messages(self) -> list[TopicMessage]:
        """The messages that pass the filter, in the order of the partition: of a batch, whose records are here whole,
        these alone."""
        return [self._message(each) for each in self.passing]


def own_tags(tags: Tags) -> Tags:
    """The tags that the sender gave."""
    return {name: value for name, value in tags.items() if name not in _OTHERS_TAGS}


PlacedMessage: TypeAlias = tuple[int, bytes, Tags, bytes]
"""A message on its way to a door: the number of its partition in the epoch, its key, its tags, its body."""


def pack_messages(messages: Sequence[PlacedMessage]) -> bytes:
    """The body of a request to send `messages`."""
    return cast(bytes, msgpack.packb(messages))


def unpack_messages(body: Payload) -> list[PlacedMessage]:
    """The messages in the body of a request. Raises `InvalidRequest` for what is malformed, none, or too many."""
    try:
        found = [
            (typed(partition, int), typed(key, bytes), cast(Tags, typed(tags, dict)), typed(content, bytes))
            for partition, key, tags, content in cast("list[tuple[object, ...]]", msgpack.unpackb(body))
        ]
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"malformed messages: {error}") from error
    check_count(len(found))
    return found


def check_count(messages: int) -> None:
    """Raise `InvalidRequest` for none, or more than one `send` may have."""
    if not 1 <= messages <= MESSAGES_MAX:
        raise InvalidRequest(f"send 1 to {MESSAGES_MAX} messages at once, not {messages}")


def bytes_of(value: bytes | str | None) -> bytes:
    """What is sent of a body or a key. Raises `InvalidRequest` for a text that is not UTF-8 (a lone surrogate)."""
    try:
        return b"" if value is None else value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a text of a message is no UTF-8: {error}", argument="messages") from error


def header_bytes(key: bytes, tags: Tags) -> int:
    """How much key and tags take in a message. Raises `InvalidRequest` for tags that no record has."""
    if not tags:  # most have none: what `packb` would make of it
        return len(key) + (4 if len(key) < 1 << 8 else 5 if len(key) < 1 << 16 else 7)
    given = cast("Mapping[object, object]", tags)  # of a client, or of a request
    if not all(isinstance(name, str) and isinstance(value, _TAG_VALUES) for name, value in given.items()):
        raise InvalidRequest("tags of a message map texts to texts, numbers, bytes or None", argument="tags")
    try:
        return len(cast(bytes, msgpack.packb((key, dict(tags)))))
    except (ValueError, OverflowError) as error:  # no UTF-8, or more than 64 bits
        raise InvalidRequest(f"a tag of a message cannot be sent: {error}", argument="tags") from error


def check_header(key: bytes, tags: Tags) -> int:
    """The `header_bytes`. Raises `InvalidRequest` where they are over the limit, or tags have names that an owner
    gives, or values that no record has."""
    if (size := header_bytes(key, tags)) > HEADER_BYTES_MAX:
        raise InvalidRequest(
            f"key and tags of a message take {size} bytes, over {HEADER_BYTES_MAX}: put what is large into its body"
        )
    if tags and (taken := OWNERS_TAGS.intersection(tags)):
        raise InvalidRequest(f"a tag of a message cannot be called {min(taken)}: owners use it", argument="tags")
    return size
