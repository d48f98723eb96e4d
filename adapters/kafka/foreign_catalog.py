"""The topics that others made, as channels: one for each partition, named `TOPIC:NUMBER`.

Nothing is written about them anywhere, so there is no catalog: the brokers are asked. A topic that is deleted and made
again is another one, by its id; brokers before 2.8 give no ids, and there its name is all that tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Callable

from ...runtime.errors import TidewalError
from ...runtime.log.wal import ChannelPolicy
from .catalog import KafkaChannel, was_dropped
from .cluster import Cluster, TopicDescription
from .positions import HALF_BYTES
from .requests import NO_ID
from .topics import foreign_channel

DISCOVERY_S = 5.0  # how often members of groups look for new topics and partitions
MESSAGE_BYTES = 64 * 1024 * 1024  # of one message, and of one batch unpacked; the brokers' own limits are lower
NUMBER_BYTES = 3  # of the partition's number, at the end of the prefix of its ids
POLICY = ChannelPolicy(retention_s=None, max_message_bytes=MESSAGE_BYTES)


class ForeignCatalog:
    """`KafkaCatalog` of the topics of others. Belongs to the I/O loop; `find` and `partitions` may be called from any
    thread."""

    applied_to = 0

    def __init__(self, cluster: Cluster, on_removed: Callable[[], None]) -> None:
        """`on_removed` is called after a topic was found to be gone."""
        self._cluster, self._on_removed = cluster, on_removed
        self._topics: dict[str, TopicDescription] = {}
        self._channels: dict[str, KafkaChannel] = {}
        self._asked_at = -math.inf  # on the I/O loop's clock in seconds
        self.changed: Callable[[], None] = lambda: None

    def find(self, name: str) -> KafkaChannel | None:
        return self._channels.get(name)

    def partitions(self, topic: str) -> int:
        """The number of partitions of a topic, 0 where there is none of that name, as this process knows it."""
        found = self._topics.get(topic)
        return 0 if found is None else found.partitions

    def names(self) -> list[str]:
        return [channel.name for channel in self.all()]

    def all(self) -> list[KafkaChannel]:
        return sorted(self._channels.values(), key=lambda channel: channel.place)

    async def sync(self, max_age_s: float = 0.0) -> None:
        """Ask for all topics, unless they were asked for within `max_age_s`. Raises `Unavailable`."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at > max_age_s:
            self._apply(await self._cluster.retrying("list the topics", self._describe))
            self._asked_at = now

    async def _describe(self) -> dict[str, TopicDescription]:
        """A topic is gone once no broker knows it: one that has just started may not know all."""
        topics = await self._cluster.describe_topics()
        missing = {topic for topic, known in self._topics.items() if not _same(topics.get(topic), known)}
        for node in self._cluster.nodes() if missing else ():
            seen = await self._cluster.describe_topics(node)
            still = {topic for topic in missing if _same(seen.get(topic), self._topics[topic])}
            topics |= {topic: seen[topic] for topic in still}
            missing -= still
        return topics

    async def follow(self) -> None:
        """Look for new topics and partitions, for ever. Run by one task."""
        while True:
            await asyncio.sleep(DISCOVERY_S)
            with contextlib.suppress(TidewalError):  # members tell it themselves when no broker answers
                await self.sync()

    async def bind_queue(self, group: str, channel: KafkaChannel) -> bool:
        return True

    async def unbind_queues(self, group: str) -> None:
        pass

    def _apply(self, topics: dict[str, TopicDescription]) -> None:
        before, channels = self._channels, dict[str, KafkaChannel]()
        for topic, description in topics.items():
            for number in range(description.partitions):
                name = foreign_channel(topic, number)
                known = before.get(name)
                if known is None or known.topic_id != description.id:
                    known = _channel(topic, number, description.id)
                channels[name] = known
        self._topics, self._channels = topics, channels
        gone = [channel for name, channel in before.items() if channels.get(name) is not channel]
        for channel in gone:
            channel.dropped = True
            channel.notify_dropped(was_dropped(channel))
        if gone:
            self._on_removed()
        if channels.keys() != before.keys() or gone:
            self.changed()


def _same(found: TopicDescription | None, known: TopicDescription) -> bool:
    """Whether a topic is still there; topics have no fewer partitions than before."""
    return found is not None and found.id == known.id and found.partitions >= known.partitions


def _channel(topic: str, number: int, topic_id: bytes) -> KafkaChannel:
    """The prefix of the ids tells topics of one name apart, and their partitions; it is never zero."""
    telling = topic.encode() if topic_id == NO_ID else topic_id
    digest = hashlib.blake2b(telling, digest_size=HALF_BYTES - NUMBER_BYTES).digest()
    prefix = bytes((digest[0] | 0x80,)) + digest[1:] + number.to_bytes(NUMBER_BYTES, "big")
    incarnation = int.from_bytes(prefix, "big")
    channel = KafkaChannel(foreign_channel(topic, number), incarnation, POLICY, topic, prefix)
    channel.topic_id, channel.number, channel.foreign = topic_id, number, True
    return channel
