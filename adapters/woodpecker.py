"""Woodpecker, whose adapter is not there yet: its settings are understood; opening says so."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..runtime.config.section import BackendSettings, SettingsSection
from ..runtime.errors import ConfigError
from ..runtime.log.backend import WalBackend


class WoodpeckerMetaSettings(SettingsSection):
    """Where Woodpecker keeps its metadata."""

    type: str = Field(default="etcd", description="empty disables Woodpecker")
    prefix: str = Field(default="woodpecker", description="for the Woodpecker adapter: prefix of its keys")


class WoodpeckerStorageSettings(SettingsSection):
    """Where Woodpecker keeps its segments."""

    type: Literal["minio", "local", "service"] = Field(
        default="minio", description="for the Woodpecker adapter: minio, local (one machine) or service"
    )
    root_path: str = Field(default="default", description="for the Woodpecker adapter: folder in the storage")
    force_local_storage: bool = Field(default=False, description="permit local storage in a cluster")


class WoodpeckerSettings(BackendSettings):
    """Woodpecker."""

    enabled_by: ClassVar[str] = "meta.type"
    ignored_keys: ClassVar[tuple[str, ...]] = ("client.*", "logstore.*")

    meta: WoodpeckerMetaSettings = WoodpeckerMetaSettings()
    storage: WoodpeckerStorageSettings = WoodpeckerStorageSettings()

    def url(self, directory: str = "") -> str:
        return "woodpecker://" if self.meta.type else ""

    def check_cluster(self) -> None:
        if self.storage.type == "local" and not self.storage.force_local_storage:
            raise ConfigError(
                "woodpecker.storage.type=local is one machine's disk: a cluster needs minio or service, "
                "or woodpecker.storage.forceLocalStorage=true where the disk is shared",
                key="woodpecker.storage.type",
            )


class WoodpeckerBackend(WalBackend):
    """Announced only: it opens no URL."""

    name = "woodpecker"
    schemes: tuple[str, ...] = ()
    url_form = "woodpecker://"

    def settings(self) -> type[WoodpeckerSettings]:
        return WoodpeckerSettings


BACKEND = WoodpeckerBackend()
