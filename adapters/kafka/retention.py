"""Retention of a channel with holds: Kafka's own is off; the adapter removes what the policy allows, up to the holds.

Kafka's retention by time and size knows no holds. So the first hold switches it off for the topic, and while there are
holds, entries older than the policy's time are removed up to the lowest hold, each time a hold moves. A limit in bytes
has no effect meanwhile: the client library has no request for the size of a topic.
"""

from __future__ import annotations

import time

from . import faults
from .catalog import ChannelCatalog, KafkaChannel
from .cluster import Cluster
from .topics import configs

EVERY_S = 60.0  # least time between two removals from a channel


class Retention:
    """Applies the policy to channels with holds. Belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, catalog: ChannelCatalog) -> None:
        self._cluster, self._catalog = cluster, catalog
        self._held: dict[int, bool] = {}  # whether each topic is configured as held, by incarnation
        self._looked_at: dict[int, float] = {}

    async def moved(self, channel: KafkaChannel) -> None:
        """A hold of the channel was set, moved or removed. Raises what `Cluster.retrying` raises."""
        while self._held.get(channel.incarnation) != bool(channel.holds):
            held = bool(channel.holds)
            wanted = configs(channel.policy, self._cluster.options, held=held)
            await self._cluster.retrying(
                f"configure {channel.topic}",
                lambda wanted=wanted: self._cluster.configure_topic(channel.topic, wanted),
                faults.Operation.ADMINISTRATION,
            )
            self._held[channel.incarnation] = held
            await self._catalog.sync()  # another process may have changed the holds meanwhile
        now = time.monotonic()
        due = now - self._looked_at.get(channel.incarnation, -EVERY_S) >= EVERY_S
        if channel.holds and channel.policy.retention_s is not None and due:
            self._looked_at[channel.incarnation] = now
            await self.remove_old(channel, channel.policy.retention_s)

    async def remove_old(self, channel: KafkaChannel, retention_s: float) -> None:
        """Remove the entries that are older than `retention_s` and before all holds."""
        oldest_ms = int((time.time() - retention_s) * 1000)

        async def remove() -> None:
            first, end = await self._cluster.bounds(*channel.place)
            kept = await self._cluster.offset(channel.topic, oldest_ms)
            upto = min(end if kept is None else kept, *channel.holds.values(), end)
            if upto > first:
                await self._cluster.delete_before(channel.topic, upto)

        await self._cluster.retrying(f"remove the oldest of {channel.topic}", remove, faults.Operation.ADMINISTRATION)
