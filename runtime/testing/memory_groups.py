"""Consumer groups over the memory WAL's lists."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from ..clock import Clock
from ..errors import Closed
from ..groups.coordinator import GroupCoordinator, epochs
from ..groups.progress import Change, GroupProgress
from ..log.checks import not_found
from ..log.wal import Append, ChannelPolicy, OnAppended
from .memory_channel import MemoryChannel, sequence_id

EXPIRY_INTERVAL_S = 0.5

Submit: TypeAlias = Callable[[Sequence[Append], Sequence[Change], OnAppended], None]


class _LoopClock(Clock):
    """The time of the loop that the groups were last used in: virtual where that is."""

    loop: asyncio.AbstractEventLoop | None = None

    def wall_ms(self) -> int:
        return int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        return 0.0 if self.loop is None else self.loop.time()


class MemoryGroups:
    """`GroupBackend` over lists, with its coordinator. Commits go through the WAL that was last used for
    groups, with its faults. Members have numbered names and nothing here is random, so equal runs stay equal."""

    def __init__(self, channels: Mapping[str, MemoryChannel], lock: threading.Lock) -> None:
        self._channels = channels
        self._lock = lock
        self._clock = _LoopClock()
        self._submits: list[Submit] = []
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self.coordinator: GroupCoordinator = GroupCoordinator(self._clock, self, epochs(1), watch=self._watch)

    def use(self, submit: Submit) -> None:
        """Send commits through `submit` from now on."""
        self._clock.loop = asyncio.get_running_loop()
        self.drop(submit)
        self._submits.append(submit)

    def drop(self, submit: Submit) -> None:
        """Do not send commits through `submit` any more."""
        if submit in self._submits:
            self._submits.remove(submit)

    def new_member(self) -> str:
        """A name that no member had."""
        return f"member-{next(self._numbers):06}"

    def channels(self) -> Collection[str]:
        return [name for name, channel in self._channels.items() if not channel.policy.ephemeral]

    def policy(self, channel: str) -> ChannelPolicy:
        return self._channel(channel).policy

    def progress(self, channel: str) -> Mapping[str, GroupProgress]:
        return self._channel(channel).groups

    def begin(self, channel: str) -> bytes:
        return sequence_id(self._channel(channel).first - 1)

    def end(self, channel: str) -> bytes:
        return sequence_id(self._channel(channel).end - 1)

    def commit(self, outputs: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        if not self._submits:
            raise Closed("the memory WAL is closed")
        self._submits[-1](outputs, changes, done)

    def forget(self, group: str, done: OnAppended) -> None:
        with self._lock:
            for channel in self._channels.values():
                channel.groups.pop(group, None)
        done([])

    def _channel(self, channel: str) -> MemoryChannel:
        try:
            return self._channels[channel]
        except KeyError:
            raise not_found(channel) from None

    def _watch(self) -> None:
        """Call `expire` as long as something may expire: a timer without end would keep virtual time running."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._clock.loop is not loop:
            self._clock.loop = loop
            self._timer = loop.call_later(EXPIRY_INTERVAL_S, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.coordinator.expire()
        if not self.coordinator.quiet:
            self._watch()
