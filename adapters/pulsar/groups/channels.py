"""Finding the channels that a group may read, and where each begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from ....runtime.errors import ChannelNotFound, InvalidRequest
from ....runtime.groups.commands import ChannelIdentity
from ....runtime.groups.positions import just_before
from ....runtime.groups.subscriptions import Subscription
from ....runtime.log.checks import is_name, not_found
from ....runtime.log.wal import Capabilities, Delivery
from ..admin import Admin
from ..ids import MessagePlace, before_ledger, encode
from ..topics import QUEUE_PROPERTY, PulsarTopic, TopicContents, channel_of, is_foreign

T = TypeVar("T")


class FinderSource(Protocol):
    """What finding channels needs of the WAL; `contents` and `last` block."""

    @property
    def admin(self) -> Admin: ...

    capabilities: Capabilities

    async def blocking(self, call: Callable[[], T]) -> T: ...

    def contents(self, channel: str) -> TopicContents: ...

    def last(self, channel: str) -> MessagePlace: ...


class ChannelFinder:
    """Looks channels up for groups. A queue is bound to the first group that asks for it, in a property of its
    topic."""

    def __init__(self, source: FinderSource) -> None:
        self._source = source

    async def names(self) -> list[str]:
        """The names of possible channels: some may be topics that Tidewal did not create."""
        topics = await self._source.blocking(self._source.admin.topics)
        fits = is_foreign if self._source.capabilities.foreign_topics else is_name
        return [channel for channel in map(channel_of, topics) if fits(channel)]

    async def asked_for(self, group: str, channels: Sequence[str]) -> dict[str, ChannelIdentity]:
        """The channels that the group may read of `channels`, which are names and patterns. Raises `ChannelNotFound`
        and `InvalidRequest` for a name that the group may not read."""
        subscription = Subscription(channels)
        named = (
            await self._partitions(subscription)
            if self._source.capabilities.foreign_topics
            else sorted(subscription.names)
        )
        found = dict(zip(named, await asyncio.gather(*(self.named(group, name) for name in named)), strict=True))
        if any("*" in channel for channel in channels):
            others = [name for name in await self.names() if name not in found and subscription.takes(name)]
            matched = await self.look_at(group, others)
            found |= {name: each for name, each in matched.items() if each is not None}
        return found

    async def _partitions(self, subscription: Subscription) -> list[str]:
        """The channels of the foreign topics that are named. Raises `ChannelNotFound`."""
        there = await self.names()
        named = {
            channel for name in subscription.names for channel in there if name in (channel, channel.split(":")[0])
        }
        missing = sorted(subscription.names - named - {channel.split(":")[0] for channel in named})
        if missing:
            raise not_found(missing[0])
        return sorted(named)

    async def named(self, group: str, channel: str) -> ChannelIdentity:
        """The channel, with a free queue bound to the group. Raises `ChannelNotFound`, and `InvalidRequest` where the
        group may not read it."""
        return await self._source.blocking(partial(self._find, group, channel))

    async def look_at(self, group: str, channels: Iterable[str]) -> dict[str, ChannelIdentity | None]:
        """The channels of these names; None for a name without channel, or of one that the group may not read."""
        names = list(channels)

        async def look(channel: str) -> ChannelIdentity | None:
            try:
                return await self.named(group, channel)
            except (ChannelNotFound, InvalidRequest):
                return None

        return dict(zip(names, await asyncio.gather(*map(look, names)), strict=True))

    async def unbind_queues(self, group: str, queues: Sequence[str]) -> None:
        """Remove the bindings of these queues to the group."""

        def unbind_queues(channel: str) -> None:
            if self._source.contents(channel).queue_of == group:
                self._source.admin.set_property(PulsarTopic(channel), QUEUE_PROPERTY, "")

        for channel in queues:
            try:
                await self._source.blocking(partial(unbind_queues, channel))
            except ChannelNotFound:
                continue

    def _find(self, group: str, channel: str) -> ChannelIdentity:
        contents = self._source.contents(channel)
        assert contents.policy is not None
        if contents.policy.ephemeral:
            raise InvalidRequest(f"channel {channel} is ephemeral: it keeps no entries for positions")
        queue = contents.policy.delivery is Delivery.QUEUE
        if queue and contents.queue_of != group:
            self._bind_queue(group, channel, contents.queue_of)
        first, last = contents.first, self._source.last(channel)
        begin = before_ledger(contents.end.ledger) if first is None else just_before(encode(first))
        if last.entry >= 0:  # everything may be truncated
            begin = min(begin, encode(last))
        return ChannelIdentity(
            contents.incarnation, contents.end.ledger, begin, begin if last.entry < 0 else encode(last), queue
        )

    def _bind_queue(self, group: str, channel: str, owner: str) -> None:
        if not owner:
            self._source.admin.set_property(PulsarTopic(channel), QUEUE_PROPERTY, group)
            owner = self._source.contents(channel).queue_of  # of several groups that ask at once the last one has it
        if owner != group:
            raise InvalidRequest(f"channel {channel} is a queue, and bound to another group")
