"""Channels made, described, truncated, held and dropped: what the log does on its I/O loop beside appends and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import uuid4

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelExists, ChannelNotFound, InvalidRequest, Unavailable, of_unknown_outcome
from ...runtime.groups.positions import just_before
from ...runtime.wal import ChannelInfo, ChannelPolicy
from . import faults
from .catalog import Catalog, Channel, was_dropped
from .cluster import CONTROL, Cluster
from .fetching import last_before
from .lookup import at_time
from .options import OVERHEAD_BYTES
from .positions import ID_BYTES, offset_of
from .requests import NO_ID, may_be
from .retention import Retention
from .topics import LARGEST, configs

T = TypeVar("T")

SEEN_S = 1.0  # how long what was seen of a topic is believed; appends and readers name it by its id
ADMINISTRATION = faults.Operation.ADMINISTRATION


class Management:
    """Belongs to the I/O loop. Every call looks at the end of the catalog first, so it knows what others have done."""

    def __init__(
        self,
        cluster: Cluster,
        catalog: Catalog,
        acknowledged_to: Callable[[Channel], int],
        *,
        read_only: bool = False,
    ) -> None:
        """`acknowledged_to` is the last offset that this process was told of, -1 for none. `read_only`: no topic is
        made, and a channel is there once whoever makes it has made that."""
        self._read_only = read_only
        self._cluster, self._catalog, self._acknowledged_to = cluster, catalog, acknowledged_to
        self._retention = Retention(cluster, catalog)
        self._creating = asyncio.Lock()

    async def create(self, name: str, policy: ChannelPolicy) -> None:
        async with self._creating:
            await self._catalog.sync()
            before = self._catalog.find(name)
            found = before or await self._catalog.write_channel(name, policy)
            if found.policy != policy:
                raise ChannelExists(f"channel {name} exists with another policy", channel=name)
            try:
                await self._cluster.retrying(f"make channel {name}", lambda: self.ensure(found), ADMINISTRATION)
            except InvalidRequest:
                if before is None:
                    await self._take_back(found)
                raise
            except Unavailable as error:  # the catalog has the channel: the next one to use it makes the topic
                raise of_unknown_outcome(error) from error.__cause__

    async def _take_back(self, channel: Channel) -> None:
        """Free the name of a channel whose topic the brokers refuse, unless another process was granted the topic
        meanwhile: of the notes which topic it is the first counts, and this one names a topic that there is not."""
        nowhere = uuid4().bytes
        await self._catalog.write_made(channel, nowhere)
        if channel.topic_id == nowhere:
            await self._catalog.write_dropped(channel)

    async def names(self) -> list[str]:
        await self._catalog.sync()
        if self._read_only:
            return [channel.name for channel in self._catalog.all() if channel.topic_id is not None]
        return self._catalog.names()

    async def drop(self, name: str) -> None:
        await self._catalog.sync()
        found = self._catalog.find(name)
        if found is not None:
            await self._catalog.write_dropped(found)
            await self._cluster.retrying(f"drop channel {name}", lambda: self._delete_topic(found), ADMINISTRATION)

    async def _delete_topic(self, channel: Channel) -> None:
        """A topic that something else has made under the name is left alone. One that is not noted is ours: who made
        it did not come to that."""
        if channel.topic_id is None or may_be(await self._cluster.topic_id(channel.topic), channel.topic_id):
            await self._cluster.delete_topic(channel.topic)

    async def describe(self, name: str) -> ChannelInfo:
        channel = await self.find(name)
        first, end = await self._of(channel, lambda: self._cluster.bounds(channel.topic))
        first_id = _id(channel, first) if first < end else None
        largest = await self._of(channel, lambda: self._cluster.topic_setting(channel.topic, LARGEST))
        taken = channel.policy.max_message_bytes if largest is None else int(largest) - OVERHEAD_BYTES
        limit = self._cluster.options.largest_message(taken)
        return ChannelInfo(name, channel.policy, first_id, await self._latest(channel, end), limit)

    async def latest(self, name: str) -> bytes | None:
        channel = await self.find(name)
        _, end = await self._of(channel, lambda: self._cluster.bounds(channel.topic))
        return await self._latest(channel, end)

    async def id_at(self, name: str, timestamp: int) -> bytes | None:
        channel = await self.find(name)

        async def find() -> int | None:
            _, end = await self._cluster.bounds(channel.topic)
            return await at_time(self._cluster, channel, timestamp, end, CONTROL)

        offset = await self._of(channel, find)
        return None if offset is None else _id(channel, offset)

    async def truncate(self, name: str, id: bytes) -> None:
        channel = await self.find(name)
        await self.remove_before(channel, _offset(channel, id))

    async def before_first(self, channel: Channel) -> bytes:
        """The id just before the first entry that is kept, or will come."""
        first, _ = await self._of(channel, lambda: self._cluster.bounds(channel.topic))
        return just_before(_id(channel, first))

    async def open_to(self, group: str, channel: Channel) -> None:
        """Raise `InvalidRequest` unless a group may have a position in it."""
        if channel.policy.ephemeral:
            raise InvalidRequest(f"channel {channel.name} is ephemeral: it keeps nothing to have a position in")
        if not await self._catalog.claim(group, channel):
            raise InvalidRequest(f"channel {channel.name} is a queue, and belongs to another group")

    async def remove_before(self, channel: Channel, offset: int) -> None:
        """Let the entries before an offset go, as far as nobody holds them."""

        async def remove() -> None:
            first, end = await self._cluster.bounds(channel.topic)
            upto = min(offset, end, *channel.holds.values())
            if upto > first:
                await self._cluster.delete_before(channel.topic, upto)

        await self._of(channel, remove, ADMINISTRATION)

    async def hold(self, name: str, holder: str, id: bytes | None) -> None:
        channel = await self.find(name)
        await self._catalog.write_hold(channel, holder, None if id is None else _offset(channel, id))
        await self._retention.moved(channel)

    async def find(self, name: str) -> Channel:
        """The channel as everybody knows it. Raises `ChannelNotFound`."""
        await self._catalog.sync()
        found = self._catalog.find(name)
        if found is None:
            raise ChannelNotFound(f"no channel {name}; create it first", channel=name)
        return found

    async def ensure(self, channel: Channel) -> None:
        """Return when the topic of a channel is there: the very topic that the catalog names, as of a moment ago. Make
        it where whoever made the channel did not come so far, but never twice, and not to read only. Raises
        `ChannelNotFound` when the channel is gone or its topic is, and the library's errors."""
        now = asyncio.get_running_loop().time()
        if now - channel.seen_at > SEEN_S:
            await self._identify(channel)
            channel.seen_at = now
        if self._cluster.leader(channel.topic) is None:
            await self._cluster.refresh()
        if self._cluster.leader(channel.topic) is None:
            raise kafka_errors.StaleMetadata(f"nobody leads {channel.topic} yet")

    async def _identify(self, channel: Channel) -> None:
        found = await self._cluster.topic_id(channel.topic)
        if found is not None and (found == channel.topic_id or (found == NO_ID and channel.topic_id)):
            return
        await self._catalog.sync()
        if channel.dropped:
            raise was_dropped(channel)
        if channel.topic_id is None and self._read_only:
            raise ChannelNotFound(f"channel {channel.name} is not made to its end yet", channel=channel.name)
        if channel.topic_id is None and found is None:
            await self._cluster.create_topic(channel.topic, configs(channel.policy, self._cluster.options))
            found = await self._cluster.topic_id(channel.topic)
            if found is None:
                raise kafka_errors.StaleMetadata(f"{channel.topic} is being made")
        if found is not None and channel.topic_id in (None, NO_ID) and not self._read_only:
            await self._catalog.write_made(channel, found)
            if channel.dropped:  # in the meantime, by one who may not have seen the topic
                await self._cluster.delete_topic(channel.topic)
                raise was_dropped(channel)
        if not may_be(found, channel.topic_id):
            error = ChannelNotFound(
                f"the topic {channel.topic} of channel {channel.name} was deleted from outside, and its entries with"
                " it: drop the channel and create it again",
                channel=channel.name,
                topic=channel.topic,
            )
            channel.gone(error)
            raise error

    async def _of(
        self, channel: Channel, attempt: Callable[[], Awaitable[T]], changes: faults.Operation | None = None
    ) -> T:
        async def ensured() -> T:
            await self.ensure(channel)
            return await attempt()

        what = f"look into {channel.name}" if changes is None else f"change {channel.name}"
        return await self._cluster.retrying(what, ensured, changes)

    async def _latest(self, channel: Channel, end: int) -> bytes | None:
        """The brokers tell of what all copies have; who asks for less has been told of more."""
        latest = self._acknowledged_to(channel)
        if latest < end - 1:
            found = await self._of(channel, lambda: last_before(self._cluster, channel.topic, end, CONTROL))
            if found is None:  # all that was there is removed, or nothing was ever committed
                first, _ = await self._of(channel, lambda: self._cluster.bounds(channel.topic))
                found = end - 1 if first else -1
            latest = max(latest, found)
        return _id(channel, latest) if latest >= 0 else None


def _id(channel: Channel, offset: int) -> bytes:
    return channel.prefix + offset.to_bytes(8, "big")


def _offset(channel: Channel, id: bytes) -> int:
    """The offset of an id; that of an earlier channel of the name lies before all. Raises `InvalidRequest`."""
    offset = offset_of(id, channel.prefix)
    if offset is None:
        if len(id) == ID_BYTES and id < channel.prefix:
            return 0
        raise InvalidRequest(f"{id!r} is no message id of channel {channel.name}")
    return offset
