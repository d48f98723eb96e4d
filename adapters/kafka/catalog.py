"""The catalog of a log: a compacted topic that says which channels there are, who holds what, and which group a queue
belongs to; followed by everybody.

Each attempt to make a channel writes a record under a key of its own; among those of one name the earliest is the
channel, and the others are taken back by who wrote them. Compaction keeps the last record of each key where it was
written, so the place of the creation record is the channel's number for ever, its *incarnation*.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from aiokafka import errors as kafka_errors

from ...runtime.errors import ChannelNotFound, CorruptLog, Unavailable
from ...runtime.remote import decode_policy, encode_policy
from ...runtime.wal import ChannelPolicy, Delivery
from . import faults
from .cluster import LATEST, PAUSE_S, Cluster
from .fetching import fetch, records
from .positions import Row, prefix
from .requests import NO_ID, may_be
from .sender import Sender
from .topics import UNPACKED_BYTES, catalog_configs, catalog_topic, channel_topic, channel_topics

CREATED, MADE, HELD, CLAIMED = "channel", "topic", "hold", "queue"

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who wants to know that a channel is gone; called on the I/O loop."""

    def dropped(self, error: ChannelNotFound) -> None: ...


@dataclass(eq=False, slots=True)
class Channel:
    """What the catalog tells of one channel. `holds` are offsets by holder; `claims` say for each group that asked for
    a queue where the catalog has that. `made` are ids of topics by key of the record, see `_which`."""

    name: str
    incarnation: int
    policy: ChannelPolicy
    topic: str
    prefix: bytes
    holds: dict[str, int] = field(default_factory=dict[str, int])
    dropped: bool = False
    listeners: set[Listener] = field(default_factory=set[Listener])
    claims: dict[str, int] = field(default_factory=dict[str, int])
    made: dict[str, bytes] = field(default_factory=dict[str, bytes])
    topic_id: bytes | None = None  # which topic it is, once that is made
    seen_at: float = -math.inf  # when its topic was that one, on the I/O loop's clock

    def gone(self, error: ChannelNotFound) -> None:
        """Tell whoever listens."""
        for listener in list(self.listeners):
            listener.dropped(error)

    @property
    def queue_of(self) -> str | None:
        """The group that a queue belongs to: the first that asked for it."""
        return min(self.claims, key=self.claims.__getitem__, default=None)


class Catalog:
    """Follows the topic, and writes into it. Belongs to the I/O loop; `find` may be called from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        connections: tuple[int, int],
        on_removed: Callable[[], None],
        *,
        read_only: bool = False,
    ) -> None:
        """`connections` are for following and for writing. `on_removed` is called when something was dropped.
        `read_only`: its topic is not made."""
        self._cluster, self._read_only = cluster, read_only
        self._topic = catalog_topic(cluster.options.prefix)
        self._reading, writing = connections
        self._topic_id: bytes | None = None
        self._lost: CorruptLog | None = None
        self._sender = Sender(cluster, self._topic, writing, self._check_topic, topic_id=lambda: self._topic_id)
        self._on_removed = on_removed
        self._lock = asyncio.Lock()
        self._created: dict[str, dict[str, Channel]] = {}  # by name, then by key of the record
        self._channels: dict[str, Channel] = {}
        self._holds: dict[int, dict[str, int]] = {}  # by incarnation, then by holder
        self._claims: dict[int, dict[str, int]] = {}  # by incarnation, then by group
        self._by_incarnation: dict[int, Channel] = {}
        self.applied_to = 0  # so much of it is known here
        self.changed: Callable[[], None] = lambda: None  # called when something was learnt
        self._moved = asyncio.Event()

    def find(self, name: str) -> Channel | None:
        """The channel as this process knows it, which others may have changed a moment ago."""
        return self._channels.get(name)

    def names(self) -> list[str]:
        return sorted(self._channels)

    def all(self) -> list[Channel]:
        """The channels, by name."""
        return [self._channels[name] for name in self.names()]

    async def open(self) -> None:
        """Make the topic where there is none; where this is to read only, raise `Unavailable`. Raises `CorruptLog`
        where there are topics of channels all the same."""
        self._topic_id = await self._cluster.retrying("find the catalog", self._find_topic)

    async def sync(self) -> None:
        """Return when everything is known that was written before the call. Raises `Unavailable`."""
        end = await self._cluster.retrying("read the catalog's end", self._end)
        await self._until(end)

    async def write_channel(self, name: str, policy: ChannelPolicy) -> Channel:
        """Make a channel, or find the one that somebody else made first."""
        while True:
            key = f"{CREATED}/{name}/{uuid4().hex}"
            await self._write([(key, {"policy": encode_policy(policy)})])
            found, own = self._channels.get(name), self._created.get(name, {}).get(key)
            if own is not None and own is not found:
                await self._write([(key, None)])
            if found is not None:  # otherwise it was dropped in the same moment
                return found

    async def write_dropped(self, channel: Channel) -> None:
        """Take a channel back, with all attempts to make one of its name and all holds."""
        keys = [
            *self._created.get(channel.name, {}),
            *(_hold(channel, holder) for holder in channel.holds),
            *(_claim(channel, group) for group in channel.claims),
            *channel.made,
        ]
        await self._write([(key, None) for key in keys])

    async def write_made(self, channel: Channel, topic_id: bytes) -> None:
        """Note which topic was made for a channel, unless somebody else has noted one first."""
        key = f"{MADE}/{channel.incarnation}/{uuid4().hex}"
        await self._write([(key, {"id": topic_id.hex()})])
        if key != _which(channel.made):
            await self._write([(key, None)])

    async def write_hold(self, channel: Channel, holder: str, offset: int | None) -> None:
        """Note that `holder` needs what is at `offset` and behind it; None: nothing any more."""
        await self._write([(_hold(channel, holder), None if offset is None else {"offset": offset})])

    async def claim(self, group: str, channel: Channel) -> bool:
        """Take a queue for a group that reads it, unless another one has it; whether the group may read the channel."""
        if channel.policy.delivery is not Delivery.QUEUE:
            return True
        owner = channel.queue_of
        if owner is None:
            await self._write([(_claim(channel, group), {})])
            owner = min(channel.claims, key=channel.claims.__getitem__)
            if owner != group:
                await self._write([(_claim(channel, group), None)])
        return owner == group

    async def disclaim(self, group: str) -> None:
        """Give up all queues of a group."""
        claimed = [channel for channel in self.all() if group in channel.claims]
        await self._write([(_claim(channel, group), None) for channel in claimed])

    async def follow(self) -> None:
        """Learn what is written, for ever. One task does this."""
        silent = False
        while True:
            try:
                known_as = self._topic_id or NO_ID
                fetched = await fetch(self._cluster, self._topic, self.applied_to, self._reading, topic_id=known_as)
                for record in records(fetched.batches, self.applied_to, UNPACKED_BYTES):
                    self._apply(record.offset, bytes(record.key or b"").decode(), record.value)
                    self.applied_to = record.offset + 1
                self.applied_to = fetched.next_offset
            except Exception as error:  # whatever it is, all that is asked of the catalog waits for this task
                if not silent:
                    silent = True
                    _log.warning("the catalog %s cannot be read: %r", self._topic, error)
                await asyncio.sleep(PAUSE_S)
                await self._cluster.refresh()
                if await self._is_lost(error):
                    return
                continue
            if silent:
                silent = False
                _log.warning("the catalog %s is read again", self._topic)
            self._wake()
            if fetched.batches:
                self.changed()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _end(self) -> int:
        if self._lost is not None:
            raise self._lost
        return await self._cluster.offset(self._topic, LATEST) or 0

    async def _until(self, offset: int) -> None:
        try:
            async with asyncio.timeout(self._cluster.options.delivery_timeout_s):
                while self.applied_to < offset:
                    if self._lost is not None:
                        raise self._lost
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable(f"the catalog {self._topic} cannot be read") from None

    async def _write(self, changes: Sequence[tuple[str, Mapping[str, object] | None]]) -> None:
        """Write records and return when they have taken effect here."""
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
        )  # before: others may begin it now
        found = await self._cluster.topic_id(self._topic)
        if found is None:
            if orphans:
                raise self._gone(f"while there are topics of channels, {orphans[0]} among them")
            if self._read_only:
                raise Unavailable(
                    f"there is no log to read, for there is no topic {self._topic}: check brokers and prefix, or start "
                    "a node, which makes it"
                )
            await self._cluster.create_topic(self._topic, catalog_configs(self._cluster.options))
            found = await self._cluster.topic_id(self._topic)
        if self._cluster.leader(self._topic) is None:
            await self._cluster.refresh()
        if found is None or self._cluster.leader(self._topic) is None:
            raise kafka_errors.StaleMetadata(f"nobody leads {self._topic}")
        return found

    async def _check_topic(self) -> None:
        """Raise `CorruptLog` once the topic is not the one that was opened."""
        if not may_be(await self._cluster.topic_id(self._topic), self._topic_id):
            self._lost = self._gone("while the log was open")
            self._wake()
            raise self._lost

    async def _is_lost(self, error: Exception) -> bool:
        """After reading has failed: whether there is nothing to read any more."""
        if faults.topic_unknown(error) or self._cluster.leader(self._topic) is None:
            with contextlib.suppress(CorruptLog, TimeoutError, *faults.Foreign):
                await self._check_topic()
        return self._lost is not None

    def _gone(self, when: str) -> CorruptLog:
        return CorruptLog(
            f"the catalog {self._topic} was deleted from outside, {when}: what channels the log had is not known any"
            " more. Delete its topics too to begin anew, or use another prefix",
            path=self._topic,
        )

    # ---- what a record changes ---------------------------------------------------------------------------------------

    def _apply(self, offset: int, key: str, value: bytes | None) -> None:
        kind, _, rest = key.partition("/")
        try:
            picture: dict[str, Any] | None = None if value is None else json.loads(value)
            if kind == CREATED:
                self._apply_channel(offset, rest.rpartition("/")[0], key, picture)
            elif kind == MADE:
                incarnation, _, _ = rest.partition("/")
                self._apply_made(int(incarnation), key, None if picture is None else bytes.fromhex(picture["id"]))
            elif kind == HELD:
                incarnation, _, holder = rest.partition("/")
                self._apply_hold(int(incarnation), holder, picture)
            elif kind == CLAIMED:
                incarnation, _, group = rest.partition("/")
                self._apply_claim(int(incarnation), group, None if picture is None else offset)
        except (ValueError, KeyError, TypeError):
            _log.exception("the catalog %s has a record at %d that says nothing: %r", self._topic, offset, key)

    def _apply_channel(self, offset: int, name: str, key: str, picture: dict[str, Any] | None) -> None:
        created = self._created.setdefault(name, {})
        if picture is not None:
            policy = decode_policy(picture["policy"])
            topic = channel_topic(self._cluster.options.prefix, name, offset)
            created[key] = channel = Channel(name, offset, policy, topic, prefix(offset))
            channel.holds = self._holds.setdefault(offset, {})
            channel.claims = self._claims.setdefault(offset, {})
            self._by_incarnation[offset] = channel
        elif (gone := created.pop(key, None)) is not None:
            del self._by_incarnation[gone.incarnation]
        before = self._channels.get(name)
        first = min(created.values(), key=lambda channel: channel.incarnation, default=None)
        if first is not None:
            self._channels[name] = first
        else:
            del self._created[name]
            self._channels.pop(name, None)
        if before is not None and before is not first:
            before.dropped = True
            before.gone(was_dropped(before))
            self._on_removed()

    def _apply_hold(self, incarnation: int, holder: str, picture: dict[str, Any] | None) -> None:
        holds = self._holds.setdefault(incarnation, {})
        if picture is None:
            holds.pop(holder, None)
        else:
            holds[holder] = int(picture["offset"])

    def _apply_made(self, incarnation: int, key: str, topic_id: bytes | None) -> None:
        channel = self._by_incarnation.get(incarnation)
        if channel is None:  # it was dropped
            return
        if topic_id is None:
            channel.made.pop(key, None)
        else:
            channel.made[key] = topic_id
        which = _which(channel.made)
        channel.topic_id = None if which is None else channel.made[which]

    def _apply_claim(self, incarnation: int, group: str, offset: int | None) -> None:
        claims = self._claims.setdefault(incarnation, {})
        if offset is None:
            claims.pop(group, None)
        else:
            claims.setdefault(group, offset)


def was_dropped(channel: Channel) -> ChannelNotFound:
    """The error of what is asked of a channel that the catalog does not have any more."""
    return ChannelNotFound(f"channel {channel.name} was dropped", channel=channel.name)


def _which(made: Mapping[str, bytes]) -> str | None:
    """The record that says which topic a channel is: the first with an id, or the first where brokers gave none."""
    return next((key for key, topic_id in made.items() if topic_id != NO_ID), next(iter(made), None))


def _claim(channel: Channel, group: str) -> str:
    return f"{CLAIMED}/{channel.incarnation}/{group}"


def _hold(channel: Channel, holder: str) -> str:
    return f"{HELD}/{channel.incarnation}/{holder}"
