"""The client library behind types: the little of it that is used, and the only file that reaches into it.

Used is the synchronous client, whose sends call back from its own thread and whose reads may block a thread: beside
`pulsar.asyncio` it moves several times as many messages, since no event loop is woken for each. Flushing without
waiting is there in the library, but not in its public classes; hence the private names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import pulsar

from ...runtime.errors import ConfigError
from ...runtime.redaction import shown_url
from .failures import call_failure
from .ids import BEFORE_ALL, Place

BATCH_MESSAGES = 1000
BATCH_BYTES = 128 * 1024
# Never reached, as each burst is flushed; and it must not be: the library's timer would send the batch with its lock
# held, which takes the interpreter's for the callbacks, while whoever flushes holds that and waits for the library's.
BATCH_DELAY_MS = 600_000
MOST_RENEWALS = 8  # connections are not given back before the end
ONE_TRY_S = 5.0  # for making a producer or reader
NUMBER_PROPERTY = "tidewal.number"  # of an output of a commit, among those of its producer
TIMESTAMP_PROPERTY = "tidewal.timestamp"  # hybrid, decimal; the event time of the message is its physical part
LOGICAL_BITS = 18

OK = 0  # as a result
NativeTimeout = cast("type[Exception]", pulsar.Timeout)


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


class _PublicClient(Protocol):
    _consumers: list[object]


class _PublicProducer(Protocol):
    _producer: NativeProducer


class _PublicReader(Protocol):
    _reader: NativeReader


class _Builder(Protocol):
    def content(self, payload: bytes) -> None: ...
    def property(self, name: str, value: str) -> None: ...
    def event_timestamp(self, milliseconds: int) -> None: ...
    def sequence_id(self, number: int) -> None: ...
    def build(self) -> object: ...


_new_builder = cast("Callable[[], _Builder]", pulsar._pulsar.MessageBuilder)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] -- see above


def message(payload: bytes, timestamp: int, number: int | None = None) -> object:
    """A message for `send_async`. With a number it is stored once for all that are sent by producers of its
    producer's name, which must send numbers upward."""
    builder = _new_builder()
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
    """Its hybrid timestamp, 0 when it has none: others may write to our topics too."""
    written = received.properties().get(TIMESTAMP_PROPERTY, "")
    return int(written) if written.isdecimal() else 0


def place_of(id: NativeId) -> Place:
    """The ledger is negative when Pulsar answers without telling where."""
    return Place(id.ledger_id(), id.entry_id(), max(id.batch_index(), 0))


def ends_batch(id: NativeId) -> bool:
    """Whether no message of its batch comes behind it. The size of the batch is told by the serialized id alone, which
    has numbers only: field 6, as Protocol Buffers writes it."""
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
    """For what is closed: there is nobody to tell."""


@dataclass(frozen=True, slots=True)
class Security:
    """How the client shows who it is and whom it trusts."""

    token: str = field(default="", repr=False)
    trusted_certificates: str = ""  # a file
    certificate: str = ""  # a file, with `key` another way of showing who it is
    key: str = ""
    validate_hostname: bool = True


class Client:
    """Makes producers and readers. Every method blocks, up to `ONE_TRY_S` or less; sending has `timeout_s`."""

    def __init__(self, url: str, timeout_s: float, security: Security, *, listener: str, log_file: str) -> None:
        """`listener` is the broker's name for the addresses to connect to, where it has several. The library's own
        log goes to `log_file`: it would print, and Python's logging would need the interpreter on its threads."""
        self.timeout_ms = max(1, round(timeout_s * 1000))
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
        """Changes with `renew`."""
        return len(self._clients)

    def renew(self, connection: int) -> None:
        """Make what comes now over another connection than this one, which is silent: the library itself would notice
        in a minute. What was made over it stays there, for it may come back."""
        with self._lock:
            if connection == len(self._clients) <= MOST_RENEWALS:
                self._clients.append(self._connect())

    def producer(self, topic: str, name: str, *, batches: bool = True) -> NativeProducer:
        """A producer whose messages the broker stores once, however often they are sent again. A name is with one
        producer at a time."""
        try:
            made = self._clients[-1].create_producer(
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
        return cast(_PublicProducer, made)._producer  # pyright: ignore[reportPrivateUsage] -- see above

    def reader(self, topic: str, start: Place, queue_messages: int) -> NativeReader:
        """A reader from the entry of `start`, with it: entries are whole batches, so the first messages may lie
        before `start`. Its subscription is not durable, so the broker forgets it when the connection ends."""
        if start == BEFORE_ALL:
            native_start = cast("object", pulsar.MessageId.earliest)
        else:
            native_start = cast("object", pulsar.MessageId(-1, start.ledger, start.entry, -1))
        client = self._clients[-1]
        try:
            made = client.create_reader(
                topic,
                native_start,
                receiver_queue_size=queue_messages,
                reader_name="tidewal",
                subscription_role_prefix="tidewal-reader",
                start_message_id_inclusive=True,
            )
        except Exception as error:
            raise call_failure(error, f"no reader of {topic}") from error
        cast(_PublicClient, client)._consumers.remove(made)  # pyright: ignore[reportPrivateUsage] -- kept there for ever
        return cast(_PublicReader, made)._reader  # pyright: ignore[reportPrivateUsage] -- see above

    def close(self) -> None:
        """Let everything go; waits for the broker no longer than the timeout."""
        for client in self._clients:
            try:
                client.close()
            except Exception:  # the broker does not answer: what it has of us ends with the connection
                client.shutdown()


def _authentication(security: Security) -> pulsar.Authentication | None:
    if security.token:
        return pulsar.AuthenticationToken(security.token)
    if security.certificate:
        return pulsar.AuthenticationTLS(security.certificate, security.key)
    return None
