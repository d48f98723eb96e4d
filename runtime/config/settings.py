"""Every setting of Tidewal, with its default; `loading.py` fills them from file, environment and arguments.

Keys are those of milvus.yaml, in camelCase (`mq.mqBufSize`); the attributes are the same words in snake_case
(`settings.mq.mq_buf_size`). Defaults are Milvus' unless the description says otherwise. Everything is frozen.
Secrets are `SecretStr`, and `repr` leaves out values that may hold one (URLs, keys of Kafka's clients).
"""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
)
from pydantic.alias_generators import to_camel

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MqType = Literal["default", "rocksmq", "pulsar", "kafka", "woodpecker"]


class SettingsSection(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class MqSettings(SettingsSection):
    """The choice of the log, and how much of it is buffered."""

    type: MqType = Field(default="default", description="the log's backend; `default` takes the first that is enabled")
    mq_buf_size: PositiveInt = Field(default=16, description="packs of 4 MiB that a stream buffers")
    enable_pursuit_mode: bool = Field(
        default=False, description="join small packs of time-ticked streams that are far behind (differs from Milvus)"
    )
    pursuit_lag: PositiveFloat = Field(default=10.0, description="seconds behind the wall clock that are far")
    pursuit_buffer_size: PositiveInt = Field(default=8 * MIB, description="bytes buffered at which packs end, then")
    pursuit_buffer_time: PositiveFloat = Field(default=60.0, description="seconds after which packs end, then")


class RetainingSettings(SettingsSection):
    """How long a log keeps the entries of the data channels that a node creates on it."""

    retention_time_in_minutes: int = Field(
        default=20160, description="two weeks; negative keeps all (differs from Milvus)"
    )
    retention_size_in_mb: int = Field(
        default=8192, alias="retentionSizeInMB", description="size kept of each channel, MiB; negative keeps all"
    )


class RocksMqSettings(RetainingSettings):
    """The embedded log."""

    path: str = Field(
        default="tidewal-data/rocksmq", description="directory of the log; empty disables it (differs from Milvus)"
    )
    segment_size_in_mb: PositiveInt = Field(
        default=32, alias="segmentSizeInMB", description="size of a journal segment, MiB"
    )
    free_space_in_mb: NonNegativeInt = Field(
        default=64, alias="freeSpaceInMB", description="writes are refused below this much free space, MiB"
    )


# ---- brokers: accepted as in milvus.yaml, for the adapter of each ----------------------------------------------------


class KafkaSslSettings(SettingsSection):
    """TLS towards Kafka."""

    enabled: bool = Field(default=False, description="whether to use TLS")
    tls_cert: str = Field(default="", description="the client's certificate, a file")
    tls_key: str = Field(default="", description="the client's key, a file")
    tls_ca_cert: str = Field(default="", description="the certificates of trusted authorities, a file")
    tls_key_password: SecretStr = Field(default=SecretStr(""), description="password of the key")


class KafkaSettings(RetainingSettings):
    """Kafka. `consumer.*` and `producer.*` are keys of Kafka's own clients; see `adapters/kafka/client_keys.py`."""

    broker_list: str = Field(default="", repr=False, description="host:port, comma separated; empty disables Kafka")
    sasl_username: str = Field(default="", description="user name")
    sasl_password: SecretStr = Field(default=SecretStr(""), description="password")
    sasl_mechanisms: str = Field(default="", description="PLAIN, SCRAM-SHA-256, …")
    security_protocol: str = Field(default="", description="SASL_SSL, SASL_PLAINTEXT, SSL, …")
    ssl: KafkaSslSettings = KafkaSslSettings()
    read_timeout: PositiveFloat = Field(default=10.0, description="no effect: a read waits without a limit")
    consumer: dict[str, str] = Field(default={}, repr=False, description="keys of Kafka's consumer, see backends.md")
    producer: dict[str, str] = Field(default={}, repr=False, description="keys of Kafka's producer, see backends.md")


class PulsarSettings(RetainingSettings):
    """Pulsar."""

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


class WoodpeckerSettings(SettingsSection):
    """Woodpecker."""

    meta: WoodpeckerMetaSettings = WoodpeckerMetaSettings()
    storage: WoodpeckerStorageSettings = WoodpeckerStorageSettings()


# ---- names and roles -------------------------------------------------------------------------------------------------


class ChannelNamePrefixSettings(SettingsSection):
    """The words that physical channels' names are made of."""

    cluster: str = Field(default="by-dev", description="first word of every channel's name")


class MsgChannelSettings(SettingsSection):
    """Names of channels."""

    chan_name_prefix: ChannelNamePrefixSettings = ChannelNamePrefixSettings()


class RootCoordSettings(SettingsSection):
    """The catalog and its channels."""

    dml_channel_num: PositiveInt = Field(default=16, description="physical channels created for data")


class ProxySettings(SettingsSection):
    """The Proxy, which accepts writes."""

    time_tick_interval: PositiveInt = Field(
        default=200, description="ms between two time ticks of a channel that has data"
    )
    max_shard_num: PositiveInt = Field(default=16, description="shards a collection may have")
    max_inflight_bytes: PositiveInt = Field(default=64 * MIB, description="bytes accepted and not yet acknowledged")
    max_unflushed_bytes: PositiveInt = Field(
        default=256 * MIB, description="bytes per collection that are not in its table yet"
    )


class DataNodeSettings(SettingsSection):
    """The DataNode, which stores rows of the log in tables."""

    flush_bytes: PositiveInt = Field(
        default=64 * MIB, description="a collection is flushed when it has buffered this many bytes"
    )
    flush_interval_s: PositiveFloat = Field(
        default=10.0, description="s after which buffered rows are flushed at the latest"
    )
    compaction_interval_s: NonNegativeFloat = Field(
        default=300.0, description="s between two compactions, which follow flushes; 0 only on request"
    )


class SchedulerSettings(SettingsSection):
    """Limits on reads."""

    max_timestamp_lag: PositiveInt = Field(
        default=86400, description="s that a reader may lag before reads are refused"
    )


class QueryNodeSettings(SettingsSection):
    """Search and query."""

    memory_limit_bytes: PositiveInt = Field(default=4 * GIB, description="bytes of rows and vectors in memory")
    scheduler: SchedulerSettings = SchedulerSettings()


class PreCreatedTopicSettings(SettingsSection):
    """Channels that an administrator has created for the node; see docs/backends.md."""

    enabled: bool = Field(
        default=False, description="place collections on the channels `names` instead of creating `…-rootcoord-dml_N`"
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="channels that exist and are empty; a list, or comma separated (differs from Milvus: none)",
    )
    timeticker: str = Field(
        default="",
        description="an ephemeral channel that exists, for the owners' heartbeats; empty: the node creates one "
        "(differs from Milvus)",
    )

    @field_validator("names", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class CommonSettings(SettingsSection):
    """Settings of all roles."""

    pre_created_topic: PreCreatedTopicSettings = PreCreatedTopicSettings()
    graceful_time: NonNegativeInt = Field(default=5000, description="ms of staleness that `bounded` reads accept")


class LimitWritingSettings(SettingsSection):
    """When writes are refused."""

    force_deny: bool = Field(default=False, description="refuse all writes")


class QuotaAndLimitsSettings(SettingsSection):
    """Quotas."""

    limit_writing: LimitWritingSettings = LimitWritingSettings()


class ActorSettings(SettingsSection):
    """Actors. Tidewal's own."""

    mailbox_size: PositiveInt = Field(default=1024, description="messages a mailbox holds before senders wait")
    mailbox_bytes: PositiveInt = Field(default=64 * MIB, description="bytes a mailbox holds before senders wait")
    blocked_after_ms: PositiveInt = Field(
        default=500, description="ms after which a handler is reported as blocking the loop"
    )
    stop_deadline: PositiveFloat = Field(default=10.0, description="s that a stopping actor has to drain its mailbox")
    stop_grace: PositiveFloat = Field(default=5.0, description="s that it then has to clean up, before the stop fails")


class MetricsSettings(SettingsSection):
    """The endpoint that Prometheus scrapes. Tidewal's own."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port of /metrics and /healthz; 0 is off")


class InterpreterSettings(SettingsSection):
    """Python itself. Tidewal's own."""

    switch_interval_ms: NonNegativeFloat = Field(
        default=0.5, description="thread switch interval while a node runs, ms; 0 leaves Python's own, 5"
    )


class Settings(SettingsSection):
    """All settings, complete and checked. `wal`, where given, overrides `mq.*`."""

    wal: str = Field(
        default="", repr=False, description="URL of the log: rocksmq:///path, kafka://host:port, memory://, …"
    )
    mq: MqSettings = MqSettings()
    rocksmq: RocksMqSettings = RocksMqSettings()
    kafka: KafkaSettings = KafkaSettings()
    pulsar: PulsarSettings = PulsarSettings()
    woodpecker: WoodpeckerSettings = WoodpeckerSettings()
    msg_channel: MsgChannelSettings = MsgChannelSettings()
    root_coord: RootCoordSettings = RootCoordSettings()
    proxy: ProxySettings = ProxySettings()
    data_node: DataNodeSettings = DataNodeSettings()
    query_node: QueryNodeSettings = QueryNodeSettings()
    common: CommonSettings = CommonSettings()
    quota_and_limits: QuotaAndLimitsSettings = QuotaAndLimitsSettings()
    actor: ActorSettings = ActorSettings()
    metrics: MetricsSettings = MetricsSettings()
    interpreter: InterpreterSettings = InterpreterSettings()
