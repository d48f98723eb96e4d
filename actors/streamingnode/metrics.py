"""Metrics of the StreamingNode."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.catalog.catalog import Collection
from ...runtime.metrics.metrics import Metrics


class StreamingNodeMetrics:
    """The series of the StreamingNode, and of each collection. `inflight_bytes` returns what is not durable yet."""

    def __init__(self, metrics: Metrics, inflight_bytes: Callable[[], int]) -> None:
        self._metrics = metrics
        metrics.gauge("streamingnode_inflight_bytes").set_function(inflight_bytes)

    def watch(
        self, collection: Collection, unflushed_bytes: Callable[[], int], unflushed_age_s: Callable[[], float]
    ) -> None:
        """Begin the series of a collection; `unflushed_bytes` returns what of it is not in its table yet, and
        `unflushed_age_s` for how many seconds the oldest of that has been in the log."""
        name = collection.name
        self._metrics.watch("streamingnode_unflushed_age_seconds", unflushed_age_s, collection_name=name)
        self._metrics.watch("streamingnode_unflushed_bytes", unflushed_bytes, collection_name=name)

    def forget(self, collection: Collection) -> None:
        """End the series of a collection that was dropped."""
        self._metrics.forget("collection_name", collection.name)
