"""The catalog of a log: a compacted topic with its channels, their holds, and the group to which each queue is bound.
Every process with the log open follows it.

Each attempt to create a channel writes a record under a key of its own; the earliest record of a name is the channel,
and the writers of the others delete theirs. Compaction keeps the last record of each key at its offset, so the offset
of the creation record identifies the channel for ever: its *incarnation*.

A record that cannot be decoded is logged and skipped. One with a higher version (`v`, where it is not 1) than this
Tidewal knows ends following with `FormatTooNew`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

from aiokafka import errors as kafka_errors

from ...runtime.errors import (
    BadRecord,
    ChannelNotFound,
    CorruptLog,
    FormatTooNew,
    TidewalError,
    Unavailable,
    check_version,
)
from ...runtime.log.policy_codec import decode_policy, encode_policy
from ...runtime.log.record import DECODE_ERRORS
from ...runtime.log.wal import ChannelPolicy, Delivery
from . import faults
from .cluster import LATEST, PARTITION, PAUSE_S, Cluster
from .fetching import fetch, records
from .positions import Row, prefix
from .requests import NO_ID, may_be
from .sender import Sender
from .topics import UNPACKED_BYTES, catalog_configs, catalog_topic, channel_topic, channel_topics

CHANNEL, TOPIC, HOLD, QUEUE = "channel", "topic", "hold", "queue"
VERSION = 1
REPORTED_AFTER_S = 3.0  # of failing: a topic that was just made, or whose leader moves, has none for a moment

OnDropped: TypeAlias = Callable[[ChannelNotFound], None]  # called on the I/O loop when a channel is dropped

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class KafkaChannel:
    """The state of one channel in the catalog. `holds` are offsets by holder; `queue_bindings` are, by group that asked
    for a queue, the catalog offset of its request. `topic_ids` are ids of topics by record key, see `_deciding_key`.

    A `foreign` one is partition `number` of a topic that Tidewal did not make (`foreign_catalog.py`): there is no
    record of it in a catalog."""

    name: str
    incarnation: int
    policy: ChannelPolicy
    topic: str
    prefix: bytes
    holds: dict[str, int] = field(default_factory=dict[str, int])
    dropped: bool = False
    listeners: set[OnDropped] = field(default_factory=set[OnDropped])
    queue_bindings: dict[str, int] = field(default_factory=dict[str, int])
    topic_ids: dict[str, bytes] = field(default_factory=dict[str, bytes])
    topic_id: bytes | None = None  # None until the topic is created
    seen_at: float = -math.inf  # when the topic last had this id, on the I/O loop's clock in seconds
    number: int = PARTITION
    foreign: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """The topic and the number of the partition in it."""
        return self.topic, self.number

    @property
    def key(self) -> str:
        """The partition in one word, see `topics.place_of`: the topic of an own channel, which has one partition."""
        return self.name if self.foreign else self.topic

    def notify_dropped(self, error: ChannelNotFound) -> None:
        """Notify the listeners that the channel is gone, with the error for their callers."""
        for listener in list(self.listeners):
            listener(error)

    @property
    def queue_of(self) -> str | None:
        """The group to which a queue is bound: the first that asked for it; None for none."""
        return min(self.queue_bindings, key=self.queue_bindings.__getitem__, default=None)


class ChannelCatalog:
    """Follows the catalog's topic and writes to it. Belongs to the I/O loop; `find` may be called from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        connections: tuple[int, int],
        on_removed: Callable[[], None],
        *,
        read_only: bool = False,
    ) -> None:
        """`connections` are the connections for following and for writing. `on_removed` is called after a channel was
        dropped. With `read_only` the catalog's topic is not created."""
        self._cluster, self._read_only = cluster, read_only
        self._topic = catalog_topic(cluster.options.prefix)
        self._reading, writing = connections
        self._topic_id: bytes | None = None
        self._ended: TidewalError | None = None
        self._sender = Sender(cluster, self._topic, writing, self._check_topic, topic_id=lambda: self._topic_id)
        self._on_removed = on_removed
        self._lock = asyncio.Lock()
        self._created: dict[str, dict[str, KafkaChannel]] = {}  # by name, then by key of the record
        self._channels: dict[str, KafkaChannel] = {}
        self._holds: dict[int, dict[str, int]] = {}  # by incarnation, then by holder
        self._queue_bindings: dict[int, dict[str, int]] = {}  # by incarnation, then by group
        self._by_incarnation: dict[int, KafkaChannel] = {}
        self.applied_to: int = 0  # the catalog offset up to which records are applied here
        self.changed: Callable[[], None] = lambda: None  # called after records were applied
        self._moved = asyncio.Event()

    def find(self, name: str) -> KafkaChannel | None:
        """The channel as this process knows it, which may be out of date; None for none."""
        return self._channels.get(name)

    def names(self) -> list[str]:
        return sorted(self._channels)

    def all(self) -> list[KafkaChannel]:
        """The channels, by name."""
        return [self._channels[name] for name in self.names()]

    async def open(self) -> None:
        """Find the catalog's topic, or create it where there is none. Raises `Unavailable` where it may not be created
        (`read_only`), and `CorruptLog` where it is missing and topics of channels exist."""
        self._topic_id = await self._cluster.retrying("find the catalog", self._find_topic)

    async def sync(self) -> None:
        """Return when all records that were written before the call are applied. Raises `Unavailable`, `CorruptLog`."""
        end = await self._cluster.retrying("read the catalog's end", self._end)
        await self._until(end)

    async def write_channel(self, name: str, policy: ChannelPolicy) -> KafkaChannel:
        """Create a channel, or return the one of this name that another process created first."""
        while True:
            key = f"{CHANNEL}/{name}/{uuid4().hex}"
            await self._write([(key, {"policy": encode_policy(policy)})])
            found, own = self._channels.get(name), self._created.get(name, {}).get(key)
            if own is not None and own is not found:
                await self._write([(key, None)])
            if found is not None:  # otherwise it was dropped meanwhile
                return found

    async def write_dropped(self, channel: KafkaChannel) -> None:
        """Delete a channel's records: all attempts to create one of its name, its holds, bindings and topic ids."""
        keys = [
            *self._created.get(channel.name, {}),
            *(_hold_key(channel, holder) for holder in channel.holds),
            *(_queue_key(channel, group) for group in channel.queue_bindings),
            *channel.topic_ids,
        ]
        await self._write([(key, None) for key in keys])

    async def write_topic_id(self, channel: KafkaChannel, topic_id: bytes) -> None:
        """Record the id of the topic that was created for a channel, unless another process recorded one first."""
        key = f"{TOPIC}/{channel.incarnation}/{uuid4().hex}"
        await self._write([(key, {"id": topic_id.hex()})])
        if key != _deciding_key(channel.topic_ids):
            await self._write([(key, None)])

    async def write_hold(self, channel: KafkaChannel, holder: str, offset: int | None) -> None:
        """Record that `holder` needs the entries from `offset` on; None removes the hold."""
        await self._write([(_hold_key(channel, holder), None if offset is None else {"offset": offset})])

    async def bind_queue(self, group: str, channel: KafkaChannel) -> bool:
        """Bind a queue to a group, unless it is bound to another one. Returns whether the group may read the
        channel."""
        if channel.policy.delivery is not Delivery.QUEUE:
            return True
        owner = channel.queue_of
        if owner is None:
            await self._write([(_queue_key(channel, group), {})])
            owner = min(channel.queue_bindings, key=channel.queue_bindings.__getitem__)
            if owner != group:
                await self._write([(_queue_key(channel, group), None)])
        return owner == group

    async def unbind_queues(self, group: str) -> None:
        """Remove the bindings of all queues of a group."""
        bound = [channel for channel in self.all() if group in channel.queue_bindings]
        await self._write([(_queue_key(channel, group), None) for channel in bound])

    async def follow(self) -> None:
        """Apply the records of the catalog as they are written, until the catalog is lost, or has a record of a newer
        Tidewal. Run by one task."""
        failing_since: float | None = None
        reported = False
        while True:
            try:
                known_as = self._topic_id or NO_ID
                fetched = await fetch(self._cluster, self._topic, self.applied_to, self._reading, topic_id=known_as)
                for record in records(fetched.batches, self.applied_to, UNPACKED_BYTES):
                    self._apply(record.offset, record.key or b"", record.value)
                    self.applied_to = record.offset + 1
                self.applied_to = fetched.next_offset
            except FormatTooNew as error:
                self._end_following(error)
                return
            except Exception as error:  # any error: every call on the catalog waits for this task
                now_s = time.monotonic()
                failing_since = now_s if failing_since is None else failing_since
                if not reported and now_s - failing_since >= REPORTED_AFTER_S:
                    reported = True
                    _log.warning("the catalog %s cannot be read: %r", self._topic, error)
                await asyncio.sleep(PAUSE_S)
                await self._cluster.refresh()
                if await self._is_lost(error):
                    return
                continue
            failing_since = None
            if reported:
                reported = False
                _log.warning("the catalog %s is read again", self._topic)
            self._wake()
            if fetched.batches:
                self.changed()

    def _end_following(self, error: TidewalError) -> None:
        self._ended = error
        self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _check_followed(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def _end(self) -> int:
        self._check_followed()
        return await self._cluster.offset(self._topic, LATEST) or 0

    async def _until(self, offset: int) -> None:
        try:
            async with asyncio.timeout(self._cluster.options.delivery_timeout_s):
                while self.applied_to < offset:
                    self._check_followed()
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable(f"the catalog {self._topic} cannot be read") from None

    async def _write(self, changes: Sequence[tuple[str, Mapping[str, object] | None]]) -> None:
        """Write records and return when they are applied here. Raises what has ended following."""
        self._check_followed()
        rows: list[Row] = [
            (None, key.encode(), None if value is None else json.dumps(value).encode(), []) for key, value in changes
        ]
        if rows:
            async with self._lock:
                offset = await self._sender.send(self._sender.batch(rows))
            await self._until(offset + len(rows))

    # ---- its own topic -----------------------------------------------------------------------------------------------

    async def _find_topic(self) -> bytes:
        orphans = channel_topics(
            self._cluster.options.prefix, self._cluster.topics()
        )  # looked up first: another process may create the catalog now
        found = await self._cluster.topic_id(self._topic)
        if found is None:
            if orphans:
                raise self._gone(f"while there are topics of channels, {orphans[0]} among them")
            if self._read_only:
                raise Unavailable(
                    f"there is no log to read, for there is no topic {self._topic}: check brokers and prefix, or start "
                    "a node, which creates it"
                )
            await self._cluster.create_topic(self._topic, catalog_configs(self._cluster.options))
            found = await self._cluster.topic_id(self._topic)
        if self._cluster.leader(self._topic) is None:
            await self._cluster.refresh()
        if found is None or self._cluster.leader(self._topic) is None:
            raise kafka_errors.StaleMetadata(f"{self._topic} has no leader")
        return found

    async def _check_topic(self) -> None:
        """Raise `CorruptLog` when the topic is not the one that was opened."""
        if not may_be(await self._cluster.topic_id(self._topic), self._topic_id):
            self._end_following(self._gone("while the log was open"))
            self._check_followed()

    async def _is_lost(self, error: Exception) -> bool:
        """After a read has failed: whether the catalog's topic is gone."""
        if faults.topic_unknown(error) or self._cluster.leader(self._topic) is None:
            with contextlib.suppress(CorruptLog, TimeoutError, *faults.Foreign):
                await self._check_topic()
        return self._ended is not None

    def _gone(self, when: str) -> CorruptLog:
        return CorruptLog(
            f"the catalog {self._topic} was deleted from outside, {when}: the channels of the log are not known any"
            " more. Delete its topics too to begin anew, or use another prefix",
            path=self._topic,
        )

    # ---- applying records --------------------------------------------------------------------------------------------

    def _apply(self, offset: int, raw_key: bytes, value: bytes | None) -> None:
        try:
            key = bytes(raw_key).decode()
            kind, _, rest = key.partition("/")
            fields: dict[str, Any] | None = None if value is None else json.loads(value)
            if fields is not None:
                check_version("a record of the catalog", fields.get("v", VERSION), VERSION)
            if kind == CHANNEL:
                self._apply_channel(offset, rest.rpartition("/")[0], key, fields)
            elif kind == TOPIC:
                incarnation, _, _ = rest.partition("/")
                self._apply_topic_id(int(incarnation), key, None if fields is None else bytes.fromhex(fields["id"]))
            elif kind == HOLD:
                incarnation, _, holder = rest.partition("/")
                self._apply_hold(int(incarnation), holder, fields)
            elif kind == QUEUE:
                incarnation, _, group = rest.partition("/")
                self._apply_queue_binding(int(incarnation), group, None if fields is None else offset)
        except (*DECODE_ERRORS, LookupError, AttributeError, OverflowError, BadRecord):
            _log.exception("the catalog %s has a record at %d that cannot be decoded: %r", self._topic, offset, raw_key)

    def _apply_channel(self, offset: int, name: str, key: str, fields: dict[str, Any] | None) -> None:
        created = self._created.setdefault(name, {})
        if fields is not None:
            policy = decode_policy(fields["policy"])
            topic = channel_topic(self._cluster.options.prefix, name, offset)
            created[key] = channel = KafkaChannel(name, offset, policy, topic, prefix(offset))
            channel.holds = self._holds.setdefault(offset, {})
            channel.queue_bindings = self._queue_bindings.setdefault(offset, {})
            self._by_incarnation[offset] = channel
        elif (removed := created.pop(key, None)) is not None:
            del self._by_incarnation[removed.incarnation]
        before = self._channels.get(name)
        first = min(created.values(), key=lambda channel: channel.incarnation, default=None)
        if first is not None:
            self._channels[name] = first
        else:
            del self._created[name]
            self._channels.pop(name, None)
        if before is not None and before is not first:
            before.dropped = True
            before.notify_dropped(was_dropped(before))
            self._on_removed()

    def _apply_hold(self, incarnation: int, holder: str, fields: dict[str, Any] | None) -> None:
        holds = self._holds.setdefault(incarnation, {})
        if fields is None:
            holds.pop(holder, None)
        else:
            holds[holder] = int(fields["offset"])

    def _apply_topic_id(self, incarnation: int, key: str, topic_id: bytes | None) -> None:
        channel = self._by_incarnation.get(incarnation)
        if channel is None:  # it was dropped
            return
        if topic_id is None:
            channel.topic_ids.pop(key, None)
        else:
            channel.topic_ids[key] = topic_id
        which = _deciding_key(channel.topic_ids)
        channel.topic_id = None if which is None else channel.topic_ids[which]

    def _apply_queue_binding(self, incarnation: int, group: str, offset: int | None) -> None:
        queue_bindings = self._queue_bindings.setdefault(incarnation, {})
        if offset is None:
            queue_bindings.pop(group, None)
        else:
            queue_bindings.setdefault(group, offset)


def was_dropped(channel: KafkaChannel) -> ChannelNotFound:
    """The error for calls on a channel that the catalog does not have any more."""
    return ChannelNotFound(f"channel {channel.name} was dropped", channel=channel.name)


def _deciding_key(topic_ids: Mapping[str, bytes]) -> str | None:
    """The key of the record that decides which topic a channel has: the first with an id, or the first of all where the
    brokers gave no ids."""
    return next((key for key, topic_id in topic_ids.items() if topic_id != NO_ID), next(iter(topic_ids), None))


def _queue_key(channel: KafkaChannel, group: str) -> str:
    return f"{QUEUE}/{channel.incarnation}/{group}"


def _hold_key(channel: KafkaChannel, holder: str) -> str:
    return f"{HOLD}/{channel.incarnation}/{holder}"
