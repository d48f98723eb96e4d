"""Object storage as a backend: what is known of it before the library for buckets is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote

from ...runtime.errors import ConfigError
from ...runtime.log.backend import Check, WalBackend
from ...runtime.log.redaction import shown_url, split_url
from ...runtime.log.wal import Capabilities, Wal

if TYPE_CHECKING:
    from ...runtime.config.settings import ClusterSettings
    from ...runtime.metrics.metric import Metric
    from .settings import ObjectsSettings
    from .store import ObjectStore

CAPABILITIES: Final = Capabilities(
    atomic_batches=True,
    seek_by_time=True,
    truncate=True,
    multi_process_write=False,
    one_node=True,
    groups=True,
    individual_acks=True,
    atomic_commits=True,
    costly_appends=True,
)
LINKED: Final = replace(CAPABILITIES, multi_process_write=True, one_node=False)  # with a secret of the cluster
NOT_ATOMIC: Final = {"aliyuncs.com": "Alibaba's OSS"}  # endpoints of stores that overwrite what is there
OPTIONS: Final[tuple[str, ...]] = ("endpoint", "region")  # of a URL, for a bucket


class ObjectsBackend(WalBackend):
    """A log in a bucket, or in a directory that machines may share."""

    name = "objects"
    schemes: tuple[str, ...] = ("s3", "gs", "az", "file")
    url_form = "s3://bucket/prefix"

    async def open(
        self,
        url: str,
        *,
        own: bool | None = None,
        read_only: bool = False,
        serve: bool = True,
        in_use_only: bool = True,
        settings: ObjectsSettings | None = None,
        cluster: ClusterSettings | None = None,
        **options: Any,
    ) -> Wal:
        """Open `s3://bucket/prefix` (`gs://`, `az://account/container/prefix`) or `file:///absolute/directory`. Opening
        changes nothing: the first call that writes makes the log, and this process its owner, where no other one is.
        With the secret of `cluster` it writes through that one. With `own` True opening does so, and once this process
        has owned the log, and then another one has, all that writes raises `Fenced`; with False, and a secret, it never
        owns the log. With `serve` False it has no links to others, and with `in_use_only` False it may
        come to own the log also while that is migrated: the caller looks at that itself. A URL of a bucket may have
        `?endpoint=…&region=…`, else these come from the environment, as credentials always do."""
        from .link.access import link_access
        from .settings import DIRECTORY_LINGER_MS, ObjectsSettings
        from .wal import ObjectWal

        if own and read_only:
            raise ConfigError("own=True and read_only=True contradict each other: a reader owns nothing", key="wal")
        settings = settings or ObjectsSettings()
        if split_url(url).scheme == "file":
            linger_ms = DIRECTORY_LINGER_MS if settings.linger_ms < 0 else settings.linger_ms
            settings = settings.model_copy(update={"linger_ms": linger_ms, "hedge_share": 0.0})
        tried = "endpoint" in _bucket_options(url)  # the stores of S3, Google and Azure are known
        options |= {"access": link_access(settings, cluster) if serve else None, "may_own": own is not False}
        options |= {"in_use_only": in_use_only}
        wal = ObjectWal(shown_url(url), self.store(url), settings, try_store=tried, **options)
        await wal.open(must_be=read_only, own=bool(own))
        return wal

    def store(self, url: str) -> ObjectStore:
        """The store at `url`, without a look at it. Raises `ConfigError` for a URL of another form."""
        self.check_url(url)
        parts = split_url(url)
        if parts.scheme == "file":
            from .directory_store import DirectoryStore

            return DirectoryStore(os.path.abspath(parts.netloc + unquote(parts.path)))
        from .bucket_store import BucketStore

        return BucketStore(parts._replace(query="").geturl(), _bucket_options(url))

    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def checks(self, path: Path) -> Iterable[Check]:
        from ...runtime.config.fitting import COSTLY_APPENDS

        lease_s, bound_s = (
            COSTLY_APPENDS["cluster"]["lease_ms"] / 1000,
            COSTLY_APPENDS["common"]["graceful_time"] / 1000,
        )
        found = f"there nodes have leases of {lease_s:g} s, and `bounded` reads accept {bound_s:g} s of staleness"
        return (Check("logs on object storage", "ok", found),)

    def metrics(self) -> Sequence[Metric]:
        from .metric_rows import METRICS

        return METRICS

    def settings(self) -> type[ObjectsSettings]:
        from .settings import ObjectsSettings

        return ObjectsSettings

    def check_url(self, url: str) -> None:
        parts = split_url(url)
        if parts.scheme == "file":
            if parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
                raise ConfigError(f"{shown_url(url)!r}: write file:///absolute/directory", key="wal")
            return
        unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in OPTIONS]
        if not parts.hostname or not parts.path.strip("/") or parts.username is not None or unknown:
            raise ConfigError(
                f"{shown_url(url)!r}: write {self.url_form}, with {' and '.join(OPTIONS)} as its only options",
                key="wal",
            )
        endpoint = _bucket_options(url).get("endpoint", "")
        for domain, store in NOT_ATOMIC.items():
            if (split_url(endpoint).hostname or "").endswith(domain):
                raise ConfigError(f"{store} does not create objects atomically (If-None-Match: *)", key="wal")

    def absolute_url(self, url: str) -> str:
        parts = split_url(url)
        if parts.scheme == "file" and parts.netloc:
            return f"file://{os.path.abspath(parts.netloc + parts.path)}"
        return url


def _bucket_options(url: str) -> dict[str, str]:
    """The options of a URL; the endpoint of S3 is, where it has none, the one that the store's other tools use."""
    parts = split_url(url)
    named = os.environ.get("AWS_ENDPOINT_URL", "") if parts.scheme == "s3" else ""
    return ({"endpoint": named} if named else {}) | dict(parse_qsl(parts.query))


BACKEND = ObjectsBackend()
