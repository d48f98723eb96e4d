"""What is told by a `pulsar://` URL and the options beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from ...runtime.errors import ConfigError
from .appending import PENDING_BYTES
from .client import Security

SERVICE_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
WEB_PORTS = {"pulsar": 8080, "pulsar+ssl": 8443}
PREFETCH_BYTES = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to reach Pulsar, and the named limits of one open log."""

    service_url: str
    web_url: str
    namespace: str = "public/default"
    request_timeout_s: float = REQUEST_TIMEOUT_S  # an append or call that has no answer then has failed
    pending_bytes: int = PENDING_BYTES  # appended and not answered; more is refused (`Overloaded`)
    prefetch_bytes: int = PREFETCH_BYTES  # that the client library holds for one reader
    listener: str = ""  # the broker's name for the addresses to connect to, where it advertises several
    client_log: str = ""  # file for what the client library logs
    security: Security = field(default_factory=Security)


def parse(url: str, given: Mapping[str, object]) -> Options:
    """`pulsar://HOST[:PORT][,HOST…][/TENANT/NAMESPACE][?web_url=…&token=…]`; any option may also be given beside the
    URL, and wins. The web service is looked for at the first host, port 8080 (8443 with pulsar+ssl)."""
    parts = urlsplit(url)
    if parts.scheme not in SERVICE_PORTS or not parts.netloc:
        raise ConfigError(f"{url!r} is no pulsar://HOST:PORT/TENANT/NAMESPACE", key="wal")
    options = {**dict(parse_qsl(parts.query)), **{name: str(value) for name, value in given.items()}}
    namespace = parts.path.strip("/") or f"{options.pop('tenant', 'public')}/{options.pop('namespace', 'default')}"
    if namespace.count("/") != 1 or namespace.startswith("/") or namespace.endswith("/"):
        raise ConfigError(f"{url!r} must name tenant and namespace, or neither", key="wal")
    host = parts.netloc.split(",")[0].rpartition("@")[2]
    bare_host = host if host.endswith("]") else host.rpartition(":")[0] or host
    web_scheme = "https" if parts.scheme == "pulsar+ssl" else "http"
    defaults = Options("", "")
    try:
        found = Options(
            service_url=f"{parts.scheme}://{parts.netloc}",
            web_url=options.pop("web_url", f"{web_scheme}://{bare_host}:{WEB_PORTS[parts.scheme]}"),
            namespace=namespace,
            request_timeout_s=float(options.pop("request_timeout_s", defaults.request_timeout_s)),
            pending_bytes=int(options.pop("pending_bytes", defaults.pending_bytes)),
            prefetch_bytes=int(options.pop("prefetch_bytes", defaults.prefetch_bytes)),
            listener=options.pop("listener", ""),
            client_log=options.pop("client_log", ""),
            security=Security(
                token=options.pop("token", ""),
                trusted_certificates=options.pop("trusted_certificates", ""),
                certificate=options.pop("certificate", ""),
                key=options.pop("key", ""),
                validate_hostname=options.pop("validate_hostname", "true").lower() != "false",
            ),
        )
    except ValueError as error:
        raise ConfigError(f"an option of {parts.scheme}:// is no number: {error}", key="wal") from error
    if options:
        raise ConfigError(f"pulsar:// knows no option {', '.join(sorted(options))}", key="wal")
    if min(found.request_timeout_s, found.pending_bytes, found.prefetch_bytes) <= 0:
        raise ConfigError("request_timeout_s, pending_bytes and prefetch_bytes must be above 0", key="wal")
    return found
