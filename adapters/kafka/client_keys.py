"""What `kafka.producer.*` and `kafka.consumer.*` mean here. The keys are librdkafka's, as in milvus.yaml, and Java's.

There is no such client inside, so a key is an option of ours in other words, or it says what is so anyway, or it is
ignored, which one warning tells by name. One that asks for what Tidewal does not promise to give up is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...runtime.errors import ConfigError
from ...runtime.settings import Kafka

KIB = 1024

_log = logging.getLogger(__name__)


class Keys(NamedTuple):
    """What the keys come to: options of `options.Options`, and keys `kafka.*` of the login in their place."""

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
# Values that say what is so; any other is refused, for the reason.
_GIVEN: Mapping[str, tuple[frozenset[str], str]] = {
    "acks": (frozenset({"all", "-1"}), "how many copies acknowledge is the policy of each channel"),
    "request.required.acks": (frozenset({"all", "-1"}), "how many copies acknowledge is the policy of each channel"),
    "enable.idempotence": (frozenset({"true"}), "an append is in the log once"),
    "transactional.id": (frozenset(), "appends need no transactions"),
    "enable.auto.commit": (frozenset({"false"}), "a position is saved when its work is done, not by the clock"),
    "isolation.level": (frozenset({"read_committed", "read_uncommitted"}), "it is one of these two"),
}


def keys_of(settings: Kafka) -> Keys:
    """Read the keys of both clients. Raises `ConfigError` for a value that cannot be, for one that contradicts a
    promise, and where the two say different things of what they share."""
    found = Keys({}, {})
    said: dict[str, str] = {}  # what each option or part of the login was set by
    ignored: list[str] = []
    for client, given in (("producer", settings.producer), ("consumer", settings.consumer)):
        for name, value in given.items():
            key = f"kafka.{client}.{name}"
            if not _take(found, said, client, key, name.replace("_", ".").lower(), value):
                ignored.append(key)
    if ignored:
        _log.warning("these keys of Kafka's clients mean nothing here and are ignored: %s", ", ".join(sorted(ignored)))
    return found


def _take(found: Keys, said: dict[str, str], client: str, key: str, name: str, value: str) -> bool:
    """Note what one key says; False when it says nothing."""
    if name in _GIVEN:
        fine, reason = _GIVEN[name]
        if value.lower() not in fine:
            raise ConfigError(f"{key}={value} cannot be: {reason}", key=key)
    elif name in _LOGIN:
        _set(found.login, said, _LOGIN[name], value, key)
    elif option := _OPTIONS[client].get(name) or _OPTIONS_OF_BOTH.get(name):
        try:
            meant = option[1](value)
        except ValueError:
            raise ConfigError(f"{key}={value} is no number", key=key) from None
        _set(found.options, said, option[0], meant, key)
    else:
        return False
    return True


def _set(into: dict[str, object] | dict[str, str], said: dict[str, str], name: str, value: object, key: str) -> None:
    values: dict[str, object] = into  # pyright: ignore[reportAssignmentType] -- the login's values are all text
    if values.setdefault(name, value) != value:
        raise ConfigError(f"{key} and {said[name]} say different things of the same", key=key)
    said.setdefault(name, key)
