"""Which log a node has whose settings do not say."""

from __future__ import annotations

DEFAULT_LOGS = ("rocksmq", "pulsar", "kafka", "woodpecker")
"""The backends that `mq.type=default` tries, in Milvus' order: it takes the first that is enabled."""
