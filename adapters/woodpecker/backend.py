"""Woodpecker as a backend: what is known of it before a log is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from ...runtime.errors import ConfigError
from ...runtime.log.backend import WalBackend
from ...runtime.log.redaction import shown_url, split_url
from ...runtime.log.wal import Capabilities, Wal

if TYPE_CHECKING:
    from ...runtime.metrics.metrics import Metrics
    from .settings import WoodpeckerSettings

FAILOVER_S = 30.0  # how long calls wait for a sidecar


class WoodpeckerBackend(WalBackend):
    """A log of Woodpecker, owned by a sidecar and shared by the processes of its machine."""

    name = "woodpecker"
    schemes: tuple[str, ...] = ("woodpecker",)
    url_form = "woodpecker:///absolute/path"

    async def open(
        self,
        url: str,
        *,
        own: bool | None = None,
        read_only: bool = False,
        settings: WoodpeckerSettings | None = None,
        metrics: Metrics | None = None,
        failover_s: float = FAILOVER_S,
        **options: Any,
    ) -> Wal:
        """Open `woodpecker:///absolute/path` or `woodpecker://./relative/path`: the folder with the sidecar's socket.

        Where no sidecar answers there, and `woodpecker.sidecar.binary` of `settings` names the program, this process
        starts one, and ends it with the log; not with `own` False or `read_only`. `failover_s` (seconds) is how long
        calls wait for a sidecar that answers before they raise `Unavailable`; with 0 they try once. `options`
        are those of `WoodpeckerWal.connect`; `metrics` are not used.
        """
        from .sidecar_process import SidecarProcess
        from .wal import WoodpeckerWal

        directory = directory_of(url)
        if settings is not None and settings.storage.type == "service":
            raise ConfigError(
                "woodpecker.storage.type=service, a cluster of log stores, is not served by the sidecar: "
                "set minio (any S3) or local",
                key="woodpecker.storage.type",
            )
        process = None
        if settings is not None and settings.sidecar.binary and own is not False and not read_only:
            process = SidecarProcess(directory, settings)
        return await WoodpeckerWal.connect(directory, process, failover_s=0.0 if read_only else failover_s, **options)

    def settings(self) -> type[WoodpeckerSettings]:
        from .settings import WoodpeckerSettings

        return WoodpeckerSettings

    def capabilities(self) -> Capabilities:
        from .wal import CAPABILITIES

        return CAPABILITIES

    def check_url(self, url: str) -> None:
        directory_of(url)

    def absolute_url(self, url: str) -> str:
        return f"{self.name}://{quote(directory_of(url))}"

    def advice(self, url: str) -> str:
        return (
            "Woodpecker is reached through its sidecar: start it (sidecars/woodpecker/README.md), or set "
            "woodpecker.sidecar.binary"
        )


def directory_of(url: str) -> str:
    """The absolute path of the folder that a URL names. Raises `ConfigError`."""
    parts = split_url(url)
    if parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"{shown_url(url)!r}: write {BACKEND.url_form} or woodpecker://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


BACKEND = WoodpeckerBackend()
