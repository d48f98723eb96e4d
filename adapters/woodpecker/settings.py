"""The settings `woodpecker.*`."""

from __future__ import annotations

import os
from typing import ClassVar, Literal
from urllib.parse import quote

from pydantic import Field

from ...runtime.config.section import BackendSettings, SettingsSection
from ...runtime.errors import ConfigError


class WoodpeckerMetaSettings(SettingsSection):
    """Where Woodpecker keeps its metadata."""

    type: str = Field(default="etcd", description="empty disables Woodpecker")
    prefix: str = Field(
        default="woodpecker", description="prefix of its keys in etcd; logs that share one need their own"
    )


class WoodpeckerStorageSettings(SettingsSection):
    """Where Woodpecker keeps its segments."""

    type: Literal["minio", "local", "service"] = Field(
        default="minio", description="minio (any S3) or local (one machine); service is not served by the sidecar"
    )
    root_path: str = Field(default="default", description="folder of local storage")
    force_local_storage: bool = Field(default=False, description="permit local storage in a cluster")


class WoodpeckerSidecarSettings(SettingsSection):
    """The program through which Tidewal uses Woodpecker."""

    directory: str = Field(
        default="tidewal-data/woodpecker", description="folder of the sidecar's socket, the log's URL"
    )
    binary: str = Field(default="", description="the program, started where none runs; empty: it is started by others")
    config: str = Field(
        default="", description="a file in Woodpecker's format with what is not said here: etcd, the object store"
    )


class WoodpeckerSettings(BackendSettings):
    """Woodpecker."""

    enabled_by: ClassVar[str] = "meta.type"
    ignored_keys: ClassVar[tuple[str, ...]] = ("client.*", "logstore.*")

    meta: WoodpeckerMetaSettings = WoodpeckerMetaSettings()
    storage: WoodpeckerStorageSettings = WoodpeckerStorageSettings()
    sidecar: WoodpeckerSidecarSettings = WoodpeckerSidecarSettings()

    def url(self, directory: str = "") -> str:
        return f"woodpecker://{quote(os.path.abspath(self.sidecar.directory))}" if self.meta.type else ""

    def check_cluster(self) -> None:
        if self.storage.type == "local" and not self.storage.force_local_storage:
            raise ConfigError(
                "woodpecker.storage.type=local is one machine's disk: a cluster needs minio, "
                "or woodpecker.storage.forceLocalStorage=true where the disk is shared",
                key="woodpecker.storage.type",
            )
