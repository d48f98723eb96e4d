"""The channels that are assigned to a member, each with an assignment epoch once the group's position is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ....runtime.errors import ChannelNotFound, Fenced, TidewalError, Unavailable
from ....runtime.groups.coordinator_client import AssignedChannel, MemberAssignment
from ....runtime.groups.progress import GroupProgress
from ....runtime.log.wal import From
from .. import faults
from ..catalog import KafkaChannel
from ..channel_access import ChannelAccess, KafkaCatalog
from ..cluster import PAUSE_S, Cluster
from .offset_store import Unstable
from .offsets import to_progress
from .requests import CommittedOffset

if TYPE_CHECKING:
    from .session import Session

HANGING_S = 60.0  # Tidewal's transactions end earlier: after that an operator has to act

_log = logging.getLogger(__name__)


class AssignedTopic:
    """One channel that is assigned to the member. While `epoch` is 0 its position is being looked up, which waits until
    no commit that was begun in the epoch `before` is in flight."""

    def __init__(
        self,
        channel: KafkaChannel,
        start: From,
        dropped: Callable[[AssignedTopic], None],
        before: AssignedTopic | None = None,
    ) -> None:
        self.channel: KafkaChannel = channel
        self.start: From = start
        self.before: AssignedTopic | None = before
        self.epoch = 0
        self.progress: GroupProgress = GroupProgress()
        self.revoking_since: float | None = None
        self.commits_in_flight = 0
        self.over = False
        self._dropped = dropped

    @property
    def undecided(self) -> bool:
        """Whether a commit in flight may still move the position."""
        return self.commits_in_flight > 0 or (self.before is not None and self.before.commits_in_flight > 0)

    def dropped(self, error: ChannelNotFound) -> None:
        """The channel was dropped."""
        self._dropped(self)


class AssignedTopics:
    """The assigned channels of one session. Belongs to the I/O loop. `numbers` generates epochs and versions, which
    grow over all sessions of this process."""

    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        catalog: KafkaCatalog,
        management: ChannelAccess,
        numbers: Iterator[int],
    ) -> None:
        self.by_topic: dict[str, AssignedTopic] = {}
        self.settled: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # once every channel has its epoch
        self._session, self._numbers = session, numbers
        self._cluster, self._catalog, self._management = cluster, catalog, management
        self._version = next(numbers)
        self._over: TidewalError | None = None
        self._changed = asyncio.Event()
        self._looking_up: asyncio.Task[None] | None = None

    def find(self, channel: str, epoch: int) -> AssignedTopic:
        """The assignment of a channel with this epoch. Raises `Fenced` where it has ended."""
        for assigned in self.by_topic.values():
            if assigned.channel.name == channel and assigned.epoch == epoch:
                return assigned
        raise epoch_over(channel, epoch)

    async def assignment(self, seen: int | None, wait_s: float) -> MemberAssignment:
        """`CoordinatorClient.assignment`. Raises what ended the session."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._version == seen and self._over is None:
                    await self._changed.wait()
        if self._over is not None:
            raise self._over
        ready = [assigned for assigned in self.by_topic.values() if assigned.epoch]
        held = {
            each.channel.name: AssignedChannel(
                each.epoch, each.progress.acked_to, frozenset(each.progress.acked), each.progress.metadata
            )
            for each in ready
        }
        return MemberAssignment(
            self._version, held, frozenset(e.channel.name for e in ready if e.revoking_since is not None)
        )

    def apply(self, channels: Mapping[KafkaChannel, From], revoking: Collection[str]) -> None:
        """Set the assigned channels, with where each begins without a position. Those whose topics are in `revoking`
        are released as soon as possible."""
        topics = {channel.key for channel in channels}
        for assigned in [assigned for topic, assigned in self.by_topic.items() if topic not in topics]:
            self._drop(assigned)
        for channel, start in channels.items():
            if channel.key not in self.by_topic:
                self._take(channel, start)
        now = asyncio.get_running_loop().time()
        for topic, assigned in list(self.by_topic.items()):
            if topic not in revoking:
                assigned.revoking_since = None
            elif not assigned.epoch and not assigned.undecided:
                self.release(assigned)
            elif assigned.revoking_since is None:
                assigned.revoking_since = now
        self._next_version()
        self._look_up()

    def release(self, assigned: AssignedTopic) -> None:
        """Release a channel, so that the group assigns it anew."""
        self._drop(assigned)
        self._session.channel_released()

    def release_overdue(self, after_s: float) -> None:
        """Release the channels that have been in revocation for `after_s`, also with unacknowledged entries."""
        now = asyncio.get_running_loop().time()
        for assigned in list(self.by_topic.values()):
            overdue = assigned.revoking_since is not None and now - assigned.revoking_since > after_s
            if overdue and not assigned.undecided:
                self.release(assigned)

    def renew_epoch(self, assigned: AssignedTopic) -> None:
        """End the epoch. Once all commits in it are decided the position is looked up again, or the channel released
        where it is being revoked."""
        if assigned.over:
            return
        self._drop(assigned)
        self._take(assigned.channel, From.EARLIEST, assigned)
        self._look_up()

    def keeps(self, assigned: AssignedTopic) -> bool:
        """Whether the channel of an ended epoch is still assigned, and no later epoch has begun."""
        present = self.by_topic.get(assigned.channel.key)
        return present is not None and present.before is assigned

    def decided(self, assigned: AssignedTopic) -> None:
        """A commit in the epoch of `assigned` is not in flight any more."""
        assigned.commits_in_flight -= 1
        if assigned.over and not assigned.undecided:
            self._look_up()

    def end(self, error: TidewalError) -> None:
        """The session has ended with `error`, and with it all assignments."""
        self._over = error
        for assigned in list(self.by_topic.values()):
            self._drop(assigned)
        if not self.settled.done():
            self.settled.set_exception(error)
            self.settled.exception()  # retrieved: a caller may not wait any more
        if self._looking_up is not None:
            self._looking_up.cancel()
        self._next_version()

    def _take(self, channel: KafkaChannel, start: From, before: AssignedTopic | None = None) -> None:
        self.by_topic[channel.key] = assigned = AssignedTopic(channel, start, self._drop, before)
        assigned.revoking_since = None if before is None else before.revoking_since
        channel.listeners.add(assigned.dropped)

    def _drop(self, assigned: AssignedTopic) -> None:
        assigned.over = True
        assigned.channel.listeners.discard(assigned.dropped)
        if self.by_topic.get(assigned.channel.key) is assigned:
            del self.by_topic[assigned.channel.key]
            self._next_version()

    def _next_version(self) -> None:
        self._version = next(self._numbers)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- positions ---------------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        if self._over is None and (self._looking_up is None or self._looking_up.done()):
            self._looking_up = asyncio.create_task(self._until_all_have_epochs())
            self._looking_up.add_done_callback(self._looked_up)

    def _looked_up(self, looking_up: asyncio.Task[None]) -> None:
        if not looking_up.cancelled() and (error := looking_up.exception()) is not None:  # unexpected
            self._session.end(Unavailable(f"positions of group {self._session.group} cannot be looked up: {error!r}"))

    async def _until_all_have_epochs(self) -> None:
        """Start an epoch for each channel whose position becomes known, until all have one."""
        reported, hanging_from = False, asyncio.get_running_loop().time() + HANGING_S
        while missing := self._without_epoch():
            try:
                await self._start_epochs(missing)
                continue
            except Unstable as error:
                trouble: Exception = error
                await self._undo(error.key)
                if asyncio.get_running_loop().time() > hanging_from:
                    hanging_from = math.inf
                    _log.warning(
                        "the position of group %s in %s stays open although its transaction has ended: the brokers "
                        "have lost its end. `kafka-transactions.sh find-hanging` shows it, and `abort` there ends it",
                        self._session.group,
                        error.key,
                    )
            except (TidewalError, *faults.Foreign) as error:
                trouble = error
                if faults.final(error):
                    self._session.end(faults.mapped(error, f"look up positions of group {self._session.group}"))
            if not reported:
                reported = True
                _log.info("positions of group %s are not known yet: %r", self._session.group, trouble)
            await asyncio.sleep(PAUSE_S)
            await self._cluster.refresh()
        if not self.settled.done():
            self.settled.set_result(None)

    def _without_epoch(self) -> list[AssignedTopic]:
        """The channels whose position is to be looked up now. Those that are being revoked are released instead."""
        waiting = [assigned for assigned in self.by_topic.values() if not assigned.epoch and not assigned.undecided]
        for assigned in waiting:
            if assigned.revoking_since is not None:
                self.release(assigned)
        return [assigned for assigned in waiting if not assigned.over]

    async def _start_epochs(self, missing: list[AssignedTopic]) -> None:
        offset_store = self._session.offset_store
        found = await offset_store.positions([assigned.channel.key for assigned in missing])
        first: dict[str, CommittedOffset] = {}
        for assigned in missing:
            if assigned.channel.key in found:
                continue
            if await self._catalog.bind_queue(self._session.group, assigned.channel):
                await self._management.ensure(assigned.channel)
                first[assigned.channel.key] = await offset_store.beginning(assigned.channel, assigned.start)
            else:
                self.release(assigned)
        first = {topic: at for topic, at in first.items() if topic in self.by_topic}
        if first:
            await offset_store.store(first)
        for assigned in missing:
            position = {**found, **first}.get(assigned.channel.key)
            if not assigned.over and position is not None:
                assigned.progress = to_progress(assigned.channel, position)
                assigned.epoch, assigned.before = next(self._numbers), None
        self._next_version()

    async def _undo(self, topic: str) -> None:
        assigned = self.by_topic.get(topic)
        if assigned is not None:
            with contextlib.suppress(TidewalError):  # then the next attempt, or Kafka, aborts it
                await self._session.abort_left_open(assigned.channel)


def epoch_over(channel: str, epoch: int) -> Fenced:
    """The error for entries that were delivered in an epoch that has ended."""
    return Fenced(f"{channel} was revoked after this was delivered: it is delivered again", channel=channel, term=epoch)
