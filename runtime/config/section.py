"""What sections of the settings are made of: those of Tidewal in `settings.py`, and that of each backend."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class SettingsSection(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class BackendSettings(SettingsSection):
    """The section of a backend. Its keys begin with the name of the backend; those of a derived class are its own."""

    enabled_by: ClassVar[str]
    """The key of the section without which `url` is empty."""

    embedded: ClassVar[bool] = False
    """Whether the log lies in a directory of one machine, and so is none for a cluster."""

    linked: ClassVar[bool] = False
    """Whether processes that use the log connect to each other: then `WalBackend.open` gets the section `cluster`, too,
    as the option of that name."""

    ignored_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that a milvus.yaml may have in this section and that mean nothing here; `*` stands for anything."""

    def url(self, directory: str = "") -> str:
        """The URL of the log that the settings name, empty where they name none. An embedded log lies in `directory`
        where that is given."""
        return ""

    def directory(self) -> str:
        """Where an embedded log lies; empty for another one, and where the settings name none."""
        return ""

    def open_options(self) -> dict[str, Any]:
        """What `WalBackend.open` is given beside the URL and `metrics`."""
        return {"settings": self}

    def check_cluster(self) -> None:
        """Raise `ConfigError` where these settings suit one machine only."""


class RetainingSettings(BackendSettings):
    """With keys that say how long the log keeps the entries of the data channels that a node creates on it."""

    retention_time_in_minutes: int = Field(
        default=20160,
        description="two weeks, fixed when a channel is made; negative keeps all (differs from Milvus)",
    )
    retention_size_in_mb: int = Field(
        default=8192,
        alias="retentionSizeInMB",
        description="size kept of each channel, MiB, fixed when it is made; negative keeps all",
    )
