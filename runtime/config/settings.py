"""Every setting of Tidewal, with its default; `loading.py` fills them from file, environment and arguments.

Keys are those of milvus.yaml, in camelCase (`mq.mqBufSize`); the attributes are the same words in snake_case
(`settings.mq.mq_buf_size`). Defaults are Milvus' unless the description says otherwise. Everything is frozen.
Secrets are `SecretStr`, and `repr` leaves out values that may hold one, such as URLs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    create_model,
    field_validator,
    model_validator,
)

from ..direct.address import HostPort
from ..log.opening import installed_backends
from .section import BackendSettings, SettingsSection

MIB = 1024 * 1024
GIB = 1024 * MIB


def _sections() -> dict[str, type[BackendSettings]]:
    found = ((backend.name, backend.settings()) for backend in installed_backends())
    return {name: section for name, section in found if section is not None}


BACKEND_SECTIONS = _sections()
"""The sections of the installed backends, by the backend's name."""


class MqSettings(SettingsSection):
    """The choice of the log, and how much of it is buffered."""

    type: str = Field(default="default", description="the log's backend; `default` takes the first that is enabled")
    mq_buf_size: PositiveInt = Field(
        default=16, description="packs of 4 MiB that a stream buffers, and all collections of a node together"
    )
    enable_pursuit_mode: bool = Field(
        default=False, description="join small packs of time-ticked streams that are far behind (differs from Milvus)"
    )
    pursuit_lag: PositiveFloat = Field(default=10.0, description="seconds behind the wall clock that are far")
    pursuit_buffer_size: PositiveInt = Field(default=8 * MIB, description="bytes buffered at which packs end, then")
    pursuit_buffer_time: PositiveFloat = Field(default=60.0, description="seconds after which packs end, then")

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        known = ("default", *BACKEND_SECTIONS)
        if value not in known:
            raise ValueError(f"there is no backend {value!r}; there are {', '.join(known)}")
        return value


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
    max_topic_num: PositiveInt = Field(default=64, description="topics that there may be")
    max_topic_partition_num: PositiveInt = Field(
        default=64, description="partitions a topic may have; each is a physical channel of its own"
    )


class ProxySettings(SettingsSection):
    """The Proxy, which accepts writes."""

    time_tick_interval: PositiveInt = Field(
        default=200, description="ms between two time ticks of a channel that has data"
    )
    max_shard_num: PositiveInt = Field(default=16, description="shards a collection may have")


class StreamingNodeSettings(SettingsSection):
    """The StreamingNode, which owns channels."""

    max_inflight_bytes: PositiveInt = Field(
        default=64 * MIB,
        description="bytes accepted and not yet acknowledged; also bytes that wait at a Proxy for one channel",
    )
    max_unflushed_bytes: PositiveInt = Field(
        default=256 * MIB,
        description="bytes per collection that are not in its table yet; each of its shards has an equal part of them",
    )
    unflushed_low_water_level: PositiveFloat = Field(
        default=0.8, le=1, description="part of maxUnflushedBytes from which writes are slowed down"
    )
    max_delay_bytes: PositiveInt = Field(
        default=128 * MIB,
        description="bytes of delayed messages that are kept in memory, those that are due first; an equal part for "
        "each partition that the node owns, 4 MiB at least",
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
        default=300.0,
        description="s between two compactions of a collection while its table `current` is behind, written or idle; "
        "0 only on request",
    )


class SchedulerSettings(SettingsSection):
    """Limits on reads."""

    max_timestamp_lag: PositiveInt = Field(
        default=86400, description="s that a reader may lag before reads are refused"
    )


class QueryNodeSettings(SettingsSection):
    """Search and query."""

    memory_limit_bytes: PositiveInt = Field(
        default=4 * GIB, description="bytes of rows and vectors in memory, of all collections of a node"
    )
    retention_duration: NonNegativeFloat = Field(
        default=10.0,
        description="s for which rows that were replaced or deleted stay in memory, so that queries can be answered as "
        "of a past time; older times are read from the tables (differs from Milvus: common.retentionDuration)",
    )
    replicas: NonNegativeInt = Field(
        default=2,
        description="QueryNodes that have a new collection in memory, as far as there are so many, where `create` does "
        "not say it; 0: it is to be loaded first",
    )
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
    graceful_time: NonNegativeInt = Field(
        default=5000, description="ms of staleness that `bounded` reads accept; 25,000 by default on object storage"
    )


class MemProtectionSettings(SettingsSection):
    """Writes while QueryNodes have little room for more rows."""

    enabled: bool = Field(default=True, description="slow writes down, and refuse them, where QueryNodes fill up")
    query_node_memory_low_water_level: PositiveFloat = Field(
        default=0.85,
        le=1,
        description="part of queryNode.memoryLimitBytes at any QueryNode from which writes are slowed down",
    )
    query_node_memory_high_water_level: PositiveFloat = Field(
        default=0.95, le=1, description="part of it at which they are refused, until it is below the low one"
    )

    @model_validator(mode="after")
    def _check_levels(self) -> MemProtectionSettings:
        low, high = self.query_node_memory_low_water_level, self.query_node_memory_high_water_level
        if low > high:
            raise ValueError(f"queryNodeMemoryLowWaterLevel {low} is above queryNodeMemoryHighWaterLevel {high}")
        return self


class LimitWritingSettings(SettingsSection):
    """When writes are slowed down or refused."""

    force_deny: bool = Field(default=False, description="refuse all writes")
    slowdown_rate: PositiveInt = Field(
        default=32 * MIB,
        description="bytes a second that are let in at the low water mark of a limit, less up to its high one, then "
        "none; at each owner, for each limit (Tidewal's own)",
    )
    mem_protection: MemProtectionSettings = MemProtectionSettings()


class QuotaAndLimitsSettings(SettingsSection):
    """Quotas."""

    limit_writing: LimitWritingSettings = LimitWritingSettings()


class NodeMemoryLimitSettings(SettingsSection):
    """The memory of a node's process, as a part of that of its container or machine."""

    slowdown_threshold: PositiveFloat = Field(
        default=0.85, description="part of the memory at any node from which writes are slowed down; above 1 never"
    )
    reject_threshold: PositiveFloat = Field(
        default=0.9, description="part of it at which writes are refused, until it is below slowdownThreshold"
    )

    @model_validator(mode="after")
    def _check_thresholds(self) -> NodeMemoryLimitSettings:
        if self.slowdown_threshold > self.reject_threshold:
            raise ValueError(
                f"slowdownThreshold {self.slowdown_threshold} is above rejectThreshold {self.reject_threshold}"
            )
        return self


class AppendRateLimitSettings(SettingsSection):
    """How much an owner takes a second."""

    enabled: bool = Field(default=False, description="slow writes down that come faster")
    slowdown_threshold: PositiveInt = Field(
        default=32 * MIB, description="bytes a second that an owner takes; also as Milvus writes it, `32m`"
    )

    @field_validator("slowdown_threshold", mode="before")
    @classmethod
    def _in_bytes(cls, value: object) -> object:
        found = re.fullmatch(r"(\d+)\s*([kmg])b?", value.lower()) if isinstance(value, str) else None
        return int(found[1]) << {"k": 10, "m": 20, "g": 30}[found[2]] if found else value


class WalRateLimitSettings(SettingsSection):
    """Limits at the owners of channels."""

    node_memory: NodeMemoryLimitSettings = NodeMemoryLimitSettings()
    append_rate: AppendRateLimitSettings = AppendRateLimitSettings()


class StreamingSettings(SettingsSection):
    """The owners of channels together."""

    wal_rate_limit: WalRateLimitSettings = WalRateLimitSettings()


class ClusterSslSettings(SettingsSection):
    """TLS between nodes. All three files, or none; a node shows its certificate whether it connects or listens."""

    tls_cert: str = Field(default="", description="the node's certificate, a file")
    tls_key: str = Field(default="", description="its key, a file")
    tls_ca_cert: str = Field(
        default="", description="the authority that has signed the certificates of all nodes, a file"
    )
    sni: str = Field(default="", description="a name that the certificates of all nodes have; empty: each its host's")


class ClusterSettings(SettingsSection):
    """The nodes of one log, which are one system. Tidewal's own."""

    id: str = Field(default="", description="id of the cluster that a node may join; empty: that of the log")
    secret: SecretStr = Field(default=SecretStr(""), description="what all nodes of the cluster must know")
    lease_ms: int = Field(
        default=3000,
        ge=100,
        description="ms for which a node is a member, and owns its channels, after each renewal; 15,000 by default on "
        "object storage",
    )
    renew_ms: int = Field(
        default=1000,
        ge=20,
        description="ms between two renewals; at most half of leaseMs; 5,000 by default on object storage",
    )
    listen: str = Field(
        default="",
        description="host:port where the node takes connections of other nodes, port 0 one that is free; empty: "
        "cluster.address, and where that is empty, too, none: requests to it go through the log",
    )
    address: str = Field(
        default="", description="host:port where the other nodes reach it; empty: cluster.listen; port 0 the one there"
    )
    ssl: ClusterSslSettings = ClusterSslSettings()
    plaintext: bool = Field(
        default=False, description="allow connections between machines without TLS, as in a network of its own"
    )

    @model_validator(mode="after")
    def _check_times(self) -> ClusterSettings:
        if 2 * self.renew_ms > self.lease_ms:
            raise ValueError(f"renewMs {self.renew_ms} must be at most half of leaseMs {self.lease_ms}")
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> ClusterSettings:
        files = self.ssl
        if not (files.tls_cert and files.tls_key and files.tls_ca_cert) and (files != ClusterSslSettings()):
            raise ValueError("ssl needs all of tlsCert, tlsKey and tlsCaCert")
        listen, address = self.listens_on, self.reached_at
        if listen is None or address is None:
            return self
        if address.everywhere:
            raise ValueError(f"listen on {listen} needs an address by which others reach this node")
        if not self.secret.get_secret_value():
            raise ValueError("an address needs a secret, which all nodes of the cluster have")
        if not (listen.loopback or files.tls_cert or self.plaintext):
            raise ValueError(f"listen on {listen} needs certificates (ssl), or plaintext in a network of its own")
        return self

    @property
    def listens_on(self) -> HostPort | None:
        """Where the node listens for other nodes; None where it does not. Raises `ValueError`."""
        text = self.listen or self.address
        return HostPort.parse(text) if text else None

    @property
    def reached_at(self) -> HostPort | None:
        """What it says of that to others. Raises `ValueError`."""
        text = self.address or self.listen
        return HostPort.parse(text) if text else None


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


class LoggingSettings(SettingsSection):
    """What `tidewal run` writes to stderr. Programs that embed a node configure Python's `logging` themselves."""

    level: Literal["debug", "info", "warn", "error", "panic", "fatal"] = Field(
        default="info", description="lines of this level and above; of libraries warnings and above"
    )
    format: Literal["text", "json"] = Field(default="text", description="for people, or one JSON object a line")

    @field_validator("level", "format", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


class InterpreterSettings(SettingsSection):
    """Python itself. Tidewal's own."""

    switch_interval_ms: NonNegativeFloat = Field(
        default=0.5, description="thread switch interval while a node runs, ms; 0 leaves Python's own, 5"
    )


class LogSettings(SettingsSection):
    """Which log, and the section of each installed backend under the backend's name."""

    wal: str = Field(default="", repr=False, description="URL of the log, see backends.md")
    mq: MqSettings = MqSettings()

    def of_backend(self, name: str) -> BackendSettings | None:
        """The section of the backend with this name; None where it has none, or is not installed."""
        return getattr(self, name) if name in BACKEND_SECTIONS else None


if TYPE_CHECKING:
    _WithBackends = LogSettings
else:
    _WithBackends = create_model(
        "_WithBackends", __base__=LogSettings, **{name: (kind, kind()) for name, kind in BACKEND_SECTIONS.items()}
    )


class Settings(_WithBackends):
    """All settings, complete and checked. `wal`, where given, overrides `mq.*`."""

    tables: str = Field(
        default="",
        description="where the tables lie, the same place for all nodes: a path, or a prefix of a bucket like "
        "`s3://bucket/prefix`, see object-storage.md; empty: `tables` in the directory of the node",
    )
    msg_channel: MsgChannelSettings = MsgChannelSettings()
    root_coord: RootCoordSettings = RootCoordSettings()
    proxy: ProxySettings = ProxySettings()
    streaming_node: StreamingNodeSettings = StreamingNodeSettings()
    data_node: DataNodeSettings = DataNodeSettings()
    query_node: QueryNodeSettings = QueryNodeSettings()
    common: CommonSettings = CommonSettings()
    quota_and_limits: QuotaAndLimitsSettings = QuotaAndLimitsSettings()
    streaming: StreamingSettings = StreamingSettings()
    cluster: ClusterSettings = ClusterSettings()
    actor: ActorSettings = ActorSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LoggingSettings = LoggingSettings()
    interpreter: InterpreterSettings = InterpreterSettings()
