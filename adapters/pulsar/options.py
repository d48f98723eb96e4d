"""The options of a `pulsar://` URL, with settings and keyword options, validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ...runtime.errors import ConfigError
from ...runtime.log.redaction import shown_url
from .appending import PENDING_BYTES
from .client import Security
from .settings import PulsarSettings

SERVICE_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
WEB_PORTS = {"pulsar": 8080, "pulsar+ssl": 8443}
PREFETCH_BYTES = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 7.0
NAMESPACE = "public/default"

_NAMESPACE = re.compile(r"[^/]+/[^/]+")


@dataclass(frozen=True, slots=True)
class PulsarOptions:
    """How to reach Pulsar, and the named limits of one open log."""

    service_url: str
    web_url: str = field(repr=False)  # may contain credentials
    namespace: str = NAMESPACE
    request_timeout_s: float = REQUEST_TIMEOUT_S  # an append or call without an answer then has failed
    connect_timeout_s: float = CONNECT_TIMEOUT_S  # how long opening the log waits for a first answer
    pending_bytes: int = PENDING_BYTES  # appended and not answered; more is refused (`Overloaded`)
    prefetch_bytes: int = PREFETCH_BYTES  # that the client library holds for one reader
    max_message_bytes: int = 0  # of one message, to be less than the brokers allow; 0: the brokers' limit
    topics: str = "own"  # "foreign": the channels are the topics that others made in the namespace
    listener: str = ""  # the broker's name for the addresses to connect to, where it advertises several
    client_log: str = ""  # file for what the client library logs
    security: Security = field(default_factory=Security)

    @property
    def foreign(self) -> bool:
        """Whether the channels are the topics that others made."""
        return self.topics == "foreign"


def parse(url: str, settings: PulsarSettings | None = None, **given: object) -> PulsarOptions:
    """Read `pulsar://HOST[:PORT][,HOST…][/TENANT/NAMESPACE][?option=value]`. `given` options win over the URL's, which
    win over the settings. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.scheme not in SERVICE_PORTS or not parts.hostname:
        raise ConfigError(f"{shown_url(url)!r}: write pulsar://HOST:PORT/TENANT/NAMESPACE", key="wal")
    if "@" in parts.netloc:
        raise ConfigError(f"{shown_url(url)!r}: Pulsar's URLs name no user; option token logs in", key="wal")
    secure = parts.scheme == "pulsar+ssl"
    namespace = parts.path.strip("/") or (f"{settings.tenant}/{settings.namespace}" if settings else NAMESPACE)
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(f"{shown_url(url)!r}: name tenant and namespace, or neither", key="wal")
    host = parts.netloc.split(",")[0]
    host = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
    web_url = f"{'https' if secure else 'http'}://{host}:{WEB_PORTS[parts.scheme]}"
    defaults: dict[str, object] = {"web_url": web_url}
    if settings is not None:
        defaults |= _from_settings(settings, "https" if secure else "http", host)
    values = _checked({**defaults, **dict(parse_qsl(parts.query)), **given})
    if "@" in values["web_url"]:
        where = shown_url(values["web_url"])
        raise ConfigError(f"{where!r}: the admin API takes no user; option token logs in", key="pulsar.webaddress")
    security = Security(**{each.name: values.pop(each.name) for each in fields(Security) if each.name in values})
    return PulsarOptions(
        service_url=f"{parts.scheme}://{parts.netloc}", namespace=namespace, security=security, **values
    )


def _from_settings(settings: PulsarSettings, web_scheme: str, host: str) -> dict[str, object]:
    found: dict[str, object] = {"request_timeout_s": settings.request_timeout}
    if "max_message_size" in settings.model_fields_set:  # Milvus' default is below Tidewal's
        found["max_message_bytes"] = settings.max_message_size
    if settings.webaddress:
        address = settings.webaddress
        found["web_url"] = address if "://" in address else f"{web_scheme}://{address}"
    elif "webport" in settings.model_fields_set:
        found["web_url"] = f"{web_scheme}://{host}:{settings.webport}"
    if settings.auth_plugin:
        if not settings.auth_plugin.lower().endswith("token"):
            raise ConfigError(
                f"pulsar.authPlugin={settings.auth_plugin!r}: there is only token", key="pulsar.authPlugin"
            )
        found["token"] = settings.auth_params.get_secret_value().removeprefix("token:")
    return found


def _checked(given: Mapping[str, object]) -> dict[str, Any]:
    kinds: dict[str, type] = {each.name: type(each.default) for each in (*fields(PulsarOptions), *fields(Security))}
    kinds["web_url"] = str
    del kinds["service_url"], kinds["namespace"], kinds["security"]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"pulsar:// has no option {name!r}; there are {', '.join(sorted(kinds))}", key="wal")
        try:
            found[name] = str(value).lower() == "true" if kinds[name] is bool else kinds[name](str(value))
        except ValueError:
            raise ConfigError(f"pulsar:// option {name}={value!r} is not a number", key="wal") from None
        if name == "topics" and found[name] not in ("own", "foreign"):
            raise ConfigError(f"pulsar:// option topics={value!r}; there are own and foreign", key="wal")
        if kinds[name] in (int, float) and found[name] <= 0 and name != "max_message_bytes":
            raise ConfigError(f"pulsar:// option {name}={value!r} must be above 0", key="wal")
    return found
