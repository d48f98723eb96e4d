"""The options of a `kafka://…` URL and of the settings `kafka.*`, validated."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from aiokafka import codec as codecs

from ...runtime.errors import ConfigError
from ...runtime.log.redaction import shown_url
from .client_keys import keys_of
from .settings import KafkaSettings

PREFIX = "tidewal"
MIB = 1024 * 1024
CONNECT_TIMEOUT_S = 7.0
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}  # as batches name them

_NO_OPTIONS = ("bootstrap", "prefix", "client")
_ANY_NUMBER = ("replication_factor", "min_insync_replicas", "max_message_bytes")

_SERVER = re.compile(r"([^:@\[\]]+|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?")
_PREFIX = re.compile(r"[A-Za-z0-9-]{1,40}")


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """How to reach the brokers, and the limits. All but the first two can be query parameters of the URL."""

    bootstrap: str
    prefix: str = PREFIX
    replication_factor: int = -1  # copies of each topic; -1: as the brokers' own settings say
    min_insync_replicas: int = 0  # copies that acks=all waits for; 0: as the brokers' own settings say
    request_timeout_s: float = 5.0  # how long one request may take
    connect_timeout_s: float = CONNECT_TIMEOUT_S  # how long opening the log waits for a first broker
    delivery_timeout_s: float = 30.0  # how long an append, or any other call, may take with all attempts
    pending_bytes: int = 64 * MIB  # of appends that are not answered; over it `submit` raises `Overloaded`
    batch_bytes: int = MIB // 2  # of one append request; this size stays in a processor's cache while it is encoded
    fetch_bytes: int = 2 * MIB  # of one fetch request
    prefetch_bytes: int = 4 * MIB  # that a reader holds before it stops fetching
    max_message_bytes: int = 0  # of one message, where the brokers take less than a channel's policy; 0: the policy's
    compression: str = "none"  # of batches: none, gzip, snappy, lz4 or zstd
    topics: str = "own"  # "foreign": the channels are the partitions of topics that others made
    client_id: str = "tidewal"  # as brokers log it, and count it for quotas
    client: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)  # security, handed to the client

    @property
    def foreign(self) -> bool:
        """Whether the channels are the partitions of topics that others made."""
        return self.topics == "foreign"

    def group_id(self, group: str) -> str:
        """A group's name in Kafka, where the groups of all logs are in one namespace. Groups on topics of others bear
        their own name, as other programs expect."""
        return group if self.foreign else f"{self.prefix}.{group}"

    @property
    def largest_batch_bytes(self) -> int:
        """The largest batch of several messages, in bytes, whatever the channel's limit of one message."""
        return self.batch_bytes + OVERHEAD_BYTES

    def largest_message(self, of_policy: int) -> int:
        """The largest message, in bytes, of a channel whose policy allows `of_policy`."""
        return min(of_policy, self.max_message_bytes or of_policy)


OVERHEAD_BYTES = 64 * 1024  # what Kafka counts besides the payloads of a batch, at most


def parse(url: str, settings: KafkaSettings | None = None, **given: object) -> KafkaOptions:
    """Read `kafka://host:port[,host:port…][/PREFIX][?option=value]`. `given` options win over the URL's, which win over
    the settings. Raises `ConfigError`."""
    parts, shown = urlsplit(url), shown_url(url)
    bootstrap = parts.netloc or (settings.broker_list if settings else "")
    prefix = parts.path.strip("/") or PREFIX
    given = {**dict(parse_qsl(parts.query)), **given}
    if given.get("topics") == "foreign" and parts.path.strip("/"):
        raise ConfigError(f"{shown!r}: topics of others have no prefix, leave it out", key="wal")
    if not bootstrap or not all(map(_SERVER.fullmatch, bootstrap.split(","))):
        raise ConfigError(f"{shown!r}: write kafka://host:port,host:port/PREFIX; settings kafka.* log in", key="wal")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"{shown!r}: the prefix of the topics is 1-40 characters of A-Z a-z 0-9 -", key="wal")
    keys = keys_of(settings or KafkaSettings())
    login = _with(settings or KafkaSettings(), keys.login)
    options = KafkaOptions(bootstrap, prefix, client=_security(login) if settings else {})
    return replace(options, **_checked({**keys.options, **given}))


def _with(settings: KafkaSettings, login: Mapping[str, str]) -> KafkaSettings:
    """The settings, with the keys of `login` replaced."""
    if not login:
        return settings
    values = settings.model_dump(by_alias=True)
    for key, value in login.items():
        branch: dict[str, Any] = values
        *sections, last = key.split(".")
        for section in sections:
            branch = branch[section]
        branch[last] = value
    return KafkaSettings.model_validate(values)


def _checked(given: Mapping[str, object]) -> dict[str, Any]:
    kinds: dict[str, type] = {
        each.name: type(each.default) for each in fields(KafkaOptions) if each.name not in _NO_OPTIONS
    }
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"kafka:// has no option {name!r}; there are {', '.join(sorted(kinds))}", key="wal")
        try:
            found[name] = kinds[name](str(value))
        except ValueError:
            raise ConfigError(f"kafka:// option {name}={value!r} is not a number", key="wal") from None
        if kinds[name] is not str and name not in _ANY_NUMBER and found[name] <= 0:
            raise ConfigError(f"kafka:// option {name}={value!r} must be above 0", key="wal")
    if found.get("replication_factor", -1) < -1 or found.get("replication_factor") == 0:
        raise ConfigError("kafka:// option replication_factor must be above 0, or -1", key="wal")
    if found.get("topics", "own") not in ("own", "foreign"):
        raise ConfigError(f"kafka:// option topics={found['topics']!r}; there are own and foreign", key="wal")
    codec = str(found.get("compression", "none"))
    if codec not in CODECS:
        raise ConfigError(f"kafka:// option compression={codec!r}; there are {', '.join(CODECS)}", key="wal")
    if not _available(codec):
        raise ConfigError(f"compression={codec} needs the package cramjam: pip install 'aiokafka[{codec}]'", key="wal")
    return found


def _available(codec: str) -> bool:
    return codec == "none" or bool(getattr(codecs, f"has_{codec}")())


def _security(settings: KafkaSettings) -> dict[str, Any]:
    protocol = settings.security_protocol or ("SSL" if settings.ssl.enabled else "PLAINTEXT")
    found: dict[str, Any] = {"security_protocol": protocol}
    if protocol.startswith("SASL"):
        found |= {
            "sasl_mechanism": settings.sasl_mechanisms or "PLAIN",
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": settings.sasl_password.get_secret_value(),
        }
    if protocol.endswith("SSL"):
        found["ssl_context"] = _ssl_context(settings)
    return found


def _ssl_context(settings: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl.tls_ca_cert or None)
        if settings.ssl.tls_cert:
            password = settings.ssl.tls_key_password.get_secret_value()
            context.load_cert_chain(settings.ssl.tls_cert, settings.ssl.tls_key or None, password or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"kafka.ssl: the certificates cannot be used: {error}", key="kafka.ssl") from error
    return context
