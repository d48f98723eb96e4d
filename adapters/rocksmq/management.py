"""Managing channels: each change is a control record in the journal, and done when that is durable."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...runtime.clock import Clock
from ...runtime.errors import ChannelExists, ChannelNotFound, TidewalError
from ...runtime.wakeup import Hubs
from ...runtime.wal import ChannelPolicy, OnAppended
from . import channels as records
from .channels import check_name, decode_id
from .gate import Gate
from .journal import Journal
from .live import Channel
from .pending import Write, control
from .registry import Registry


class Management:
    """Creates, drops, truncates and holds the channels of one registry."""

    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        gate: Gate,
        hubs: Hubs,
        clock: Clock,
        *,
        channels_changed: Callable[[], None],
    ) -> None:
        """`channels_changed` is called after durable channels were created or dropped, once for many of them, but
        always between a drop and the next creation of the same name."""
        self._registry, self._journal, self._gate = registry, journal, gate
        self._hubs, self._clock, self._changed = hubs, clock, channels_changed
        self._noticing = threading.RLock()
        self._unnoticed = False
        self._dropped: set[str] = set()  # that nobody was told of

    async def create(self, name: str, policy: ChannelPolicy) -> None:
        check_name(name)
        future, done = self._hubs.promise()
        with self._registry.lock:
            self._gate.check_writable()
            existing = self._registry.names.get(name)
            if existing is not None and existing.policy != policy:
                raise ChannelExists(f"channel {name} exists with another policy", channel=name)
            if existing is not None and existing.created:
                return
            if existing is not None:  # somebody else is creating it; wait behind that
                self._journal.put(Write(done, control=True))
            else:
                if not policy.ephemeral:
                    self._gate.check_space()
                self._create(name, policy, done)
        await future
        self.notice()
        if name not in self._registry.names:
            raise ChannelNotFound(f"channel {name} was dropped while it was created", channel=name)

    def _create(self, name: str, policy: ChannelPolicy, done: OnAppended) -> None:
        channel, state = self._registry.add(name, policy)

        def settled(result: list[bytes] | TidewalError) -> None:
            if isinstance(result, TidewalError):
                with self._registry.lock:
                    self._registry.remove(channel)
            elif (created := self._journal.table.by_number.get(state.number)) is not None:
                channel.groups = created.groups
            try:
                with self._noticing:
                    if name in self._dropped:
                        self.notice()
                    channel.created = True
                    self._unnoticed = self._unnoticed or not policy.ephemeral
            finally:
                done(result)

        self._put(records.create(state), settled, creates=state.number)

    async def drop(self, name: str) -> None:
        future, done = self._hubs.promise()
        with self._registry.lock:
            self._gate.check_writable()
            found = self._registry.names.get(name)
            if found is None:
                return
            self._registry.remove(found)

            def dropped(result: list[bytes] | TidewalError) -> None:
                found.tail.clear()
                if not found.policy.ephemeral:
                    with self._noticing:
                        self._dropped.add(name)
                        self._unnoticed = True
                done(result)

            self._put(records.drop(found.number), dropped)
        await future
        self.notice()

    def notice(self) -> None:
        """Tell whoever wants to know of what was created and dropped, if that was not done yet. The keeper calls it,
        too: somebody who creates a channel may be cancelled."""
        with self._noticing:
            if self._unnoticed:
                self._unnoticed = False
                self._dropped.clear()
                self._changed()

    async def truncate(self, channel: Channel, id: bytes) -> None:
        number = min(decode_id(id), channel.visible_to + 1)
        if channel.policy.ephemeral or number <= channel.truncated_to:
            return
        channel.truncated_to = number
        await self._record(records.truncate(channel.number, number))

    async def hold(self, channel: Channel, holder: str, id: bytes | None) -> None:
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
        future, done = self._hubs.promise()
        with self._registry.lock:
            self._gate.check_writable()
            self._put(record, done)
        await future

    def _put(self, record: bytes, done: OnAppended, creates: int = 0) -> None:
        self._journal.put(control(record, self._clock.wall_ms(), done, creates=creates))
