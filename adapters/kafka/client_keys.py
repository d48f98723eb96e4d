"""The settings `kafka.producer.*` and `kafka.consumer.*`. The keys are librdkafka's, as in milvus.yaml, and Java's.

The adapter uses neither client. So a key sets an option of the adapter, or states what holds anyway, or is ignored,
with one warning that names all ignored keys. A key that contradicts a guarantee of Tidewal is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...runtime.errors import ConfigError
from .settings import KafkaSettings

KIB = 1024

_log = logging.getLogger(__name__)


class Keys(NamedTuple):
    """The result: options of `options.KafkaOptions`, and login settings `kafka.*` that replace those given."""

    options: dict[str, object]
    login: dict[str, str]


def _as_it_is(value: str) -> object:
    return value


def _seconds(value: str) -> object:
    return int(value) / 1000


def _number(value: str) -> object:
    return int(value)


def _kibibytes(value: str) -> object:
    return int(value) * KIB


_OPTIONS: Mapping[str, Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "producer": {
        "batch.size": ("batch_bytes", _number),
        "buffer.memory": ("pending_bytes", _number),
        "queue.buffering.max.kbytes": ("pending_bytes", _kibibytes),
        "compression.codec": ("compression", _as_it_is),
        "compression.type": ("compression", _as_it_is),
        "delivery.timeout.ms": ("delivery_timeout_s", _seconds),
        "message.timeout.ms": ("delivery_timeout_s", _seconds),
        "max.request.size": ("max_message_bytes", _number),
        "message.max.bytes": ("max_message_bytes", _number),
    },
    "consumer": {
        "fetch.max.bytes": ("fetch_bytes", _number),
        "fetch.message.max.bytes": ("fetch_bytes", _number),
        "max.partition.fetch.bytes": ("fetch_bytes", _number),
        "queued.max.messages.kbytes": ("prefetch_bytes", _kibibytes),
    },
}
_OPTIONS_OF_BOTH: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "client.id": ("client_id", _as_it_is),
    "request.timeout.ms": ("request_timeout_s", _seconds),
}
_LOGIN = {
    "security.protocol": "securityProtocol",
    "sasl.mechanism": "saslMechanisms",
    "sasl.mechanisms": "saslMechanisms",
    "sasl.username": "saslUsername",
    "sasl.password": "saslPassword",
    "ssl.ca.location": "ssl.tlsCaCert",
    "ssl.certificate.location": "ssl.tlsCert",
    "ssl.key.location": "ssl.tlsKey",
    "ssl.key.password": "ssl.tlsKeyPassword",
}
# Keys whose value is fixed: these values are accepted, any other is refused with the reason.
_GIVEN: Mapping[str, tuple[frozenset[str], str]] = {
    "acks": (frozenset({"all", "-1"}), "how many copies acknowledge is the policy of each channel"),
    "request.required.acks": (frozenset({"all", "-1"}), "how many copies acknowledge is the policy of each channel"),
    "enable.idempotence": (frozenset({"true"}), "an append is in the log once"),
    "transactional.id": (frozenset(), "appends need no transactions"),
    "enable.auto.commit": (frozenset({"false"}), "a position is saved when its work is done, not by the clock"),
    "isolation.level": (frozenset({"read_committed", "read_uncommitted"}), "it is one of these two"),
}


def keys_of(settings: KafkaSettings) -> Keys:
    """Read the keys of both clients in `settings`. Raises `ConfigError` for an invalid value, for one that contradicts
    a guarantee, and where producer and consumer keys set the same option differently."""
    found = Keys({}, {})
    set_by: dict[str, str] = {}  # by option or login setting, the key that set it
    ignored: list[str] = []
    for client, given in (("producer", settings.producer), ("consumer", settings.consumer)):
        for name, value in given.items():
            key = f"kafka.{client}.{name}"
            if not _take(found, set_by, client, key, name.replace("_", ".").lower(), value):
                ignored.append(key)
    if ignored:
        _log.warning(
            "these keys of Kafka's clients have no effect here and are ignored: %s", ", ".join(sorted(ignored))
        )
    return found


def _take(found: Keys, set_by: dict[str, str], client: str, key: str, name: str, value: str) -> bool:
    """Apply one key. Returns False for a key that is ignored."""
    if name in _GIVEN:
        fine, reason = _GIVEN[name]
        if value.lower() not in fine:
            raise ConfigError(f"{key}={value} cannot be: {reason}", key=key)
    elif name in _LOGIN:
        _set(found.login, set_by, _LOGIN[name], value, key)
    elif option := _OPTIONS[client].get(name) or _OPTIONS_OF_BOTH.get(name):
        try:
            meant = option[1](value)
        except ValueError:
            raise ConfigError(f"{key}={value} is not a number", key=key) from None
        _set(found.options, set_by, option[0], meant, key)
    else:
        return False
    return True


def _set(into: dict[str, object] | dict[str, str], set_by: dict[str, str], name: str, value: object, key: str) -> None:
    values: dict[str, object] = into  # pyright: ignore[reportAssignmentType] -- the login's values are all text
    if values.setdefault(name, value) != value:
        raise ConfigError(f"{key} and {set_by[name]} set the same option to different values", key=key)
    set_by.setdefault(name, key)
