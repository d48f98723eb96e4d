"""Two requests in versions that `aiokafka` does not have: without them a commit is not safe.

`TxnOffsetCommit` 3 names the member and its generation, so that a member that lost its channels cannot commit.
`OffsetFetch` 7 can ask for stable offsets, so that no member starts at a position that an open transaction will move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from aiokafka.protocol.types import Boolean, CompactArray, Int16, Int32, Int64

from ..bases import KafkaRequest, RequestStruct, Response, Schema
from ..requests import NAME, NO_TAGS, TAGGED, structures, topics
from ..topics import place_of

NO_LEADER_EPOCH = -1
_BY_NAME = "topic", NAME


class CommittedOffset(NamedTuple):
    """A committed offset: the offset that is read next, and Tidewal's metadata, see `offsets.py`."""

    offset: int
    metadata: str


def by_topic(partitions: Iterable[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Fields of partitions, by their keys (`topics.place_of`), as requests carry them: by topic, behind the number."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for key, fields in partitions:
        topic, number = place_of(key)
        found.setdefault(topic, []).append((number, *fields))
    return list(found.items())


class OffsetFetchResponse_v7(Response):
    API_KEY: ClassVar[int] = 9
    API_VERSION: ClassVar[int] = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        topics(
            _BY_NAME,
            ("partition", Int32),
            ("offset", Int64),
            ("leader_epoch", Int32),
            ("metadata", NAME),
            ("error_code", Int16),
        ),
        ("error_code", Int16),
        TAGGED,
    )


class OffsetFetchRequest_v7(RequestStruct):
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 9
    API_VERSION: ClassVar[int] = 7
    RESPONSE_TYPE: ClassVar[type[Response]] = OffsetFetchResponse_v7
    SCHEMA = Schema(
        ("group_id", NAME),
        ("topics", structures(_BY_NAME, ("partitions", CompactArray(Int32)))),
        ("require_stable", Boolean),
        TAGGED,
    )


class OffsetFetch(KafkaRequest[OffsetFetchRequest_v7]):
    """The committed offsets of a group in partitions, by their keys; None asks for all that there are."""

    API_KEY: ClassVar[int] = 9

    def __init__(self, group_id: str, keys: Sequence[str] | None, *, stable: bool) -> None:
        self._group_id, self._keys, self._stable = group_id, keys, stable

    def build(self, request_struct_class: type[OffsetFetchRequest_v7]) -> OffsetFetchRequest_v7:
        topics = None
        if self._keys is not None:
            asked = by_topic((key, ()) for key in self._keys)
            topics = [(topic, [number for (number,) in numbers], NO_TAGS) for topic, numbers in asked]
        return request_struct_class(self._group_id, topics, self._stable, NO_TAGS)


class TxnOffsetCommitResponse_v3(Response):
    API_KEY: ClassVar[int] = 28
    API_VERSION: ClassVar[int] = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        topics(_BY_NAME, ("partition", Int32), ("error_code", Int16)),
        TAGGED,
    )


class TxnOffsetCommitRequest_v3(RequestStruct):
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 28
    API_VERSION: ClassVar[int] = 3
    RESPONSE_TYPE: ClassVar[type[Response]] = TxnOffsetCommitResponse_v3
    SCHEMA = Schema(
        ("transactional_id", NAME),
        ("group_id", NAME),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", NAME),
        ("group_instance_id", NAME),
        topics(
            _BY_NAME,
            ("partition", Int32),
            ("offset", Int64),
            ("leader_epoch", Int32),
            ("metadata", NAME),
        ),
        TAGGED,
    )


class TxnOffsetCommit(KafkaRequest[TxnOffsetCommitRequest_v3]):
    """Commit offsets as part of a transaction, as a member of a generation."""

    API_KEY: ClassVar[int] = 28

    def __init__(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        group_id: str,
        generation: int,
        member: str,
        positions: Sequence[tuple[str, CommittedOffset]],
    ) -> None:
        self._transactional_id, self._producer = transactional_id, producer
        self._group = (group_id, generation, member)
        self._positions = positions

    def build(self, request_struct_class: type[TxnOffsetCommitRequest_v3]) -> TxnOffsetCommitRequest_v3:
        group_id, generation, member = self._group
        no_instance: Any = None
        topics = [
            (topic, partitions, NO_TAGS)
            for topic, partitions in by_topic(
                (key, (at.offset, NO_LEADER_EPOCH, at.metadata, NO_TAGS)) for key, at in self._positions
            )
        ]
        return request_struct_class(
            self._transactional_id, group_id, *self._producer, generation, member, no_instance, topics, NO_TAGS
        )
