"""The calls on topics that others made: entries with keys and headers, and nothing that changes a topic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from aiokafka import partitioner

from ...runtime.clock import LOGICAL_BITS
from ...runtime.errors import ChannelNotFound, InvalidRequest, Unsupported
from ...runtime.log.payloads import as_bytes
from ...runtime.log.wal import Append, ChannelPolicy, Tombstone
from .catalog import KafkaChannel, was_dropped
from .channel_access import SEEN_S, ChannelAccess, EncodedEntries
from .cluster import Cluster
from .foreign_catalog import ForeignCatalog
from .positions import Row
from .topics import foreign_channel, place_of

_BYTES_OR_NONE: set[type] = {bytes, type(None)}
KEYS = 64 * 1024  # whose partition is remembered: hashing is a loop in Python

murmur2: Callable[[bytes], int] = cast(Any, partitioner).murmur2


class ForeignManagement(ChannelAccess):
    """`ChannelAccess` to the topics of others. Belongs to the I/O loop but for `encode` and `route`."""

    def __init__(
        self, cluster: Cluster, catalog: ForeignCatalog, acknowledged_to: Callable[[KafkaChannel], int]
    ) -> None:
        super().__init__(cluster, catalog, acknowledged_to)
        self._catalog = catalog
        self._turns = itertools.count()  # of submits without keys

    # ---- entries to append -------------------------------------------------------------------------------------------

    def encode(self, entries: Sequence[Append]) -> EncodedEntries:
        rows = list(map(_row, entries))
        return EncodedEntries([entry.channel for entry in entries], rows, list(map(_size, rows)))

    def route(self, encoded: EncodedEntries) -> EncodedEntries:
        """A key decides the partition as in the Java client; the entries without keys of one submit go to one
        partition, those of the next to the next one."""
        names, rows, _ = encoded
        counts = {name: self._catalog.partitions(name) for name in set(names)}
        if not any(counts.values()):
            return encoded
        turn = next(self._turns)
        routed: list[str] = []
        for name, row in zip(names, rows, strict=True):
            if count := counts[name]:
                key = row[1]
                number = turn % count if key is None else _hash(key) % count
                routed.append(foreign_channel(name, number))
            else:
                routed.append(name)
        return encoded._replace(names=routed)

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def subscribed(self, name: str) -> list[KafkaChannel]:
        """The channel of the name, or those of the topic of the name. Raises `ChannelNotFound`."""
        await self._catalog.sync()
        found = [self._catalog.find(each) for each in (name, *self._names_of(name))]
        channels = [channel for channel in found if channel is not None]
        if not channels:
            raise self._not_found(name)
        return channels

    async def find(self, name: str) -> KafkaChannel:
        await self._catalog.sync()
        found = self._catalog.find(name)
        if found is None:
            raise self._not_found(name)
        return found

    def _names_of(self, topic: str) -> list[str]:
        return [foreign_channel(topic, number) for number in range(self._catalog.partitions(topic))]

    def _not_found(self, name: str) -> ChannelNotFound:
        topic, _ = place_of(name)
        count = self._catalog.partitions(topic)
        if count and topic == name:
            found = f"{name} is a topic: its channels are {foreign_channel(topic, 0)} to {count - 1}"
        elif count:
            found = f"no channel {name}: topic {topic} has {count} partitions"
        else:
            found = f"no topic {topic}, or it may not be read: topics of others are made by their own tools"
        return ChannelNotFound(found, channel=name)

    async def _identify(self, channel: KafkaChannel) -> None:
        await self._catalog.sync(SEEN_S)
        if channel.dropped:
            raise was_dropped(channel)

    async def open_to(self, group: str, channel: KafkaChannel) -> None:
        pass

    # ---- what would change a topic -----------------------------------------------------------------------------------

    async def create(self, name: str, policy: ChannelPolicy) -> None:
        raise _unsupported("create_channel")

    async def drop(self, name: str) -> None:
        raise _unsupported("drop_channel")

    async def truncate(self, name: str, id: bytes) -> None:
        raise _unsupported("truncate")

    async def hold(self, name: str, holder: str, id: bytes | None) -> None:
        raise _unsupported("hold")

    async def remove_before(self, channel: KafkaChannel, offset: int) -> None:
        raise _unsupported("removing entries")


def _unsupported(call: str) -> Unsupported:
    return Unsupported(
        f"{call} would change a topic that others made (?topics=foreign): use the tools of its owner",
        capability="foreign_topics",
    )


def _row(entry: Append) -> Row:
    _, payload, timestamp, key, headers = entry
    if not {type(key), *(type(value) for _, value in headers)} <= _BYTES_OR_NONE:
        raise InvalidRequest("keys and the values of headers are bytes or None: encode them first")
    value = None if isinstance(payload, Tombstone) else as_bytes(payload)
    return timestamp >> LOGICAL_BITS or None, key, value, list(headers)


def _size(row: Row) -> int:
    _, key, value, headers = row
    return len(value or b"") + len(key or b"") + sum(len(name) + len(text or b"") for name, text in headers)


@lru_cache(maxsize=KEYS)
def _hash(key: bytes) -> int:
    """The hash of the Java client's partitioner."""
    return murmur2(key) & 0x7FFFFFFF
