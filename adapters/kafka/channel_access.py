"""What every call on a channel does first, and the calls that read: for own channels and foreign ones alike."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from aiokafka import errors as kafka_errors

from ...runtime.groups.positions import just_before
from ...runtime.log.checks import not_found
from ...runtime.log.wal import Append, ChannelInfo, ChannelPolicy
from . import faults
from .catalog import KafkaChannel
from .cluster import CONTROL, Cluster
from .fetching import last_before
from .lookup import at_time
from .options import OVERHEAD_BYTES
from .positions import Row
from .topics import LARGEST

T = TypeVar("T")

SEEN_S = 1.0  # how long a topic's id is cached; appends and readers name the topic by its id


class KafkaCatalog(Protocol):
    """The channels of a log as this process knows them: its catalog, or the topics of others."""

    applied_to: int
    """How far the catalog is read; channels with a higher incarnation are newer."""
    changed: Callable[[], None]
    """Called after channels may have come or gone."""

    def find(self, name: str) -> KafkaChannel | None:
        """The channel as this process knows it, which may be out of date; None for none. From any thread."""
        ...

    def names(self) -> list[str]: ...

    def all(self) -> list[KafkaChannel]:
        """The channels, by name."""
        ...

    async def sync(self) -> None:
        """Learn of all channels that there are."""
        ...

    async def bind_queue(self, group: str, channel: KafkaChannel) -> bool:
        """Bind a queue to a group, unless it is bound to another one. Returns whether the group may read the
        channel."""
        ...

    async def unbind_queues(self, group: str) -> None:
        """Remove the bindings of all queues of a group."""
        ...


class EncodedEntries(NamedTuple):
    """The columns of entries to append: channels or topics, records, and the sizes of these in bytes."""

    names: Sequence[str]
    rows: Sequence[Row]
    sizes: Sequence[int]


class ChannelAccess(ABC):
    """The calls on channels that change none. Belongs to the I/O loop. Every call learns first of what other processes
    have created."""

    def __init__(self, cluster: Cluster, catalog: KafkaCatalog, acknowledged_to: Callable[[KafkaChannel], int]) -> None:
        """`acknowledged_to` returns the last offset of a channel that was acknowledged in this process, -1 for none."""
        self._cluster, self._channels, self._acknowledged_to = cluster, catalog, acknowledged_to

    # ---- entries to append, from any thread --------------------------------------------------------------------------

    @abstractmethod
    def encode(self, entries: Sequence[Append]) -> EncodedEntries:
        """At least one entry as records. Raises `InvalidRequest`, and `Unsupported` for what channels cannot carry."""

    def route(self, encoded: EncodedEntries) -> EncodedEntries:
        """The same with the channels that the entries go to. A name stays where it is not known yet."""
        return encoded

    # ---- changes -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def create(self, name: str, policy: ChannelPolicy) -> None: ...

    @abstractmethod
    async def drop(self, name: str) -> None: ...

    @abstractmethod
    async def truncate(self, name: str, id: bytes) -> None: ...

    @abstractmethod
    async def hold(self, name: str, holder: str, id: bytes | None) -> None: ...

    @abstractmethod
    async def remove_before(self, channel: KafkaChannel, offset: int) -> None:
        """Delete the entries before an offset, as far as holds allow."""

    @abstractmethod
    async def open_to(self, group: str, channel: KafkaChannel) -> None:
        """Raise `InvalidRequest` unless the group may have a position in the channel; a free queue is bound to it."""

    @abstractmethod
    async def _identify(self, channel: KafkaChannel) -> None:
        """Return when the channel's topic exists and is the one that was opened. Raises `ChannelNotFound`, and the
        library's errors."""

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def names(self) -> list[str]:
        await self._channels.sync()
        return self._channels.names()

    async def describe(self, name: str) -> ChannelInfo:
        channel = await self.find(name)
        first, end = await self._with_topic(channel, lambda: self._cluster.bounds(*channel.place))
        first_id = _id(channel, first) if first < end else None
        largest = await self._with_topic(channel, lambda: self._cluster.topic_setting(channel.topic, LARGEST))
        taken = channel.policy.max_message_bytes if largest is None else int(largest) - OVERHEAD_BYTES
        limit = self._cluster.options.largest_message(taken)
        return ChannelInfo(name, channel.policy, first_id, await self._latest(channel, end), limit)

    async def latest(self, name: str) -> bytes | None:
        channel = await self.find(name)
        _, end = await self._with_topic(channel, lambda: self._cluster.bounds(*channel.place))
        return await self._latest(channel, end)

    async def id_at(self, name: str, timestamp: int) -> bytes | None:
        channel = await self.find(name)

        async def find() -> int | None:
            _, end = await self._cluster.bounds(*channel.place)
            return await at_time(self._cluster, channel, timestamp, end, CONTROL)

        offset = await self._with_topic(channel, find)
        return None if offset is None else _id(channel, offset)

    async def before_first(self, channel: KafkaChannel) -> bytes:
        """The id just before the first entry that is kept, or the first to come."""
        first, _ = await self._with_topic(channel, lambda: self._cluster.bounds(*channel.place))
        return just_before(_id(channel, first))

    async def subscribed(self, name: str) -> list[KafkaChannel]:
        """The channels that a member gets which subscribes to a name. Raises `ChannelNotFound`."""
        return [await self.find(name)]

    async def find(self, name: str) -> KafkaChannel:
        """The channel as of now. Raises `ChannelNotFound`."""
        await self._channels.sync()
        found = self._channels.find(name)
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
        if self._cluster.leader(*channel.place) is None:
            await self._cluster.refresh()
        if self._cluster.leader(*channel.place) is None:
            raise kafka_errors.StaleMetadata(f"{channel.topic} has no leader yet")

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
            found = await self._with_topic(
                channel, lambda: last_before(self._cluster, channel.topic, end, CONTROL, channel.number)
            )
            if found is None:  # all entries are removed, or none was ever committed
                first, _ = await self._with_topic(channel, lambda: self._cluster.bounds(*channel.place))
                found = end - 1 if first else -1
            latest = max(latest, found)
        return _id(channel, latest) if latest >= 0 else None


def _id(channel: KafkaChannel, offset: int) -> bytes:
    return channel.prefix + offset.to_bytes(8, "big")
