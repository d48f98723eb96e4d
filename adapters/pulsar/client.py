"""Types for the used part of the client library: the only module that depends on it.

The synchronous client is used, whose sends call back from its own thread and whose reads may block a thread: it moves
several times as many messages as `pulsar.asyncio`, since no event loop is woken for each. The library can flush without
waiting, but not through its public classes; hence the private names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import pulsar

from ...runtime.errors import ConfigError
from ...runtime.log.redaction import shown_url
from .failures import call_failure
from .ids import BEFORE_ALL, MessagePlace

BATCH_MESSAGES = 1000
BATCH_BYTES = 128 * 1024
# Never reached, as each burst is flushed; and it must not be: the library's timer would send the batch with its lock
# held and wait for the interpreter's lock for the callbacks, while a flushing thread holds that and waits for the
# library's.
BATCH_DELAY_MS = 600_000
MOST_RENEWALS = 8  # connections are only closed with the log
ONE_TRY_S = 5.0  # for opening a producer or reader
NUMBER_PROPERTY = "tidewal.number"  # of an output of a commit, among those of its producer
TIMESTAMP_PROPERTY = "tidewal.timestamp"  # hybrid, decimal; the event time of the message is its physical part
LOGICAL_BITS = 18

OK = 0  # as a result
NativeTimeout: type[Exception] = cast("Any", pulsar.Timeout)


class NativeResult(Protocol):
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...


class NativeId(Protocol):
    def ledger_id(self) -> int: ...
    def entry_id(self) -> int: ...
    def batch_index(self) -> int: ...
    def serialize(self) -> bytes: ...


class NativeMessage(Protocol):
    def data(self) -> bytes: ...
    def properties(self) -> dict[str, str]: ...
    def message_id(self) -> NativeId: ...
    def producer_name(self) -> str: ...


class NativeProducer(Protocol):
    def send_async(self, message: object, answered: Callable[[NativeResult, NativeId], None]) -> None: ...
    def flush_async(self, answered: Callable[[NativeResult], None]) -> None: ...
    def close_async(self, answered: Callable[[NativeResult], None]) -> None: ...


class NativeReader(Protocol):
    def read_next(self, timeout_ms: int) -> NativeMessage: ...
    def is_connected(self) -> bool: ...
    def close_async(self, answered: Callable[[NativeResult], None]) -> None: ...


class _Builder(Protocol):
    def content(self, payload: bytes) -> None: ...
    def property(self, name: str, value: str) -> None: ...
    def event_timestamp(self, milliseconds: int) -> None: ...
    def sequence_id(self, number: int) -> None: ...
    def partition_key(self, key: str) -> None: ...
    def set_null_value(self) -> None: ...
    def build(self) -> object: ...


new_builder: Callable[[], _Builder] = cast("Callable[[], _Builder]", pulsar._pulsar.MessageBuilder)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] -- see above


def message(payload: bytes, timestamp: int, number: int | None = None) -> object:
    """A message for `send_async` with a hybrid `timestamp`. With a `number` the broker stores it once, however many
    producers of the same name send it; the numbers of a name must ascend."""
    builder = new_builder()
    builder.content(payload)
    if timestamp:
        builder.property(TIMESTAMP_PROPERTY, str(timestamp))
        if physical := timestamp >> LOGICAL_BITS:
            builder.event_timestamp(physical)
    if number is not None:
        builder.sequence_id(number)
        builder.property(NUMBER_PROPERTY, str(number))
    return builder.build()


def timestamp_of(received: NativeMessage) -> int:
    """The hybrid timestamp of a message, 0 when it has none: other programs may write to the topics too."""
    written = received.properties().get(TIMESTAMP_PROPERTY, "")
    return int(written) if written.isdecimal() else 0


def place_of(id: NativeId) -> MessagePlace:
    """The place of an id; its ledger is negative when Pulsar answers without a place."""
    return MessagePlace(id.ledger_id(), id.entry_id(), max(id.batch_index(), 0))


def ends_batch(id: NativeId) -> bool:
    """Whether the message is the last of its batch. Only the serialized id has the size of the batch: it is a Protocol
    Buffers message of numbers, with the size in field 6."""
    serialized = id.serialize()
    fields: dict[int, int] = {}
    at = 0
    while at < len(serialized):
        tag, at = _varint(serialized, at)
        fields[tag >> 3], at = _varint(serialized, at)
    return id.batch_index() + 1 >= fields.get(6, 0)


def _varint(serialized: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = serialized[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def ignore(_: object) -> None:
    """A callback that ignores the result, for closing."""


@dataclass(frozen=True, slots=True)
class Security:
    """The credentials of the client, and the certificates that it trusts."""

    token: str = field(default="", repr=False)
    trusted_certificates: str = ""  # a file
    certificate: str = ""  # a file; with `key` the alternative to `token`
    key: str = ""
    validate_hostname: bool = True


class PulsarClient:
    """Opens producers and readers. Every method blocks for `ONE_TRY_S` at most; sending has `timeout_s`."""

    def __init__(self, url: str, timeout_s: float, security: Security, *, listener: str, log_file: str) -> None:
        """`listener` is the broker's name for the addresses to connect to, where it has several. The library logs to
        `log_file`: by default it would print, and Python's logging would need the interpreter on its threads. Raises
        `ConfigError`."""
        self.timeout_ms: int = max(1, round(timeout_s * 1000))
        self._url = url
        self._arguments: dict[str, Any] = {
            "operation_timeout_seconds": max(1, round(min(timeout_s, ONE_TRY_S))),
            "connection_timeout_ms": self.timeout_ms,
            "tls_trust_certs_file_path": security.trusted_certificates or None,
            "tls_certificate_file_path": security.certificate or None,
            "tls_private_key_file_path": security.key or None,
            "tls_validate_hostname": security.validate_hostname,
            "stats_interval_in_seconds": 0,
            "listener_name": listener or None,
            "logger": pulsar.FileLogger(cast("object", pulsar.LoggerLevel.Warn), log_file or os.devnull),
        }
        self._security = security
        self._lock = threading.Lock()
        self._clients = [self._connect()]

    def _connect(self) -> pulsar.Client:
        try:
            return pulsar.Client(self._url, authentication=_authentication(self._security), **self._arguments)
        except Exception as error:
            raise ConfigError(f"no client for {shown_url(self._url)}: {error}", key="pulsar.address") from error

    @property
    def connection(self) -> int:
        """The number of the present connection, which changes with `renew`."""
        return len(self._clients)

    def renew(self, connection: int) -> None:
        """Open new producers and readers over another connection than the given one, which is silent: the library
        itself would notice only after a minute. Existing ones stay on it, since it may recover."""
        with self._lock:
            if connection == len(self._clients) <= MOST_RENEWALS:
                self._clients.append(self._connect())

    def producer(self, topic: str, name: str, *, batches: bool = True) -> NativeProducer:
        """Open a producer, whose messages the broker stores once, however often they are resent. Only one producer at a
        time can have the name. Raises what `call_failure` returns."""
        try:
            created = self._clients[-1].create_producer(
                topic,
                producer_name=name,
                initial_sequence_id=1,  # 0 would be taken for none
                send_timeout_millis=self.timeout_ms,
                max_pending_messages=0,  # no limit by number: the appender has one by size
                batching_enabled=batches,
                batching_max_messages=BATCH_MESSAGES,
                batching_max_allowed_size_in_bytes=BATCH_BYTES,
                batching_max_publish_delay_ms=BATCH_DELAY_MS,
            )
        except Exception as error:
            raise call_failure(error, f"no producer for {topic}") from error
        return cast(Any, created)._producer

    def reader(self, topic: str, start: MessagePlace, queue_messages: int) -> NativeReader:
        """Open a reader from the entry of `start`, inclusive: entries are whole batches, so the first messages may lie
        before `start`. `queue_messages` are prefetched. Its subscription is not durable, so the broker removes it when
        the connection ends. Raises what `call_failure` returns."""
        if start == BEFORE_ALL:
            native_start = cast("object", pulsar.MessageId.earliest)
        else:
            native_start = cast("object", pulsar.MessageId(-1, start.ledger, start.entry, -1))
        client = self._clients[-1]
        try:
            created = client.create_reader(
                topic,
                native_start,
                receiver_queue_size=queue_messages,
                reader_name="tidewal",
                subscription_role_prefix="tidewal-reader",
                start_message_id_inclusive=True,
            )
        except Exception as error:
            raise call_failure(error, f"no reader of {topic}") from error
        cast(Any, client)._consumers.remove(created)  # it would be kept there for ever
        return cast(Any, created)._reader

    def routing_producer(self, topic: str, name: str, route: Callable[[object, int], int]) -> NativeProducer:
        """Open a producer of a topic with partitions, or of one partition, which sends each message by itself. `route`
        chooses a partition for a message, by their number. Raises what `call_failure` returns."""
        try:
            created = self._clients[-1].create_producer(
                topic,
                producer_name=name,
                send_timeout_millis=self.timeout_ms,
                max_pending_messages=0,
                max_pending_messages_across_partitions=0,
                batching_enabled=False,  # a batch has one key for those who share a topic by key
                message_routing_mode=cast("Any", pulsar.PartitionsRoutingMode).CustomPartition,
                message_router=route,
            )
        except Exception as error:
            raise call_failure(error, f"no producer for {topic}") from error
        return cast(Any, created)._producer

    def close(self) -> None:
        """Close all connections, with what was opened over them; waits for the broker no longer than the timeout."""
        for client in self._clients:
            try:
                client.close()
            except Exception:  # the broker does not answer: producers and readers end with the connection
                client.shutdown()


def _authentication(security: Security) -> pulsar.Authentication | None:
    if security.token:
        return pulsar.AuthenticationToken(security.token)
    if security.certificate:
        return pulsar.AuthenticationTLS(security.certificate, security.key)
    return None
