"""The messages of topics that are due later. They wait in the delay channel of their partition, which no retention
takes from, and are released by the node that owns it and the partition: the leader lets one node have both. So whoever
takes over a partition takes over what is pending for it, and no message passes between nodes when it is due, unless its
partition has ended (`partition_targets.py`).

While a move is under way one of the two may be here alone: nothing is released then, and what is due comes late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.topics import READY, Topic
from ...runtime.delays.delayed import DelayedMessage
from ...runtime.delays.releaser import RELEASED_BYTES, Releaser
from ...runtime.log.dead_letters import LETTER_BODY_BYTES, delayed_letter
from ...runtime.log.names import delay_channel_of, pchannel_of
from ...runtime.log.record import RecordType
from ...runtime.log.wal import Append
from ...runtime.ownership import ChannelOwner
from ...runtime.waiting import begun, ended, first_ended
from ..node import Node
from ..owners import Owners
from .partition_targets import PartitionTargets
from .topic_partitions import Propose

AGAIN_S = 10.0  # after an error that is no one's to wait out
PENDING, ENDED, RELEASED, LATE = (
    "streamingnode_delayed_message_num",
    "streamingnode_delayed_ended_message_num",
    "streamingnode_delayed_released_total",
    "streamingnode_delayed_late_seconds",
)

_log = logging.getLogger("tidewal.streamingnode")


def takes(channel: str, vchannel: str, kind: RecordType) -> bool:
    """Whether a record of that type for a partition of a topic belongs into `channel`."""
    partition = pchannel_of(vchannel)
    if kind is RecordType.MESSAGE:
        return channel == partition
    return kind in (RecordType.DELAYED, RecordType.CANCELLED) and channel == delay_channel_of(partition)


class _Running(NamedTuple):
    """A releaser, under the terms of the two channels with which it was begun."""

    terms: Hashable
    topic: str
    epoch: int
    releaser: Releaser
    task: asyncio.Task[None]


class TopicDelays:
    """Releases the delayed messages of the partitions that are open here, with their delay channels."""

    def __init__(self, node: Node, catalog: CatalogLog, owner: ChannelOwner, owners: Owners, propose: Propose) -> None:
        self._node, self._catalog, self._owner = node, catalog, owner
        self._owners, self._propose = owners, propose
        self._running: dict[str, _Running] = {}  # by delay channel

    async def run(self) -> None:
        """Release what is due, until cancelled."""
        try:
            while True:
                async with begun(self._node.local_owner.changed(), self._catalog.changed()) as changes:
                    await self._follow()
                    await first_ended(changes)
        finally:
            await self._end(list(self._running))
            self._watch()

    async def _follow(self) -> None:
        """Let there be a releaser for each pair of channels that is open, under its present terms."""
        pairs = {
            delays: (topic, partition, self._node.local_owner.terms((partition, delays)))
            for topic in self._catalog.catalog.topics
            if topic.delays and topic.state == READY
            for partition, delays in topic.delay_channels.items()
            if delays not in topic.drained
        }
        open_here = {delays: found for delays, found in pairs.items() if found[-1] is not None}
        await self._end(
            [
                delays
                for delays, running in self._running.items()
                if delays not in open_here or open_here[delays][-1] != running.terms
            ]
        )
        for delays, (topic, partition, terms) in open_here.items():
            if delays not in self._running:
                self._running[delays] = self._begin(delays, topic, partition, terms)
        self._watch()

    def _begin(self, channel: str, topic: Topic, partition: str, terms: Hashable) -> _Running:
        node = self._node
        targets = PartitionTargets(
            partition, channel, self._owner, self._owners, self._catalog, node.clock, self._propose
        )
        releaser = Releaser(
            node.wal,
            self._owner,
            channel,
            channel,
            node.clock,
            self._keep,
            targets,
            buffer_bytes=self._buffer_bytes,
            released=partial(self._count, topic.name),
        )
        task = asyncio.create_task(self._release(channel, releaser), name=f"release {channel}")
        return _Running(terms, topic.name, topic.places[partition][0], releaser, task)

    async def _release(self, channel: str, releaser: Releaser) -> None:
        while True:
            try:
                await releaser.run()
            except Exception:  # the messages of other partitions are released meanwhile
                _log.exception("what is due in %s is released again in %g s", channel, AGAIN_S)
            await asyncio.sleep(AGAIN_S)

    async def _end(self, channels: Sequence[str]) -> None:
        await ended(*(self._running.pop(channel).task for channel in channels))

    def _buffer_bytes(self) -> int:
        """The part of one releaser: never less than what it releases at once."""
        limit = self._node.settings.streaming_node.max_delay_bytes
        return max(RELEASED_BYTES, limit // max(1, len(self._running)))

    async def _keep(self, message: DelayedMessage, reason: str) -> None:
        """Keep what its partition does not take, in the dead letters."""
        channel, ts = self._node.names.dead_letters, self._node.clock.now()
        letter = delayed_letter(message.channel, message.id, message.record, reason, ts, LETTER_BODY_BYTES)
        await self._node.wal.append_many([Append(channel, letter, ts)])

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def _count(self, topic: str, messages: Sequence[DelayedMessage]) -> None:
        now_ms = self._node.clock.clock.wall_ms()
        self._node.metrics.counter(RELEASED, topic_name=topic).inc(len(messages))
        self._node.metrics.histogram(LATE).observe_all([(now_ms - message.due_ms) / 1000 for message in messages])

    def _watch(self) -> None:
        """Show what is pending, of the topics that have any channel here."""
        epochs = {topic.name: topic.epoch for topic in self._catalog.catalog.topics}
        here = {running.topic for running in self._running.values()}
        for metric in (PENDING, ENDED):
            for (topic,) in self._node.metrics.series(metric):
                if topic not in here:
                    self._node.metrics.remove(metric, topic_name=topic)
        for topic in here:
            theirs = [running for running in self._running.values() if running.topic == topic]
            ended = [running for running in theirs if running.epoch < epochs.get(topic, running.epoch)]
            for metric, counted in ((PENDING, theirs), (ENDED, ended)):
                self._node.metrics.watch(metric, partial(_pending, counted), topic_name=topic)


def _pending(counted: Sequence[_Running]) -> int:
    return sum(running.releaser.pending for running in counted)
