"""Creating, describing, truncating, holding and dropping channels, on the I/O loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import uuid4

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelNotFound, InvalidRequest, Unavailable, of_unknown_outcome
from ...runtime.groups.positions import just_before
from ...runtime.log.checks import not_found, other_policy
from ...runtime.log.wal import ChannelInfo, ChannelPolicy
from . import faults
from .catalog import ChannelCatalog, KafkaChannel, was_dropped
from .cluster import CONTROL, Cluster
from .fetching import last_before
from .lookup import at_time
from .options import OVERHEAD_BYTES
from .positions import ID_BYTES, offset_of
from .requests import NO_ID, may_be
from .retention import Retention
from .topics import LARGEST, configs

T = TypeVar("T")

SEEN_S = 1.0  # how long a topic's id is cached; appends and readers name the topic by its id
ADMINISTRATION = faults.Operation.ADMINISTRATION


class Management:
    """The channel operations. Belongs to the I/O loop. Every call reads the catalog to its end first, so it sees what
    other processes have written."""

    def __init__(
        self,
        cluster: Cluster,
        catalog: ChannelCatalog,
        acknowledged_to: Callable[[KafkaChannel], int],
        *,
        read_only: bool = False,
    ) -> None:
        """`acknowledged_to` returns the last offset of a channel that was acknowledged in this process, -1 for none.
        With `read_only` no topic is created, and a channel exists once its creator has created its topic."""
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
                raise other_policy(name)
            try:
                await self._cluster.retrying(f"make channel {name}", lambda: self.ensure(found), ADMINISTRATION)
            except InvalidRequest:
                if before is None:
                    await self._revert_creation(found)
                raise
            except Unavailable as error:  # the catalog has the channel: its next use creates the topic
                raise of_unknown_outcome(error) from error.__cause__

    async def _revert_creation(self, channel: KafkaChannel) -> None:
        """Free the name of a channel whose topic the brokers refuse, unless another process has created the topic
        meanwhile: the first recorded topic id counts, and this writes the id of a topic that does not exist."""
        nowhere = uuid4().bytes
        await self._catalog.write_topic_id(channel, nowhere)
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

    async def _delete_topic(self, channel: KafkaChannel) -> None:
        """A topic of the name with another id is left alone. A topic whose id is not recorded belongs to the channel:
        its creator ended before it recorded the id."""
        if channel.topic_id is None or may_be(await self._cluster.topic_id(channel.topic), channel.topic_id):
            await self._cluster.delete_topic(channel.topic)

    async def describe(self, name: str) -> ChannelInfo:
        channel = await self.find(name)
        first, end = await self._with_topic(channel, lambda: self._cluster.bounds(channel.topic))
        first_id = _id(channel, first) if first < end else None
        largest = await self._with_topic(channel, lambda: self._cluster.topic_setting(channel.topic, LARGEST))
        taken = channel.policy.max_message_bytes if largest is None else int(largest) - OVERHEAD_BYTES
        limit = self._cluster.options.largest_message(taken)
        return ChannelInfo(name, channel.policy, first_id, await self._latest(channel, end), limit)

    async def latest(self, name: str) -> bytes | None:
        channel = await self.find(name)
        _, end = await self._with_topic(channel, lambda: self._cluster.bounds(channel.topic))
        return await self._latest(channel, end)

    async def id_at(self, name: str, timestamp: int) -> bytes | None:
        channel = await self.find(name)

        async def find() -> int | None:
            _, end = await self._cluster.bounds(channel.topic)
            return await at_time(self._cluster, channel, timestamp, end, CONTROL)

        offset = await self._with_topic(channel, find)
        return None if offset is None else _id(channel, offset)

    async def truncate(self, name: str, id: bytes) -> None:
        channel = await self.find(name)
        await self.remove_before(channel, _offset(channel, id))

    async def before_first(self, channel: KafkaChannel) -> bytes:
        """The id just before the first entry that is kept, or the first to come."""
        first, _ = await self._with_topic(channel, lambda: self._cluster.bounds(channel.topic))
        return just_before(_id(channel, first))

    async def open_to(self, group: str, channel: KafkaChannel) -> None:
        """Raise `InvalidRequest` unless the group may have a position in the channel; a free queue is bound to it."""
        if channel.policy.ephemeral:
            raise InvalidRequest(f"channel {channel.name} is ephemeral: it keeps no entries for positions")
        if not await self._catalog.bind_queue(group, channel):
            raise InvalidRequest(f"channel {channel.name} is a queue, and bound to another group")

    async def remove_before(self, channel: KafkaChannel, offset: int) -> None:
        """Delete the entries before an offset, as far as holds allow."""

        async def remove() -> None:
            first, end = await self._cluster.bounds(channel.topic)
            upto = min(offset, end, *channel.holds.values())
            if upto > first:
                await self._cluster.delete_before(channel.topic, upto)

        await self._with_topic(channel, remove, ADMINISTRATION)

    async def hold(self, name: str, holder: str, id: bytes | None) -> None:
        channel = await self.find(name)
        await self._catalog.write_hold(channel, holder, None if id is None else _offset(channel, id))
        await self._retention.moved(channel)

    async def find(self, name: str) -> KafkaChannel:
        """The channel in the catalog as of now. Raises `ChannelNotFound`."""
        await self._catalog.sync()
        found = self._catalog.find(name)
        if found is None:
            raise not_found(name)
        return found

    async def ensure(self, channel: KafkaChannel) -> None:
        """Return when the channel's topic exists and has the id in the catalog, checked within the last `SEEN_S`.
        Create it where the creator of the channel did not, but never twice, and not with `read_only`. Raises
        `ChannelNotFound` when the channel or its topic is gone, and the library's errors."""
        now = asyncio.get_running_loop().time()
        if now - channel.seen_at > SEEN_S:
            await self._identify(channel)
            channel.seen_at = now
        if self._cluster.leader(channel.topic) is None:
            await self._cluster.refresh()
        if self._cluster.leader(channel.topic) is None:
            raise kafka_errors.StaleMetadata(f"{channel.topic} has no leader yet")

    async def _identify(self, channel: KafkaChannel) -> None:
        found = await self._cluster.topic_id(channel.topic)
        if found is not None and (found == channel.topic_id or (found == NO_ID and channel.topic_id)):
            return
        await self._catalog.sync()
        if channel.dropped:
            raise was_dropped(channel)
        if channel.topic_id is None and self._read_only:
            raise ChannelNotFound(f"the topic of channel {channel.name} is not created yet", channel=channel.name)
        if channel.topic_id is None and found is None:
            await self._cluster.create_topic(channel.topic, configs(channel.policy, self._cluster.options))
            found = await self._cluster.topic_id(channel.topic)
            if found is None:
                raise kafka_errors.StaleMetadata(f"{channel.topic} is being created")
        if found is not None and channel.topic_id in (None, NO_ID) and not self._read_only:
            await self._catalog.write_topic_id(channel, found)
            if channel.dropped:  # meanwhile, by a process that may not have seen the topic
                await self._cluster.delete_topic(channel.topic)
                raise was_dropped(channel)
        if not may_be(found, channel.topic_id):
            error = ChannelNotFound(
                f"the topic {channel.topic} of channel {channel.name} was deleted from outside, and its entries with"
                " it: drop the channel and create it again",
                channel=channel.name,
                topic=channel.topic,
            )
            channel.notify_dropped(error)
            raise error

    async def _with_topic(
        self, channel: KafkaChannel, attempt: Callable[[], Awaitable[T]], changes: faults.Operation | None = None
    ) -> T:
        async def ensured() -> T:
            await self.ensure(channel)
            return await attempt()

        what = f"read {channel.name}" if changes is None else f"change {channel.name}"
        return await self._cluster.retrying(what, ensured, changes)

    async def _latest(self, channel: KafkaChannel, end: int) -> bytes | None:
        """The last entry before `end`. The brokers report what all copies have; with acks of the leader alone, this
        process may know a later one."""
        latest = self._acknowledged_to(channel)
        if latest < end - 1:
            found = await self._with_topic(channel, lambda: last_before(self._cluster, channel.topic, end, CONTROL))
            if found is None:  # all entries are removed, or none was ever committed
                first, _ = await self._with_topic(channel, lambda: self._cluster.bounds(channel.topic))
                found = end - 1 if first else -1
            latest = max(latest, found)
        return _id(channel, latest) if latest >= 0 else None


def _id(channel: KafkaChannel, offset: int) -> bytes:
    return channel.prefix + offset.to_bytes(8, "big")


def _offset(channel: KafkaChannel, id: bytes) -> int:
    """The offset of an id, 0 for an id of an earlier channel of the name. Raises `InvalidRequest`."""
    offset = offset_of(id, channel.prefix)
    if offset is None:
        if len(id) == ID_BYTES and id < channel.prefix:
            return 0
        raise InvalidRequest(f"{id!r} is not a message id of channel {channel.name}")
    return offset
