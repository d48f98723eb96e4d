"""Topics that others made: their messages as entries, and entries as their messages.

A partition is the channel `TOPIC:NUMBER`, a topic without partitions the channel of its name. Pulsar's keys and
properties are text, so keys and headers are UTF-8 here, and a header's name comes once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias, cast

from ...runtime.clock import LOGICAL_BITS
from ...runtime.errors import InvalidRequest
from ...runtime.log.payloads import as_bytes
from ...runtime.log.wal import TOMBSTONE, Append, ChannelPolicy, Headers, Tombstone
from .client import NativeMessage, new_builder

POLICY = ChannelPolicy(retention_s=None)
KEYS = 64 * 1024  # whose partition is remembered

Route: TypeAlias = Callable[[object, int], int]  # from a message of the library and the number of partitions


class _ForeignMessage(NativeMessage, Protocol):
    def partition_key(self) -> str: ...
    def event_timestamp(self) -> int: ...
    def publish_timestamp(self) -> int: ...
    def has_null_value(self) -> bool: ...


def foreign_message(entry: Append) -> object:
    """A message for `send_async` of an entry that is `checked`."""
    builder = new_builder()
    if isinstance(entry.payload, Tombstone):
        builder.set_null_value()
    else:
        builder.content(bytes(entry.payload))
    if entry.key is not None:
        builder.partition_key(_text("a key", entry.key))
    for name, value in _properties(entry.headers).items():
        builder.property(name, value)
    if physical := entry.timestamp >> LOGICAL_BITS:
        builder.event_timestamp(physical)
    return builder.build()


def checked(entries: Sequence[Append]) -> list[Append]:
    """The entries with payloads that do not change. Raises `InvalidRequest` for what Pulsar cannot carry."""
    for entry in entries:
        _properties(entry.headers)
        if entry.key is not None:
            _text("a key", entry.key)
            if not entry.key:
                raise InvalidRequest("Pulsar has no empty keys: give None, or a key")
    return [
        entry if isinstance(entry.payload, Tombstone) else entry._replace(payload=as_bytes(entry.payload))
        for entry in entries
    ]


def timestamp_of(received: NativeMessage) -> int:
    """The event time of a message as a hybrid timestamp; where it has none the time when it was published."""
    found = cast(_ForeignMessage, received)
    return (found.event_timestamp() or found.publish_timestamp()) << LOGICAL_BITS


def content_of(received: NativeMessage) -> tuple[bytes, bytes | None, Headers]:
    """Payload, key and headers of a message."""
    found = cast(_ForeignMessage, received)
    payload = TOMBSTONE if found.has_null_value() else found.data()
    key = found.partition_key()
    headers = tuple((name, value.encode()) for name, value in found.properties().items())
    return payload, key.encode() if key else None, headers


def route() -> Route:
    """How one producer chooses partitions: by the key as the Java client does by default, without one in turn."""
    turns = itertools.count()

    def choose(message: object, partitions: int) -> int:
        key = cast(_ForeignMessage, message).partition_key()
        return (_java_hash(key) if key else next(turns)) % partitions

    return choose


@lru_cache(maxsize=KEYS)
def _java_hash(key: str) -> int:
    """`String.hashCode` without its sign."""
    units = memoryview(key.encode("utf-16-le")).cast("H")
    found = 0
    for unit in units:
        found = (31 * found + unit) & 0xFFFFFFFF
    return found & 0x7FFFFFFF


def in_order(channel: str) -> tuple[str, int]:
    """The key by which channels are sorted: partitions by their numbers."""
    topic, _, number = channel.partition(":")
    return topic, int(number or 0)


def _properties(headers: Headers) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        if value is None or name in found:
            raise InvalidRequest(f"Pulsar keeps a header once, with a value: correct {name!r}")
        found[name] = _text(f"the header {name!r}", value)
    return found


def _text(what: str, value: object) -> str:
    if not isinstance(value, bytes):
        raise InvalidRequest(f"{what} is bytes, not {type(value).__name__}: encode it first")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{what} is not UTF-8, and Pulsar's keys and properties are text") from None
