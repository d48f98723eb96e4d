"""Three requests in versions that `aiokafka` does not have: those that name a topic by its id (KIP-516).

A topic that is deleted and created again has the same name, but another id. So a request by id never reaches another
topic than the intended one, at no cost: the brokers answer UNKNOWN_TOPIC_ID. Brokers that do not know a version yet get
the request by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest, FetchRequest_v11
from aiokafka.protocol.produce import ProduceRequest, ProduceRequest_v8
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

ID_BYTES = 16
NO_ID = bytes(ID_BYTES)  # of a topic whose brokers give none
NOT_SET = -1
NO_TAGS: dict[int, bytes] = {}  # a value of `TAGGED`
NAME = CompactString("utf-8")
TAGGED = "tags", TaggedFields  # behind the other fields of each structure
_NO_NAME: Any = None


def may_be(found: bytes | None, noted: bytes | None) -> bool:
    """Whether the topic with the id `found` can be the one with the recorded id `noted`. Without an id a topic is
    identified by its name: brokers give ids to existing topics when they are upgraded, and in a cluster of two versions
    not all of them return ids."""
    return found is not None and noted is not None and (found == noted or NO_ID in (found, noted))


class Uuid(AbstractType[bytes]):
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
    API_KEY = 3  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- as the library does
    API_VERSION = 12  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- likewise
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
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = MetadataResponse_v12
    SCHEMA = Schema(
        ("topics", structures(_BY_ID, ("topic", NAME))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        TAGGED,
    )


class DescribeTopic(Request[MetadataRequest_v12]):
    """Ask for the topic of a name, without creating it."""

    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[MetadataRequest_v12]) -> MetadataRequest_v12:
        return request_struct_class([(NO_ID, self._topic, NO_TAGS)], False, False, NO_TAGS)


class ProduceResponse_v13(Response):
    API_KEY = 0  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- as the library does
    API_VERSION = 13  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- likewise
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
    FLEXIBLE_VERSION = True
    API_KEY = 0
    API_VERSION = 13
    RESPONSE_TYPE = ProduceResponse_v13
    SCHEMA = Schema(
        ("transactional_id", NAME),
        ("required_acks", Int16),
        ("timeout", Int32),
        topics(_BY_ID, ("partition", Int32), ("messages", CompactBytes)),
        TAGGED,
    )


class ProduceById(Request[ProduceRequest_v8 | ProduceRequest_v13]):
    """Append a batch to a topic, outside of transactions."""

    API_KEY = 0

    def __init__(self, required_acks: int, timeout_ms: int, topic: str, topic_id: bytes, batch: bytes) -> None:
        self._required_acks, self._timeout_ms = required_acks, timeout_ms
        self._topic, self._topic_id, self._batch = topic, topic_id, batch

    def build(
        self, request_struct_class: type[ProduceRequest_v8 | ProduceRequest_v13]
    ) -> ProduceRequest_v8 | ProduceRequest_v13:
        if issubclass(request_struct_class, ProduceRequest_v8):
            by_name = [(self._topic, [(0, self._batch)])]
            built: Any = ProduceRequest(_NO_NAME, self._required_acks, self._timeout_ms, by_name)
            return built.build(request_struct_class)
        by_id = [(self._topic_id, [(0, self._batch, NO_TAGS)], NO_TAGS)]
        return request_struct_class(_NO_NAME, self._required_acks, self._timeout_ms, by_id, NO_TAGS)


class FetchResponse_v13(Response):
    API_KEY = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- as the library does
    API_VERSION = 13  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] -- likewise
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
    FLEXIBLE_VERSION = True
    API_KEY = 1
    API_VERSION = 13
    RESPONSE_TYPE = FetchResponse_v13
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


class FetchById(Request[FetchRequest_v11 | FetchRequest_v13]):
    """Fetch the batches of a topic from an offset on."""

    API_KEY = 1

    def __init__(
        self, wait_ms: int, limit_bytes: int, isolation: int, topic: str, topic_id: bytes, offset: int
    ) -> None:
        self._wait_ms, self._limit_bytes, self._isolation = wait_ms, limit_bytes, isolation
        self._topic, self._topic_id, self._offset = topic, topic_id, offset

    def build(
        self, request_struct_class: type[FetchRequest_v11 | FetchRequest_v13]
    ) -> FetchRequest_v11 | FetchRequest_v13:
        limit = self._limit_bytes
        if issubclass(request_struct_class, FetchRequest_v11):
            partitions = [(self._topic, [(0, self._offset, limit)])]
            built: Any = FetchRequest(self._wait_ms, 1, limit, self._isolation, partitions)
            return built.build(request_struct_class)
        none: Sequence[Any] = []
        at = (0, NOT_SET, self._offset, NOT_SET, NOT_SET, limit, NO_TAGS)
        by_id = [(self._topic_id, [at], NO_TAGS)]
        return request_struct_class(
            NOT_SET, self._wait_ms, 1, limit, self._isolation, 0, NOT_SET, by_id, none, "", NO_TAGS
        )
