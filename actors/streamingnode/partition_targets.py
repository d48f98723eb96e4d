"""Into which partitions of a topic the messages of one delay channel are released, as the topic grows and shrinks.

What is pending when a partition ends stays in its delay channel, under its ids, and is released into the partitions of
the present epoch, also those of other owners. Each of these knows how far it has come with the delay channel, as with
a source. A message is released where, in any epoch from its own on, its partition has come as far as its id: so an
epoch gets messages only once those before have ended, what they have is final, and the delay channel says so.

Two kinds of notes in the delay channel say it (`note_offset`): into which epoch is released, and how far partitions
have come, where that is further than the id up to which all is done: those of the epochs before, and of the present one
where another takes so long, or who released was killed, that retention might remove what one knows of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.topics import READY, Topic
from ...runtime.clock import HybridClock
from ...runtime.delays.delayed import DelayedMessage
from ...runtime.delays.targets import note_offset, source_in
from ...runtime.errors import TidewalError, TopicEpochEnded, Unavailable
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record
from ...runtime.ownership import ChannelOwner
from ...runtime.rows.hashing import hash_key_bytes
from ..owners import Owners
from .topic_partitions import Propose

EPOCH = ".epoch"  # with it a delay channel is the source of numbers of epochs

_log = logging.getLogger("tidewal.streamingnode")


def later_partition(topic: Topic, partition: str, key: bytes, epoch: int) -> str:
    """The pchannel in that epoch of `topic` for a message with `key` of the pchannel `partition` in an epoch before. It
    is the one of its key, where the hash of the key has placed it; else, as without a key or by a partitioner of the
    sender's own, that of the same number, modulo how many there are."""
    before, number = topic.places[partition]
    later, hashed = topic.partitions_of(epoch), hash_key_bytes(key)
    place = hashed if hashed % len(topic.partitions_of(before)) == number else number
    return pchannel_of(later[place % len(later)])


class PartitionTargets:
    """The `ReleaseTargets` of the delay channel `channel`, of `partition`, which `owner` owns both. `propose` writes an
    event of this node's about some channels into the catalog."""

    def __init__(
        self,
        partition: str,
        channel: str,
        owner: ChannelOwner,
        owners: Owners,
        catalog: CatalogLog,
        clock: HybridClock,
        propose: Propose,
    ) -> None:
        self._partition, self._channel = partition, channel
        self._owner, self._owners, self._catalog = owner, owners, catalog
        self._clock, self._propose = clock, propose
        self._first: int = self._topic.places[partition][0]
        noted = int.from_bytes(owner.source_offset(channel + EPOCH, channel), "big")
        self._epoch: int = max(self._first, noted)  # into which is released
        self._is_over = False  # what one of its partitions has said
        self._closed_ts = 0  # no message was stored in the delay channel from then on; 0 while some are
        self._reached: dict[str, bytes] = {}  # by target: up to which id it has all
        self._after: dict[str, bytes] = {}  # the same, where nothing is on its way

    @property
    def _topic(self) -> Topic:
        """The topic. Raises `Unavailable` where it is dropped."""
        topic = self._catalog.catalog.topics.of_channel(self._partition)
        if topic is None or topic.state != READY:
            raise Unavailable(f"the topic of {self._partition} is not there")
        return topic

    def reached(self, channel: str) -> bytes:
        """`ReleaseTargets.reached`: what the channel of the messages, their own partition, has, and what is done."""
        return max(self._done, self._owner.source_offset(self._channel, channel))

    @property
    def _done(self) -> bytes:
        """Up to which id all is done."""
        return self._owner.source_offset(self._channel, self._channel)

    # ---- epochs -----------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """`ReleaseTargets.settle`: go on to the present epoch, once all that may have got messages have ended."""
        while self._is_over and self._topic.epoch == self._epoch:  # their owner has read more of the catalog
            await self._catalog.changed()
        if self._topic.epoch == self._epoch:
            return
        while any(each not in self._topic.ends for each in self._targets()):
            await self._catalog.changed()
        ended = self._targets()
        for target, offset in zip(ended, await asyncio.gather(*map(self._ask, ended)), strict=True):
            await self._note(target, offset)
        epoch = self._topic.epoch
        await note_offset(self._owner, self._channel + EPOCH, self._channel, epoch.to_bytes(8, "big"))
        self._epoch, self._is_over = epoch, False
        self._reached, self._after = {}, {}

    async def note_reached(self) -> None:
        """`ReleaseTargets.note_reached`."""
        own = self._owner.source_offset(self._channel, self._partition)
        for target, offset in {**self._reached, self._partition: own}.items():
            await self._note(target, offset)

    async def _note(self, target: str, offset: bytes) -> None:
        """Store in the delay channel how far a target has come."""
        if target == self._partition:
            await note_offset(self._owner, self._channel, self._channel, offset)
        elif offset > self._done:
            await note_offset(self._owner, source_in(self._channel, target), self._channel, offset)

    def _targets(self) -> list[str]:
        """The pchannels of the epoch into which is released that may get messages."""
        if self._epoch == self._first:
            return [self._partition]
        return list(map(pchannel_of, self._topic.partitions_of(self._epoch)))

    # ---- messages ---------------------------------------------------------------------------------------------------

    def divided(self, messages: Sequence[DelayedMessage]) -> Mapping[str, list[DelayedMessage]]:
        """`ReleaseTargets.divided`."""
        reached = self.reached(self._partition)
        left = [each for each in messages if each.id > reached]
        if self._epoch == self._first:
            return {self._partition: left} if left else {}
        topic, found = self._topic, dict[str, list[DelayedMessage]]()

        @cache
        def noted(target: str) -> bytes:
            return self._owner.source_offset(source_in(self._channel, target), self._channel)

        for message in left:
            key, epochs = message.record.key, range(self._first + 1, self._epoch + 1)
            targets = [later_partition(topic, self._partition, key, epoch) for epoch in epochs]
            if all(message.id > noted(target) for target in targets):
                found.setdefault(targets[-1], []).append(message)
        return found

    async def append(self, target: str, messages: Sequence[DelayedMessage]) -> None:
        """`ReleaseTargets.append`."""
        after = self._after.pop(target, None)
        if after is None:
            after = await self._ask(target)
        reached = self._reached[target] = max(after, self._reached.get(target, b""))
        records = [(each.id, self._moved(each, target)) for each in messages if each.id > reached]
        if records:
            try:
                after = await self._owners.append_from(self._channel, target, records, after=after)
            except TopicEpochEnded:
                self._is_over = True
                raise
        self._after[target] = after
        self._reached[target] = max(after, reached)

    def _moved(self, message: DelayedMessage, target: str) -> Record:
        """What the target gets of a message: its own, where it comes from a partition that has ended."""
        if target == self._partition:
            return message.record
        epoch, number = self._topic.places[target]
        return replace(message.record, vchannel=self._topic.partitions_of(epoch)[number])

    async def _ask(self, target: str) -> bytes:
        """How far a target has come."""
        return await self._owners.append_from(self._channel, target, (), after=b"")

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def nothing_pending(self, time: int) -> None:
        """`ReleaseTargets.nothing_pending`: where the partition has ended, the delay channel is needed no more."""
        if self._topic.epoch == self._first or self._channel in self._topic.drained:
            return
        if not self._closed_ts:  # this owner takes nothing for it from here on
            self._closed_ts = self._clock.now()
        elif time >= self._closed_ts:
            term = self._catalog.catalog.channels[self._channel].term
            try:
                await self._propose("delays_drained", {self._channel: (term,)})
            except TidewalError as error:
                _log.info("that nothing is pending in %s is noted later: %s", self._channel, error)
