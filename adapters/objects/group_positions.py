"""Where consumer groups keep their positions: control entries, in one block with the outputs of a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from ...runtime.clock import Clock
from ...runtime.groups.coordinator import GroupCoordinator, epochs
from ...runtime.groups.local_coordinator_client import LocalCoordinatorClient
from ...runtime.groups.progress import Change, GroupProgress
from ...runtime.log.checks import not_found
from ...runtime.log.wal import Append, ChannelPolicy, OnAppended
from .control import Control, GroupForgotten, GroupMoved
from .link.linked_groups import LinkedGroupService
from .open_log import OpenLog
from .stored_channel import StoredChannel

EXPIRY_INTERVAL_S = 0.5


class LoopTime(Clock):
    """The time of the running loop, which is virtual where that is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def wall_ms(self) -> int:
        return int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()


class ObjectGroups:
    """`GroupBackend` of a log that this process owns in its present epoch, with its coordinator, and what members here
    and in other processes reach that by. Another owner has a coordinator of its own, with numbers of assignment epochs
    that no other one had."""

    def __init__(
        self,
        log: OpenLog,
        submit: Callable[[Sequence[Append], Sequence[Control], OnAppended], None],
        last_sent: Callable[[int], bytes],
    ) -> None:
        """`submit` calls back once it is certain what is in the log; members here wait for the log's delivery timeout.
        `last_sent` is the id of the last entry of a channel, by its number, that has left for the store; b"": none."""
        self._state, self._submit, self._last_sent = log.state, submit, last_sent
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.coordinator: GroupCoordinator = GroupCoordinator(
            LoopTime(), self, epochs(log.state.epoch), watch=self._watch
        )
        self.service: LinkedGroupService = LinkedGroupService(self.coordinator)
        self.client: LocalCoordinatorClient = LocalCoordinatorClient(self.coordinator, log.settings.delivery_timeout_s)

    def channels(self) -> Collection[str]:
        return [channel.name for channel in self._state.names.values() if not channel.policy.ephemeral]

    def policy(self, channel: str) -> ChannelPolicy:
        return self._channel(channel).policy

    def progress(self, channel: str) -> Mapping[str, GroupProgress]:
        return dict(self._channel(channel).groups)

    def begin(self, channel: str) -> bytes:
        return self._channel(channel).removed_to

    def end(self, channel: str) -> bytes:
        # Others may have read in the store what is on its way for this process. What is stored about it comes behind it
        # in the log, or does not come there.
        found = self._channel(channel)
        return max(found.end, self._last_sent(found.number))

    def commit(self, outputs: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        self._submit(outputs, [self._moved(change) for change in changes], done)

    def _moved(self, change: Change) -> GroupMoved:
        number = self._channel(change.channel).number
        return GroupMoved(number, change.group, change.upto, change.ids, change.reset, change.metadata)

    def forget(self, group: str, done: OnAppended) -> None:
        self._submit((), (GroupForgotten(group),), done)

    def _channel(self, channel: str) -> StoredChannel:
        try:
            return self._state.names[channel]
        except KeyError:
            raise not_found(channel) from None

    def _watch(self) -> None:
        """Call `expire` as long as something may expire: a timer without end would keep virtual time running."""
        self._loop.call_soon_threadsafe(self._watch_soon)

    def _watch_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(EXPIRY_INTERVAL_S, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.coordinator.expire()
        if not self.coordinator.quiet:
            self._watch_soon()

    def close(self) -> None:
        """End all memberships: from now on this process decides nothing about groups."""
        self.coordinator.close()
        if self._timer is not None:
            self._timer.cancel()
