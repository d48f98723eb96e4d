"""Retention of a channel that somebody holds: Kafka's own is off, ours removes what the policy lets go up to the holds.

Kafka removes by time and size whoever needs what. So the first hold switches its retention off for the topic, and while
there are holds whatever is older than the policy's time is removed up to the lowest of them, each time one moves.
A limit in bytes does not act meanwhile: the brokers tell no client library here how large a topic is.
"""

from __future__ import annotations

import time

from . import faults
from .catalog import Catalog, Channel
from .cluster import Cluster
from .topics import configs

EVERY_S = 60.0  # how often a channel is looked at, at most


class Retention:
    """Belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, catalog: Catalog) -> None:
        self._cluster, self._catalog = cluster, catalog
        self._held: dict[int, bool] = {}  # how each topic is configured, by incarnation
        self._looked_at: dict[int, float] = {}

    async def moved(self, channel: Channel) -> None:
        """A hold has moved, come or gone. Raises what `Cluster.retrying` raises."""
        while self._held.get(channel.incarnation) != bool(channel.holds):
            held = bool(channel.holds)
            wanted = configs(channel.policy, self._cluster.options, held=held)
            await self._cluster.retrying(
                f"configure {channel.topic}",
                lambda wanted=wanted: self._cluster.configure_topic(channel.topic, wanted),
                faults.Operation.ADMINISTRATION,
            )
            self._held[channel.incarnation] = held
            await self._catalog.sync()  # another process may have had another opinion meanwhile
        now = time.monotonic()
        due = now - self._looked_at.get(channel.incarnation, -EVERY_S) >= EVERY_S
        if channel.holds and channel.policy.retention_s is not None and due:
            self._looked_at[channel.incarnation] = now
            await self.remove_old(channel, channel.policy.retention_s)

    async def remove_old(self, channel: Channel, retention_s: float) -> None:
        """Remove what is older than that and held by nobody."""
        oldest_ms = int((time.time() - retention_s) * 1000)

        async def remove() -> None:
            first, end = await self._cluster.bounds(channel.topic)
            kept = await self._cluster.offset(channel.topic, oldest_ms)
            upto = min(end if kept is None else kept, *channel.holds.values(), end)
            if upto > first:
                await self._cluster.delete_before(channel.topic, upto)

        await self._cluster.retrying(f"remove the oldest of {channel.topic}", remove, faults.Operation.ADMINISTRATION)
