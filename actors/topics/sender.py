"""What a client sends to topics: which message goes to which partition."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

from ...runtime.catalog.topics import Topic
from ...runtime.errors import InvalidRequest, TidewalError, TopicEpochEnded, of_unknown_outcome
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import TagValue
from ...runtime.rows.hashing import hash_key_bytes
from .messages import (
    Message,
    MessageBodies,
    Partitioner,
    PlacedMessage,
    RetriedMessage,
    SendResult,
    bytes_of,
    check_count,
    check_header,
)
from .retried import RETRIED_TAGS


class TopicSender:
    """Places messages: by the hash of their key, and those of a batch that have none together, on the partitions by
    turns. `name` decides with which partition that begins, so that clients begin with different ones."""

    def __init__(self, name: str) -> None:
        self._begin = crc32(name.encode())
        self._turns: dict[int, Iterator[int]] = {}  # by topic

    def forget(self, topic: Topic) -> None:
        """Nothing is sent to the topic any more."""
        self._turns.pop(topic.id, None)

    def place(self, topic: Topic, messages: Sequence[Message], partitioner: Partitioner | None) -> list[PlacedMessage]:
        """Each message with the number of its partition. Raises `InvalidRequest` for what a `partitioner` says that is
        no partition."""
        count, turn = len(topic.partitions), -1
        placed: list[PlacedMessage] = []
        for message in messages:
            key = bytes_of(message.key)
            if partitioner is not None:
                partition = _checked(partitioner(message, count), count)
            elif message.key is not None:
                partition = hash_key_bytes(key) % count
            else:
                if turn < 0:
                    turn = next(self._turns.setdefault(topic.id, itertools.count(self._begin))) % count
                partition = turn
            placed.append((partition, key, dict(message.tags), bytes_of(message.body)))
        return placed


class Sending:
    """The `messages` of one call, on their way to the partitions of a topic, or of several of its epochs: what one has
    not taken goes to the next. `partitions` are the numbers of those that have some."""

    def __init__(self, sender: TopicSender, messages: Sequence[Message], partitioner: Partitioner | None) -> None:
        self.partitions: set[int] = set()
        self._sender, self._partitioner = sender, partitioner
        self._left = messages
        self._numbers: Sequence[int] = range(len(messages))  # in the call, of those that are left
        self._placed: list[PlacedMessage] = []  # those that are left, for the epoch to which they are sent
        self._partitions: Sequence[str] = ()  # of that epoch, vchannels
        self._ids = [""] * len(messages)  # of those that are due later
        self._ts = 0  # of what was written last

    def place(self, topic: Topic) -> list[PlacedMessage]:
        """What is left to send, placed in the present epoch of `topic`."""
        self._partitions = topic.partitions
        try:
            self._placed = self._sender.place(topic, self._left, self._partitioner)
        except TidewalError:
            raise
        except Exception as error:  # the partitioner's own, which says nothing of what an earlier epoch has
            if not self.partitions:
                raise
            raise InvalidRequest(f"the partitioner failed: {error!r}", argument="partitioner") from error
        return self._placed

    def divide(self, error: TopicEpochEnded) -> None:
        """The epoch for which it was placed has ended, and has of it what `error` says."""
        written = {
            number
            for number, vchannel in enumerate(self._partitions)
            if pchannel_of(vchannel) in error.written_channels
        }
        self.partitions |= written
        left = [at for at, (partition, *_) in enumerate(self._placed) if partition not in written]
        self._left, self._numbers = [self._left[at] for at in left], [self._numbers[at] for at in left]

    def keep(self, ids: Mapping[int, str], ts: int) -> None:
        """Messages that are due later are durable, at `ts`: they have these ids, by their places among those that were
        placed last."""
        self._ts = max(self._ts, ts)
        for at, id in ids.items():
            self._ids[self._numbers[at]] = id

    @contextmanager
    def partly_written(self) -> Generator[None]:
        """An error that ends the block while a partition has some of the messages is of unknown outcome: the rest may
        be written or not, and a call that is repeated writes what is there again."""
        try:
            yield
        except TidewalError as error:
            raise (of_unknown_outcome(error) if self.partitions else error) from None

    def result(self, ts: int = 0) -> SendResult:
        """What to return once what was placed last is durable, at `ts`, or as `keep` was told."""
        partitions = self.partitions.union(partition for partition, *_ in self._placed)
        ids = tuple(self._ids) if any(self._ids) else ()
        return SendResult(max(self._ts, ts), len(self._ids), frozenset(partitions), ids)


def messages_of(given: MessageBodies, key: bytes | str | None, tags: Mapping[str, TagValue] | None) -> list[Message]:
    """The messages that were given to `send`: `key` and `tags` are of those that are bodies alone. Raises
    `InvalidRequest`."""
    listed = [given] if isinstance(given, bytes | str | Message) else list(given)
    check_count(len(listed))
    messages: list[Message] = []
    for each in listed:
        message = each if isinstance(each, Message) else Message(each, key, tags or {})
        check_header(bytes_of(message.key), message.tags)
        taken = RETRIED_TAGS.intersection(message.tags) if message.tags else None
        if taken and not isinstance(message, RetriedMessage):
            raise InvalidRequest(
                f"a tag of a message cannot be called {min(taken)}: retry topics use it",
                argument="tags",
            )
        messages.append(message)
    return messages


def _checked(partition: object, partitions: int) -> int:
    if type(partition) is not int or not 0 <= partition < partitions:
        raise InvalidRequest(
            f"the partitioner said {partition!r}, and must say a number from 0 to {partitions - 1}",
            argument="partitioner",
        )
    return partition
