"""The topics of channels: their names, and a policy as Kafka's settings."""

from __future__ import annotations

from collections.abc import Iterable

from ...runtime.wal import ChannelPolicy
from .options import OVERHEAD_BYTES, Options

LARGEST = "max.message.bytes"  # of a batch
FOREVER = "-1"
LAST_MS = str(2**63 - 1)
NAME_CHARACTERS = 180  # of a channel in its topic's name, of which Kafka takes 249
PIECES = 8  # that retention removes one after the other, at least
LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 1024 * 1024, 1024**3
LEAST_SEGMENT_MS, MOST_SEGMENT_MS = 10_000, 7 * 24 * 3600 * 1000
UNPACKED_BYTES = 8 * 1024 * 1024  # of a compressed batch, at least; no appender makes a larger one of several entries
EPHEMERAL_MS = 5 * 60 * 1000


def catalog_topic(prefix: str) -> str:
    """Where the channels and holds of a log are written down."""
    return f"{prefix}.catalog"


def channel_topic(prefix: str, channel: str, incarnation: int) -> str:
    """A topic of its own for each incarnation: Kafka removes topics late, and none may be taken for another."""
    return f"{prefix}.{channel[:NAME_CHARACTERS]}.{incarnation}"


def channel_topics(prefix: str, topics: Iterable[str]) -> list[str]:
    """Which of these are topics of channels of a log."""
    return sorted(topic for topic in topics if topic.startswith(f"{prefix}.") and topic.rpartition(".")[2].isdecimal())


def catalog_configs(options: Options) -> dict[str, str]:
    """Of each key its last record, for ever."""
    return {"cleanup.policy": "compact", "delete.retention.ms": str(MOST_SEGMENT_MS), **_replication(options)}


def configs(policy: ChannelPolicy, options: Options, *, held: bool = False) -> dict[str, str]:
    """All settings of a channel's topic; while it is held, retention is left to `retention.py`."""
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
    """How many bytes may come out of a compressed batch of the channel: the same for all who read it."""
    return max(policy.max_message_bytes, UNPACKED_BYTES) + OVERHEAD_BYTES


def _retention(retention_ms: int | None, retention_bytes: int | None, largest: int) -> dict[str, str]:
    """Kafka removes whole segments, so they are a fraction of what is kept; the largest batch must fit into one."""
    found = {"retention.ms": FOREVER, "retention.bytes": FOREVER}
    if retention_ms is not None:
        segment_ms = min(max(retention_ms // PIECES, LEAST_SEGMENT_MS), MOST_SEGMENT_MS)
        found |= {"retention.ms": str(retention_ms), "segment.ms": str(segment_ms)}
    if retention_bytes is not None:
        segment_bytes = min(max(retention_bytes // PIECES, LEAST_SEGMENT_BYTES, largest), MOST_SEGMENT_BYTES)
        found |= {"retention.bytes": str(retention_bytes), "segment.bytes": str(segment_bytes)}
    return found


def _replication(options: Options) -> dict[str, str]:
    return {"min.insync.replicas": str(options.min_insync_replicas)} if options.min_insync_replicas else {}
