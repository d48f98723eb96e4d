"""The metrics of an actor system."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..metrics.metrics import Metrics
from .cell import ActorStatus
from .observer import Observer


class ActorMetrics(Observer):
    """Writes to the log, and counts. Mailboxes are read when the metrics are scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def watch(self, actors: Iterable[str], status: Callable[[], list[ActorStatus]], lag_s: Callable[[], float]) -> None:
        """Export the mailbox depth of `actors`, by what `status` returns, and the lag of the event loop in seconds."""
        for actor in actors:
            depth = self._metrics.gauge("actor_mailbox_depth", actor=actor)
            depth.set_function(lambda actor=actor: sum(x.mailbox_depth for x in status() if x.name == actor))
            self._metrics.counter("actor_restart_total", actor=actor)
            self._metrics.counter("actor_blocked_total", actor=actor)
        self._metrics.gauge("event_loop_lag_seconds").set_function(lag_s)

    def crashed(self, actor: str, error: BaseException, pause_s: float | None) -> None:
        super().crashed(actor, error, pause_s)
        if pause_s is not None:
            self._metrics.counter("actor_restart_total", actor=actor).inc()

    def refused(self, actor: str, limit: str) -> None:
        super().refused(actor, limit)
        self._metrics.counter("overloaded_total", limit=limit).inc()

    def blocked(self, actor: str, blocked_ms: int, stack: str) -> None:
        super().blocked(actor, blocked_ms, stack)
        self._metrics.counter("actor_blocked_total", actor=actor.partition("/")[0]).inc()
