"""The settings `pulsar.*`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from ...runtime.config.section import RetainingSettings

MIB = 1024 * 1024


class PulsarSettings(RetainingSettings):
    """Pulsar."""

    enabled_by: ClassVar[str] = "address"
    ignored_keys: ClassVar[tuple[str, ...]] = ("enableClientMetrics", "backlogAutoClearBytes", "producerAccessMode")

    address: str = Field(
        default="localhost", repr=False, description="broker's host, or a pulsar:// URL; empty disables Pulsar"
    )
    port: int = Field(default=6650, ge=1, le=65535, description="broker's port")
    webport: int = Field(
        default=80, ge=1, le=65535, description="port of the admin API where it is set, else 8080, or 8443 with TLS"
    )
    webaddress: str = Field(default="", repr=False, description="URL of the admin API, over webport")
    max_message_size: PositiveInt = Field(
        default=2 * MIB, description="bytes of a message where it is set, else the broker's limit"
    )
    tenant: str = Field(default="public", description="tenant of the topics, unless a URL names it")
    namespace: str = Field(default="default", description="namespace of the topics, unless a URL names it")
    auth_plugin: str = Field(default="", description="how the client authenticates: empty, or token")
    auth_params: SecretStr = Field(default=SecretStr(""), description="credentials: the token")
    request_timeout: PositiveFloat = Field(default=60.0, description="s that an append or a call waits for the broker")

    def url(self, directory: str = "") -> str:
        if not self.address or "://" in self.address:
            return self.address
        return f"pulsar://{self.address}:{self.port}"
