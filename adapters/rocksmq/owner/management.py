"""Management of channels: each change is a control record in the journal, and done when that is durable."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....runtime.clock import Clock
from ....runtime.errors import ChannelNotFound, TidewalError
from ....runtime.log.checks import check_name, other_policy
from ....runtime.log.wal import ChannelPolicy, OnAppended
from ....runtime.loop_bridge import LoopNotifiers
from ..journal import channels as records
from ..journal.channels import decode_id
from ..journal.journal import Journal
from ..journal.pending import PendingWrite, control
from ..journal.registry import Registry
from .admission import Admission
from .channel_cache import LiveChannel


class Management:
    """Creates, drops, truncates and holds the channels of one registry."""

    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        admission: Admission,
        notifiers: LoopNotifiers,
        clock: Clock,
        *,
        channels_changed: Callable[[], None],
    ) -> None:
        """`channels_changed` is called after durable channels were created or dropped, once for many of them, but
        always between a drop and the next creation of the same name."""
        self._registry, self._journal, self._admission = registry, journal, admission
        self._notifiers, self._clock, self._changed = notifiers, clock, channels_changed
        self._publishing = threading.RLock()
        self._unpublished = False
        self._dropped: set[str] = set()  # since `channels_changed` was last called

    async def create(self, name: str, policy: ChannelPolicy, creator: bytes | None = None) -> None:
        """`Wal.create_channel`. `creator` is the client that asks, None where that is this process."""
        check_name("channel name", name)
        future, done = self._notifiers.promise()
        with self._registry.lock:
            self._admission.check_writable()
            existing = self._registry.names.get(name)
            if existing is not None and existing.policy != policy:
                raise other_policy(name)
            if existing is not None and policy.temporary:
                existing.creators |= {creator}
            if existing is not None and existing.created:
                return
            if existing is not None:  # another call is creating it; wait for that
                self._journal.put(PendingWrite(done, control=True))
            else:
                if not policy.ephemeral:
                    self._admission.check_space()
                self._create(name, policy, creator, done)
        await future
        self.publish()
        if name not in self._registry.names:
            raise ChannelNotFound(f"channel {name} was dropped while it was created", channel=name)

    def _create(self, name: str, policy: ChannelPolicy, creator: bytes | None, done: OnAppended) -> None:
        channel, state = self._registry.add(name, policy)
        if policy.temporary:
            channel.creators = frozenset([creator])

        def settled(result: list[bytes] | TidewalError) -> None:
            if isinstance(result, TidewalError):
                with self._registry.lock:
                    self._registry.remove(channel)
            elif (created := self._journal.table.by_number.get(state.number)) is not None:
                channel.groups = created.groups
            try:
                with self._publishing:
                    if name in self._dropped:
                        self.publish()
                    channel.created = True
                    self._unpublished = self._unpublished or not policy.ephemeral
            finally:
                done(result)

        self._put(records.create(state), settled, creates=state.number)

    async def drop(self, name: str) -> None:
        """`Wal.drop_channel`."""
        future, done = self._notifiers.promise()
        with self._registry.lock:
            self._admission.check_writable()
            found = self._registry.names.get(name)
            if found is None:
                return
            self._drop(found, done)
        await future
        self.publish()

    async def drop_created(self, creator: bytes, channel: LiveChannel) -> None:
        """Drop a temporary channel whose `creator` is gone, unless it has others. A channel that was dropped already is
        fine, whatever has its name now."""
        future, done = self._notifiers.promise()
        with self._registry.lock:
            channel.creators -= {creator}
            if channel.creators or channel.dropped:
                return
            self._admission.check_writable()
            self._drop(channel, done)
        await future

    def _drop(self, channel: LiveChannel, done: OnAppended) -> None:
        self._registry.remove(channel)

        def dropped(result: list[bytes] | TidewalError) -> None:
            channel.tail.clear()
            if not channel.policy.ephemeral:
                with self._publishing:
                    self._dropped.add(channel.name)
                    self._unpublished = True
            done(result)

        self._put(records.drop(channel.number), dropped)

    def publish(self) -> None:
        """Call `channels_changed` for what was created and dropped, if that was not done yet. The maintenance thread
        calls this, too: a task that creates a channel may be cancelled."""
        with self._publishing:
            if self._unpublished:
                self._unpublished = False
                self._dropped.clear()
                self._changed()

    async def truncate(self, channel: LiveChannel, id: bytes) -> None:
        """`Wal.truncate`."""
        number = min(decode_id(id), channel.visible_to + 1)
        if channel.policy.ephemeral or number <= channel.truncated_to:
            return
        channel.truncated_to = number
        await self._record(records.truncate(channel.number, number))

    async def hold(self, channel: LiveChannel, holder: str, id: bytes | None) -> None:
        """`Wal.hold`."""
        if channel.policy.ephemeral:
            return
        number = None if id is None else decode_id(id)
        if number is not None:
            if holder not in channel.holds:
                self._registry.check_snapshot()
            channel.holds[holder] = number
        await self._record(records.hold(channel.number, holder, number))
        if number is None:
            channel.holds.pop(holder, None)  # only now: until it is durable, a crash would bring it back

    async def _record(self, record: bytes) -> None:
        future, done = self._notifiers.promise()
        with self._registry.lock:
            self._admission.check_writable()
            self._put(record, done)
        await future

    def _put(self, record: bytes, done: OnAppended, creates: int = 0) -> None:
        self._journal.put(control(record, self._clock.wall_ms(), done, creates=creates))
