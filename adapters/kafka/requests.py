"""Requests in versions that `aiokafka` does not have: those that name a topic by its id (KIP-516).

A topic that is deleted and created again has the same name, but another id. So a request by id never reaches another
topic than the intended one, at no cost: the brokers answer UNKNOWN_TOPIC_ID. Brokers that do not know a version yet get
the request by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    TaggedFields,
)

from .bases import FetchRequest_v11, FieldType, KafkaRequest, ProduceRequest_v8, RequestStruct, Response, Schema

ID_BYTES = 16
NO_ID = bytes(ID_BYTES)  # of a topic whose brokers give none
NOT_SET = -1
NO_TAGS: dict[int, bytes] = {}  # a value of `TAGGED`
NAME: CompactString = CompactString("utf-8")
TAGGED: tuple[str, Any] = ("tags", TaggedFields)  # behind the other fields of each structure
_NO_NAME: Any = None


def may_be(found: bytes | None, noted: bytes | None) -> bool:
    """Whether the topic with the id `found` can be the one with the recorded id `noted`. Without an id a topic is
    identified by its name: brokers give ids to existing topics when they are upgraded, and in a cluster of two versions
    not all of them return ids."""
    return found is not None and noted is not None and (found == noted or NO_ID in (found, noted))


class Uuid(FieldType):
    """A topic id in a request or response."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: Any) -> bytes:
        found: bytes = data.read(ID_BYTES)
        return found


def structures(*fields: Any) -> CompactArray:
    """An array of structures with these fields."""
    return CompactArray(*fields, TAGGED)


def topics(key: tuple[str, Any], *partition: Any) -> tuple[str, CompactArray]:
    """The field `topics`: structures with the topic's `key` and its partitions, which have the fields `partition`."""
    return "topics", structures(key, ("partitions", structures(*partition)))


_BY_ID = "topic_id", Uuid


class MetadataResponse_v12(Response):
    API_KEY: ClassVar[int] = 3
    API_VERSION: ClassVar[int] = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", structures(("node_id", Int32), ("host", NAME), ("port", Int32), ("rack", NAME))),
        ("cluster_id", NAME),
        ("controller_id", Int32),
        (
            "topics",
            structures(
                ("error_code", Int16),
                ("topic", NAME),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    structures(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        TAGGED,
    )


class MetadataRequest_v12(RequestStruct):
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 3
    API_VERSION: ClassVar[int] = 12
    RESPONSE_TYPE: ClassVar[type[Response]] = MetadataResponse_v12
    SCHEMA = Schema(
        ("topics", structures(_BY_ID, ("topic", NAME))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        TAGGED,
    )


class DescribeTopic(KafkaRequest[MetadataRequest_v12]):
    """Ask for the topic of a name, without creating it."""

    API_KEY: ClassVar[int] = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[MetadataRequest_v12]) -> MetadataRequest_v12:
        return request_struct_class([(NO_ID, self._topic, NO_TAGS)], False, False, NO_TAGS)


class DescribeTopics(KafkaRequest[MetadataRequest_v12]):
    """Ask for all topics."""

    API_KEY: ClassVar[int] = 3

    def build(self, request_struct_class: type[MetadataRequest_v12]) -> MetadataRequest_v12:
        return request_struct_class(None, False, False, NO_TAGS)


class ProduceResponse_v13(Response):
    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 13
    SCHEMA = Schema(
        topics(
            _BY_ID,
            ("partition", Int32),
            ("error_code", Int16),
            ("offset", Int64),
            ("timestamp", Int64),
            ("log_start_offset", Int64),
            ("record_errors", structures(("batch_index", Int32), ("message", NAME))),
            ("error_message", NAME),
        ),
        ("throttle_time_ms", Int32),
        TAGGED,
    )


class ProduceRequest_v13(RequestStruct):
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 13
    RESPONSE_TYPE: ClassVar[type[Response]] = ProduceResponse_v13
    SCHEMA = Schema(
        ("transactional_id", NAME),
        ("required_acks", Int16),
        ("timeout", Int32),
        topics(_BY_ID, ("partition", Int32), ("messages", CompactBytes)),
        TAGGED,
    )


class ProduceById(KafkaRequest[ProduceRequest_v8 | ProduceRequest_v13]):
    """Append a batch to a topic, outside of transactions."""

    API_KEY: ClassVar[int] = 0

    def __init__(
        self, required_acks: int, timeout_ms: int, topic: str, topic_id: bytes, batch: bytes, partition: int = 0
    ) -> None:
        self._required_acks, self._timeout_ms = required_acks, timeout_ms
        self._topic, self._topic_id, self._batch, self._partition = topic, topic_id, batch, partition

    def build(
        self, request_struct_class: type[ProduceRequest_v8 | ProduceRequest_v13]
    ) -> ProduceRequest_v8 | ProduceRequest_v13:
        if issubclass(request_struct_class, ProduceRequest_v8):
            by_name = [(self._topic, [(self._partition, self._batch)])]
            built: Any = ProduceRequest(_NO_NAME, self._required_acks, self._timeout_ms, by_name)
            return built.build(request_struct_class)
        by_id = [(self._topic_id, [(self._partition, self._batch, NO_TAGS)], NO_TAGS)]
        return request_struct_class(_NO_NAME, self._required_acks, self._timeout_ms, by_id, NO_TAGS)


class FetchResponse_v13(Response):
    API_KEY: ClassVar[int] = 1
    API_VERSION: ClassVar[int] = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        topics(
            _BY_ID,
            ("partition", Int32),
            ("error_code", Int16),
            ("highwater_offset", Int64),
            ("last_stable_offset", Int64),
            ("log_start_offset", Int64),
            ("aborted_transactions", structures(("producer_id", Int64), ("first_offset", Int64))),
            ("preferred_read_replica", Int32),
            ("message_set", CompactBytes),
        ),
        TAGGED,
    )


class FetchRequest_v13(RequestStruct):
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 1
    API_VERSION: ClassVar[int] = 13
    RESPONSE_TYPE: ClassVar[type[Response]] = FetchResponse_v13
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_time", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        topics(
            _BY_ID,
            ("partition", Int32),
            ("current_leader_epoch", Int32),
            ("fetch_offset", Int64),
            ("last_fetched_epoch", Int32),
            ("log_start_offset", Int64),
            ("max_bytes", Int32),
        ),
        ("forgotten_topics_data", structures(_BY_ID, ("partitions", CompactArray(Int32)))),
        ("rack_id", NAME),
        TAGGED,
    )


class FetchById(KafkaRequest[FetchRequest_v11 | FetchRequest_v13]):
    """Fetch the batches of a partition from an offset on."""

    API_KEY: ClassVar[int] = 1

    def __init__(
        self,
        wait_ms: int,
        limit_bytes: int,
        isolation: int,
        topic: str,
        topic_id: bytes,
        offset: int,
        partition: int = 0,
    ) -> None:
        self._wait_ms, self._limit_bytes, self._isolation = wait_ms, limit_bytes, isolation
        self._topic, self._topic_id, self._offset, self._partition = topic, topic_id, offset, partition

    def build(
        self, request_struct_class: type[FetchRequest_v11 | FetchRequest_v13]
    ) -> FetchRequest_v11 | FetchRequest_v13:
        limit = self._limit_bytes
        if issubclass(request_struct_class, FetchRequest_v11):
            partitions = [(self._topic, [(self._partition, self._offset, limit)])]
            built: Any = FetchRequest(self._wait_ms, 1, limit, self._isolation, partitions)
            return built.build(request_struct_class)
        none: Sequence[Any] = []
        at = (self._partition, NOT_SET, self._offset, NOT_SET, NOT_SET, limit, NO_TAGS)
        by_id = [(self._topic_id, [at], NO_TAGS)]
        return request_struct_class(
            NOT_SET, self._wait_ms, 1, limit, self._isolation, 0, NOT_SET, by_id, none, "", NO_TAGS
        )
