"""Epochs of topics: the leader announces them, makes their channels, and removes those of which nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.topics import READY, Topic
from ...runtime.clock import physical_ms
from ...runtime.delays.delayed import delay_policy
from ...runtime.errors import DeadlineExceeded, TopicNotFound
from ...runtime.log.names import delay_channel_of, pchannel_of
from ..node import Node
from ..topics.group_start import carry_groups

SETTLED_S = 20.0  # for owners to end and to begin partitions: longer than a lease


class TopicEpochs:
    """What the leader does about the epochs of topics. Callers see to it that one at a time does it for a topic, but
    for `settled`. `deciding` is held while the leader decides who is to own what; `until_given_up` waits until no
    process can write to channels, and names in its error what is to be removed."""

    def __init__(
        self,
        node: Node,
        catalog: CatalogLog,
        deciding: asyncio.Lock,
        until_given_up: Callable[[str, Sequence[str]], Awaitable[None]],
    ) -> None:
        self._node, self._catalog = node, catalog
        self._deciding, self._until_given_up = deciding, until_given_up

    def present(self, id: int) -> Topic:
        """The topic of that id. Raises `TopicNotFound` unless it is ready."""
        found = self._catalog.catalog.topics.by_id(id)
        if found is None or found.state != READY:
            raise TopicNotFound("the topic was dropped", topic="" if found is None else found.name)
        return found

    async def settled(self, id: int) -> Topic:
        """The topic, once all partitions of its last epoch take messages. Raises `TopicNotFound`, and
        `DeadlineExceeded` after `SETTLED_S`."""
        try:
            async with asyncio.timeout(SETTLED_S):
                while not self.present(id).settled:
                    await self._catalog.changed()
        except TimeoutError:
            topic = self.present(id)
            raise DeadlineExceeded(
                f"topic {topic.name} takes messages in its new partitions once the owners of those before have ended "
                f"them: {', '.join(topic.unbegun or topic.coming)} have not begun",
                outcome_unknown=True,
            ) from None
        return self.present(id)

    async def announce(self, topic: Topic, partitions: int, *, hashed: bool) -> None:
        """The topic is to have an epoch of so many partitions."""
        names, epoch = self._node.names, topic.epoch + 1
        vchannels = [names.vchannel(names.topic_pchannel(topic.id, n, epoch), topic.id, n) for n in range(partitions)]
        event = {"kind": "alter_topic", "id": topic.id, "epoch": epoch, "partitions": vchannels, "hashed": hashed}
        await self._catalog.append(event)

    async def finish(self, topic: Topic) -> None:
        """Make the channels of the epoch that is to come, if any, and let it take messages."""
        if topic.coming:
            channels = list(map(pchannel_of, topic.coming))
            await asyncio.gather(*(self._node.wal.create_channel(channel, topic.policy) for channel in channels))
            if topic.delays:
                await self.make_delay_channels(topic, channels)
            await self._catalog.append({"kind": "epoch_ready", "id": topic.id, "epoch": topic.epoch + 1})

    async def make_delay_channels(self, topic: Topic, partitions: Iterable[str]) -> None:
        """Make the channels in which messages wait that are due later in these pchannels of the topic."""
        channels, policy = map(delay_channel_of, partitions), delay_policy(topic.policy)
        await asyncio.gather(*(self._node.wal.create_channel(channel, policy) for channel in channels))

    async def retire(self, topic: Topic) -> None:
        """Remove the first epoch where the topic has gone on to another, and keeps nothing of it any more: the time of
        retention has passed since its last partition ended, and the last message that was delayed there is released. A
        group that has not read it to its end has lost nothing by that which retention had not removed."""
        if not topic.retiring:
            if not self._is_past(topic):
                return
            async with self._deciding:  # no grant of its channels comes behind this
                await self._catalog.append({"kind": "retire_epoch", "id": topic.id, "epoch": topic.first_epoch})
        await self._until_given_up(f"epoch {topic.first_epoch} of topic {topic.name}", topic.first_channels)
        await carry_groups(self._node.wal, topic)
        channels = list(map(pchannel_of, topic.partitions_of(topic.first_epoch)))
        made = (*channels, *map(delay_channel_of, channels))  # a leader may have died making these
        await asyncio.gather(*(self._node.wal.drop_channel(channel) for channel in made))
        await self._catalog.append({"kind": "epoch_retired", "id": topic.id, "epoch": topic.first_epoch})

    def _is_past(self, topic: Topic) -> bool:
        if len(topic.epochs) == 1 or topic.retention_s is None or not topic.settled:
            return False
        if not topic.drained.issuperset(set(topic.delay_channels.values()).intersection(topic.first_channels)):
            return False
        ends = [topic.ends.get(pchannel_of(vchannel)) for vchannel in topic.epochs[0]]
        now_ms = physical_ms(self._node.clock.now())
        return all(end is not None and physical_ms(end.ts) + 1000 * topic.retention_s < now_ms for end in ends)
