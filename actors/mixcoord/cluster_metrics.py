"""What a coordinator has read of the cluster, as metrics: its members, their leases, and the owners of channels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ...runtime.catalog.topics import READY
from ...runtime.clock import Clock
from ...runtime.cluster.decisions import ClusterView
from ...runtime.cluster.detector import SilenceDetector
from ...runtime.cluster.roles import ROLE_NAMES, STREAMING_NODE
from ...runtime.metrics.metrics import Metrics
from ...runtime.waiting import first_of

EVERY_S = 1.0


class ClusterMetrics:
    """Series of each role, each member and each pchannel, as every coordinator sees them: whether it leads or not.
    `view` is what it has read by now, `changed` waits until the catalog is another one. A channel is without an owner
    from when this coordinator first found it so."""

    def __init__(
        self,
        metrics: Metrics,
        view: Callable[[], ClusterView],
        detector: SilenceDetector,
        clock: Clock,
        *,
        changed: Callable[[], Coroutine[Any, Any, object]],
    ) -> None:
        self._metrics, self._view, self._detector, self._clock = metrics, view, detector, clock
        self._changed = changed
        self._ownerless_since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Bring the series up to date at each change of the catalog, and every second, until cancelled."""
        while True:
            self.update()
            await first_of(self._changed(), asyncio.sleep(EVERY_S))

    def update(self) -> None:
        """Set all series to what was read by now."""
        view = self._view()
        members = view.cluster.members
        offered = Counter(role for member in members.values() for role in member.roles)
        self._show("mixcoord_member_num", "role_name", {role: offered[role] for role in ROLE_NAMES})
        self._metrics.gauge("mixcoord_feature_level").set(view.cluster.level)
        versions = Counter(member.version or "unknown" for member in members.values())
        self._show("mixcoord_member_version_num", "version", versions)
        self._show_topics(view)
        ages_s: dict[str, float] = {}
        for member in members.values():
            if member.incarnation != view.own:  # a lease of one's own may be renewed without a record
                age_s = self._detector.heard_ago_s(member.incarnation)
                ages_s[member.name] = max(ages_s.get(member.name, 0.0), age_s)
        self._show("mixcoord_lease_age_seconds", "member_name", ages_s)
        owned = Counter[str]({member.name: 0 for member in members.values() if STREAMING_NODE in member.roles})
        ownerless: list[str] = []
        for channel, state in view.catalog.channels.items():
            if state.owner in members and state.term in state.fences:
                owned[members[state.owner].name] += 1
            else:
                ownerless.append(channel)
        self._show("mixcoord_channel_num", "member_name", owned)
        self._show("mixcoord_channel_without_owner_seconds", "channel_name", self._without_owner_s(view, ownerless))

    def _show_topics(self, view: ClusterView) -> None:
        topics = [topic for topic in view.catalog.topics if topic.state == READY]
        self._show("mixcoord_topic_partition_num", "topic_name", {each.name: len(each.partitions) for each in topics})
        waiting = {topic.name: len(topic.unbegun) for topic in topics}
        self._show("mixcoord_topic_waiting_partition_num", "topic_name", waiting)

    def _without_owner_s(self, view: ClusterView, ownerless: list[str]) -> Mapping[str, float]:
        now_s = self._clock.monotonic()
        self._ownerless_since_s = {channel: self._ownerless_since_s.get(channel, now_s) for channel in ownerless}
        return {channel: now_s - self._ownerless_since_s.get(channel, now_s) for channel in view.catalog.channels}

    def _show(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set the series of these values of a label, and drop all others of the metric."""
        for (shown,) in self._metrics.series(name):
            if shown not in values:
                self._metrics.remove(name, **{label: shown})
        for value, number in values.items():
            self._metrics.gauge(name, **{label: value}).set(number)
