"""The settings `kafka.*`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat, SecretStr

from ...runtime.config.section import RetainingSettings, SettingsSection


class KafkaSslSettings(SettingsSection):
    """TLS towards Kafka."""

    enabled: bool = Field(default=False, description="whether to use TLS")
    tls_cert: str = Field(default="", description="the client's certificate, a file")
    tls_key: str = Field(default="", description="the client's key, a file")
    tls_ca_cert: str = Field(default="", description="the certificates of trusted authorities, a file")
    tls_key_password: SecretStr = Field(default=SecretStr(""), description="password of the key")


class KafkaSettings(RetainingSettings):
    """Kafka. `consumer.*` and `producer.*` are keys of Kafka's own clients; see `client_keys.py`."""

    enabled_by: ClassVar[str] = "brokerList"
    ignored_keys: ClassVar[tuple[str, ...]] = ("queuedmaxkbytes",)

    broker_list: str = Field(default="", repr=False, description="host:port, comma separated; empty disables Kafka")
    sasl_username: str = Field(default="", description="user name")
    sasl_password: SecretStr = Field(default=SecretStr(""), description="password")
    sasl_mechanisms: str = Field(default="", description="PLAIN, SCRAM-SHA-256, …")
    security_protocol: str = Field(default="", description="SASL_SSL, SASL_PLAINTEXT, SSL, …")
    ssl: KafkaSslSettings = KafkaSslSettings()
    read_timeout: PositiveFloat = Field(default=10.0, description="no effect: a read waits without a limit")
    consumer: dict[str, str] = Field(default={}, repr=False, description="keys of Kafka's consumer, see backends.md")
    producer: dict[str, str] = Field(default={}, repr=False, description="keys of Kafka's producer, see backends.md")

    def url(self, directory: str = "") -> str:
        return f"kafka://{self.broker_list}" if self.broker_list else ""
