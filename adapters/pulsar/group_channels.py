"""Which channels a group may read, and where each begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from ...runtime.errors import ChannelNotFound, InvalidRequest
from ...runtime.groups.positions import just_before
from ...runtime.groups.subscriptions import Subscription
from ...runtime.wal import Delivery
from .admin import Admin
from .group_records import Found
from .ids import Place, before_ledger, encode
from .topics import QUEUE_PROPERTY, Survey, Topic, channel_of, is_name

T = TypeVar("T")


class Source(Protocol):
    """What finding channels needs of the WAL; `survey` and `last` block."""

    @property
    def admin(self) -> Admin: ...

    async def blocking(self, call: Callable[[], T]) -> T: ...

    def survey(self, channel: str) -> Survey: ...

    def last(self, channel: str) -> Place: ...


class Finder:
    """Looks channels up for groups. A queue belongs to the first group that asks for it: that is a property of its
    topic."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def names(self) -> list[str]:
        """What may be channels, by name: there may be topics that Tidewal did not make."""
        topics = await self._source.blocking(self._source.admin.topics)
        return [channel for channel in map(channel_of, topics) if is_name(channel)]

    async def asked_for(self, group: str, channels: Sequence[str]) -> dict[str, Found]:
        """The channels that the group may read of those, named or matched. Raises `ChannelNotFound` and
        `InvalidRequest` for a name."""
        subscription = Subscription(channels)
        named = sorted(subscription.names)
        found = dict(zip(named, await asyncio.gather(*(self.named(group, name) for name in named)), strict=True))
        if any("*" in channel for channel in channels):
            others = [name for name in await self.names() if name not in found and subscription.takes(name)]
            matched = await self.look_at(group, others)
            found |= {name: each for name, each in matched.items() if each is not None}
        return found

    async def named(self, group: str, channel: str) -> Found:
        """The channel. Raises `ChannelNotFound`, `InvalidRequest`."""
        return await self._source.blocking(partial(self._find, group, channel))

    async def look_at(self, group: str, channels: Iterable[str]) -> dict[str, Found | None]:
        """The channels of these names; None for what is none, or none that the group may read."""
        names = list(channels)

        async def look(channel: str) -> Found | None:
            try:
                return await self.named(group, channel)
            except (ChannelNotFound, InvalidRequest):
                return None

        return dict(zip(names, await asyncio.gather(*map(look, names)), strict=True))

    async def let_go(self, group: str, queues: Sequence[str]) -> None:
        """Let other groups have the group's queues."""

        def let_go(channel: str) -> None:
            if self._source.survey(channel).queue_of == group:
                self._source.admin.set_property(Topic(channel), QUEUE_PROPERTY, "")

        for channel in queues:
            try:
                await self._source.blocking(partial(let_go, channel))
            except ChannelNotFound:
                continue

    def _find(self, group: str, channel: str) -> Found:
        survey = self._source.survey(channel)
        assert survey.policy is not None
        if survey.policy.ephemeral:
            raise InvalidRequest(f"channel {channel} is ephemeral: it keeps nothing to have a position in")
        queue = survey.policy.delivery is Delivery.QUEUE
        if queue and survey.queue_of != group:
            self._claim(group, channel, survey.queue_of)
        first, last = survey.first, self._source.last(channel)
        begin = before_ledger(survey.end.ledger) if first is None else just_before(encode(first))
        if last.entry >= 0:  # everything may be truncated
            begin = min(begin, encode(last))
        return Found(survey.made, survey.end.ledger, begin, begin if last.entry < 0 else encode(last), queue)

    def _claim(self, group: str, channel: str, owner: str) -> None:
        if not owner:
            self._source.admin.set_property(Topic(channel), QUEUE_PROPERTY, group)
            owner = self._source.survey(channel).queue_of  # of several who ask at once the last has it
        if owner != group:
            raise InvalidRequest(f"channel {channel} is a queue, and belongs to another group")
