"""Creating, describing, truncating, holding and dropping channels, on the I/O loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelNotFound, InvalidRequest, Unavailable, of_unknown_outcome
from ...runtime.log.checks import check_plain, other_policy
from ...runtime.log.payloads import as_bytes, check_timestamps
from ...runtime.log.wal import Append, ChannelPolicy
from . import faults
from .catalog import ChannelCatalog, KafkaChannel, was_dropped
from .channel_access import ChannelAccess, EncodedEntries
from .cluster import Cluster
from .positions import ID_BYTES, offset_of, to_rows
from .requests import NO_ID, may_be
from .retention import Retention
from .topics import configs

ADMINISTRATION = faults.Operation.ADMINISTRATION


class Management(ChannelAccess):
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
        super().__init__(cluster, catalog, acknowledged_to)
        self._catalog, self._read_only = catalog, read_only
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

    async def truncate(self, name: str, id: bytes) -> None:
        channel = await self.find(name)
        await self.remove_before(channel, _offset(channel, id))

    async def open_to(self, group: str, channel: KafkaChannel) -> None:
        if channel.policy.ephemeral:
            raise InvalidRequest(f"channel {channel.name} is ephemeral: it keeps no entries for positions")
        if not await self._catalog.bind_queue(group, channel):
            raise InvalidRequest(f"channel {channel.name} is a queue, and bound to another group")

    async def remove_before(self, channel: KafkaChannel, offset: int) -> None:
        async def remove() -> None:
            first, end = await self._cluster.bounds(*channel.place)
            upto = min(offset, end, *channel.holds.values())
            if upto > first:
                await self._cluster.delete_before(channel.topic, upto)

        await self._with_topic(channel, remove, ADMINISTRATION)

    async def hold(self, name: str, holder: str, id: bytes | None) -> None:
        channel = await self.find(name)
        await self._catalog.write_hold(channel, holder, None if id is None else _offset(channel, id))
        await self._retention.moved(channel)

    def encode(self, entries: Sequence[Append]) -> EncodedEntries:
        names, payloads, timestamps, keys, headers = zip(*entries, strict=True)
        check_plain(keys, headers)
        check_timestamps(timestamps)
        payloads = payloads if set(map(type, payloads)) == {bytes} else tuple(map(as_bytes, payloads))
        rows = to_rows(timestamps, payloads, int(time.time() * 1000))
        return EncodedEntries(names, rows, list(map(len, payloads)))

    async def _identify(self, channel: KafkaChannel) -> None:
        noted = channel.topic_id
        found = await self._cluster.topic_id(channel.topic)
        if found is not None and (found == channel.topic_id or (found == NO_ID and channel.topic_id)):
            return
        await self._catalog.sync()
        if channel.dropped:
            raise was_dropped(channel)
        if channel.topic_id != noted:  # another process has created the topic, perhaps since it was looked for
            found = await self._cluster.topic_id(channel.topic)
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


def _offset(channel: KafkaChannel, id: bytes) -> int:
    """The offset of an id, 0 for an id of an earlier channel of the name. Raises `InvalidRequest`."""
    offset = offset_of(id, channel.prefix)
    if offset is None:
        if len(id) == ID_BYTES and id < channel.prefix:
            return 0
        raise InvalidRequest(f"{id!r} is not a message id of channel {channel.name}")
    return offset
