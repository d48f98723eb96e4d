"""The channels that a member has, each under a lease once the group's position in it is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from ....runtime.errors import ChannelNotFound, Fenced, TidewalError, Unavailable
from ....runtime.groups.link import Share, Shares
from ....runtime.groups.progress import Progress
from ....runtime.wal import From
from .. import faults
from ..catalog import Catalog, Channel
from ..cluster import PAUSE_S, Cluster
from ..management import Management
from .committed import Committed, Unstable
from .offsets import to_progress
from .requests import Position

HANGING_S = 60.0  # no transaction of ours is open for so long: after that somebody has to look

_log = logging.getLogger(__name__)


class Hold:
    """One channel that the member has. Without a lease (0) its position is being looked up, which is put off until
    nothing is under way that was begun under the lease `before` it."""

    def __init__(
        self, channel: Channel, start: From, dropped: Callable[[Hold], None], before: Hold | None = None
    ) -> None:
        self.channel, self.start, self.before = channel, start, before
        self.lease = 0
        self.progress = Progress()
        self.wanted_since: float | None = None
        self.commits_in_flight = 0
        self.over = False
        self._dropped = dropped

    @property
    def undecided(self) -> bool:
        """Whether a commit may move the position yet."""
        return self.commits_in_flight > 0 or (self.before is not None and self.before.commits_in_flight > 0)

    def dropped(self, error: ChannelNotFound) -> None:
        """The channel is gone."""
        self._dropped(self)


class Member(Protocol):
    """Whose channels they are."""

    group: str
    committed: Committed

    def let_go(self) -> None:
        """A channel is free for others: the group has to know."""
        ...

    def end(self, error: TidewalError) -> None:
        """The session cannot go on."""
        ...

    async def abort_left_open(self, channel: Channel) -> None:
        """End the transaction that whoever had the channel before has left open, if there is one."""
        ...


class Holdings:
    """Belongs to the I/O loop. `numbers` makes leases and versions, which grow over all sessions of this process."""

    def __init__(
        self, member: Member, cluster: Cluster, catalog: Catalog, management: Management, numbers: Iterator[int]
    ) -> None:
        self.by_topic: dict[str, Hold] = {}
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # every hold has its lease
        self._member, self._numbers = member, numbers
        self._cluster, self._catalog, self._management = cluster, catalog, management
        self._version = next(numbers)
        self._over: TidewalError | None = None
        self._changed = asyncio.Event()
        self._looking_up: asyncio.Task[None] | None = None

    def find(self, channel: str, lease: int) -> Hold:
        """Raises `Fenced` for a lease that is over."""
        for hold in self.by_topic.values():
            if hold.channel.name == channel and hold.lease == lease:
                return hold
        raise lease_over(channel, lease)

    async def shares(self, seen: int | None, wait_s: float) -> Shares:
        """`GroupLink.shares`. Raises what ended the session."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._version == seen and self._over is None:
                    await self._changed.wait()
        if self._over is not None:
            raise self._over
        leased = [hold for hold in self.by_topic.values() if hold.lease]
        held = {
            each.channel.name: Share(each.lease, each.progress.acked_to, frozenset(each.progress.acked))
            for each in leased
        }
        return Shares(self._version, held, frozenset(e.channel.name for e in leased if e.wanted_since is not None))

    def apply(self, granted: Mapping[Channel, From], wanted_back: Collection[str]) -> None:
        """Have just these channels, and give those back that are wanted as soon as that can be."""
        topics = {channel.topic for channel in granted}
        for hold in [hold for topic, hold in self.by_topic.items() if topic not in topics]:
            self._drop(hold)
        for channel, start in granted.items():
            if channel.topic not in self.by_topic:
                self._take(channel, start)
        now = asyncio.get_running_loop().time()
        for topic, hold in list(self.by_topic.items()):
            if topic not in wanted_back:
                hold.wanted_since = None
            elif not hold.lease and not hold.undecided:
                self.release(hold)
            elif hold.wanted_since is None:
                hold.wanted_since = now
        self._touch()
        self._look_up()

    def release(self, hold: Hold) -> None:
        """Let go of a channel."""
        self._drop(hold)
        self._member.let_go()

    def release_overdue(self, after_s: float) -> None:
        """Let go of what was wanted back for so long, whatever of it is not acknowledged."""
        now = asyncio.get_running_loop().time()
        for hold in list(self.by_topic.values()):
            overdue = hold.wanted_since is not None and now - hold.wanted_since > after_s
            if overdue and not hold.undecided:
                self.release(hold)

    def lease_anew(self, hold: Hold) -> None:
        """End the lease. Once all that was begun under it is decided the position is looked up again, or the channel
        let go where it is wanted back."""
        if hold.over:
            return
        self._drop(hold)
        self._take(hold.channel, From.EARLIEST, hold)
        self._look_up()

    def keeps(self, hold: Hold) -> bool:
        """Whether the member still has the channel of a lease that was ended, and no other one of it."""
        present = self.by_topic.get(hold.channel.topic)
        return present is not None and present.before is hold

    def decided(self, hold: Hold) -> None:
        """A commit under the hold's lease is not under way any more."""
        hold.commits_in_flight -= 1
        if hold.over and not hold.undecided:
            self._look_up()

    def end(self, error: TidewalError) -> None:
        """The session is over, and with it all leases."""
        self._over = error
        for hold in list(self.by_topic.values()):
            self._drop(hold)
        if not self.settled.done():
            self.settled.set_exception(error)
            self.settled.exception()  # whoever waited may have gone
        if self._looking_up is not None:
            self._looking_up.cancel()
        self._touch()

    def _take(self, channel: Channel, start: From, before: Hold | None = None) -> None:
        self.by_topic[channel.topic] = hold = Hold(channel, start, self._drop, before)
        hold.wanted_since = None if before is None else before.wanted_since
        channel.listeners.add(hold)

    def _drop(self, hold: Hold) -> None:
        hold.over = True
        hold.channel.listeners.discard(hold)
        if self.by_topic.get(hold.channel.topic) is hold:
            del self.by_topic[hold.channel.topic]
            self._touch()

    def _touch(self) -> None:
        self._version = next(self._numbers)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- positions ---------------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        if self._over is None and (self._looking_up is None or self._looking_up.done()):
            self._looking_up = asyncio.create_task(self._until_leased())
            self._looking_up.add_done_callback(self._looked_up)

    def _looked_up(self, looking_up: asyncio.Task[None]) -> None:
        if not looking_up.cancelled() and (error := looking_up.exception()) is not None:  # not foreseen
            self._member.end(Unavailable(f"positions of group {self._member.group} cannot be looked up: {error!r}"))

    async def _until_leased(self) -> None:
        """Give a lease to each channel whose position becomes known, until all have one."""
        reported, hanging_from = False, asyncio.get_running_loop().time() + HANGING_S
        while missing := self._without_lease():
            try:
                await self._lease(missing)
                continue
            except Unstable as error:
                trouble: Exception = error
                await self._undo(error.topic)
                if asyncio.get_running_loop().time() > hanging_from:
                    hanging_from = math.inf
                    _log.warning(
                        "the position of group %s in %s stays open though its transaction has ended: the brokers have "
                        "lost its end. `kafka-transactions.sh find-hanging` shows it, and `abort` there ends it",
                        self._member.group,
                        error.topic,
                    )
            except (TidewalError, *faults.Foreign) as error:
                trouble = error
                if faults.final(error):
                    self._member.end(faults.mapped(error, f"look up positions of group {self._member.group}"))
            if not reported:
                reported = True
                _log.info("positions of group %s are not known yet: %r", self._member.group, trouble)
            await asyncio.sleep(PAUSE_S)
            await self._cluster.refresh()
        if not self.settled.done():
            self.settled.set_result(None)

    def _without_lease(self) -> list[Hold]:
        """Whose position is to be looked up now. What is wanted back is let go instead."""
        waiting = [hold for hold in self.by_topic.values() if not hold.lease and not hold.undecided]
        for hold in waiting:
            if hold.wanted_since is not None:
                self.release(hold)
        return [hold for hold in waiting if not hold.over]

    async def _lease(self, missing: list[Hold]) -> None:
        committed = self._member.committed
        found = await committed.positions([hold.channel.topic for hold in missing])
        first: dict[str, Position] = {}
        for hold in missing:
            if hold.channel.topic in found:
                continue
            if await self._catalog.claim(self._member.group, hold.channel):
                await self._management.ensure(hold.channel)
                first[hold.channel.topic] = await committed.beginning(hold.channel, hold.start)
            else:
                self.release(hold)
        first = {topic: at for topic, at in first.items() if topic in self.by_topic}
        if first:
            await committed.store(first)
        for hold in missing:
            position = {**found, **first}.get(hold.channel.topic)
            if not hold.over and position is not None:
                hold.progress = to_progress(hold.channel, position)
                hold.lease, hold.before = next(self._numbers), None
        self._touch()

    async def _undo(self, topic: str) -> None:
        hold = self.by_topic.get(topic)
        if hold is not None:
            with contextlib.suppress(TidewalError):  # then it is tried again, or Kafka aborts it in the end
                await self._member.abort_left_open(hold.channel)


def lease_over(channel: str, lease: int) -> Fenced:
    """The error for what was delivered under a lease that is over."""
    return Fenced(
        f"{channel} was taken away since this was delivered: it is delivered again", channel=channel, term=lease
    )
