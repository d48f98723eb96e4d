"""The topics of channels: their names, and the topic settings for a policy."""

from __future__ import annotations

from collections.abc import Iterable

from ...runtime.log.wal import ChannelPolicy
from .cluster import PARTITION
from .options import OVERHEAD_BYTES, KafkaOptions

LARGEST = "max.message.bytes"  # of a batch
FOREVER = "-1"
LAST_MS = str(2**63 - 1)
NAME_CHARACTERS = 180  # of the channel's name in the topic's name, which may have 249
SEGMENTS = 8  # into which the kept entries are divided, at least: retention removes whole ones
LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 1024 * 1024, 1024**3
LEAST_SEGMENT_MS, MOST_SEGMENT_MS = 10_000, 7 * 24 * 3600 * 1000
UNPACKED_BYTES = (
    8 * 1024 * 1024
)  # least limit of a compressed batch; no appender puts more into a batch of several entries
EPHEMERAL_MS = 5 * 60 * 1000


def catalog_topic(prefix: str) -> str:
    """The topic with the channels and holds of a log."""
    return f"{prefix}.catalog"


def channel_topic(prefix: str, channel: str, incarnation: int) -> str:
    """The topic of one incarnation of a channel. Each has its own: Kafka deletes topics late, and an old one must not
    be taken for the new one."""
    return f"{prefix}.{channel[:NAME_CHARACTERS]}.{incarnation}"


def channel_topics(prefix: str, topics: Iterable[str]) -> list[str]:
    """Those of `topics` that are topics of channels of the log with this prefix."""
    return sorted(topic for topic in topics if topic.startswith(f"{prefix}.") and topic.rpartition(".")[2].isdecimal())


def foreign_channel(topic: str, number: int) -> str:
    """The name of partition `number` of a topic of others. Names of topics and of own channels have no colon."""
    return f"{topic}:{number}"


def place_of(key: str) -> tuple[str, int]:
    """The topic and the number of a partition: of the name of a foreign channel, or of the topic of an own one."""
    topic, colon, number = key.rpartition(":")
    return (topic, int(number)) if colon and number.isdecimal() else (key, PARTITION)


def catalog_configs(options: KafkaOptions) -> dict[str, str]:
    """The settings of the catalog's topic, which keeps the last record of each key for ever."""
    return {"cleanup.policy": "compact", "delete.retention.ms": str(MOST_SEGMENT_MS), **_replication(options)}


def configs(policy: ChannelPolicy, options: KafkaOptions, *, held: bool = False) -> dict[str, str]:
    """All settings of a channel's topic. `held`: the channel has holds, and `retention.py` does the retention."""
    message_bytes = options.largest_message(policy.max_message_bytes)
    largest = max(message_bytes + OVERHEAD_BYTES, options.largest_batch_bytes)
    found = {
        "cleanup.policy": "delete",
        LARGEST: str(largest),
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": LAST_MS,  # the clock of a record is not the broker's
        "message.timestamp.after.max.ms": LAST_MS,
    }
    if policy.ephemeral:
        found |= _retention(EPHEMERAL_MS, policy.ephemeral_bytes, largest)
    else:
        retention_ms = None if policy.retention_s is None else int(policy.retention_s * 1000)
        found |= _retention(retention_ms, policy.retention_bytes, largest)
        found |= _replication(options)
    if held:
        found |= {"retention.ms": FOREVER, "retention.bytes": FOREVER}
    return found


def largest_unpacked(policy: ChannelPolicy) -> int:
    """The limit in bytes for an unpacked batch of the channel: the same for every reader."""
    return max(policy.max_message_bytes, UNPACKED_BYTES) + OVERHEAD_BYTES


def _retention(retention_ms: int | None, retention_bytes: int | None, largest: int) -> dict[str, str]:
    """Kafka removes whole segments, so a segment is a fraction of what is kept; the `largest` batch must fit into
    one."""
    found = {"retention.ms": FOREVER, "retention.bytes": FOREVER}
    if retention_ms is not None:
        segment_ms = min(max(retention_ms // SEGMENTS, LEAST_SEGMENT_MS), MOST_SEGMENT_MS)
        found |= {"retention.ms": str(retention_ms), "segment.ms": str(segment_ms)}
    if retention_bytes is not None:
        segment_bytes = min(max(retention_bytes // SEGMENTS, LEAST_SEGMENT_BYTES, largest), MOST_SEGMENT_BYTES)
        found |= {"retention.bytes": str(retention_bytes), "segment.bytes": str(segment_bytes)}
    return found


def _replication(options: KafkaOptions) -> dict[str, str]:
    return {"min.insync.replicas": str(options.min_insync_replicas)} if options.min_insync_replicas else {}
