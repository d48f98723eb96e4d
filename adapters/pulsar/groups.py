"""Consumer groups on Pulsar: members are `runtime.groups.member.Member`, over the log of their group.

Not over Pulsar's subscriptions, because what those keep is less than what is promised here: the client library cannot
wait for an acknowledgement, brokers store positions once a second, nobody is told which Failover consumer is active,
channels change hands without being asked back, and how far a group is within a batch cannot be asked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, cast

from ...runtime.errors import ChannelNotFound, Closed, Fenced, InvalidRequest, ReadOnly, TidewalError, Unavailable
from ...runtime.groups.link import Ack, Shares
from ...runtime.groups.member import Member, start_member
from ...runtime.groups.positions import resolve
from ...runtime.groups.subscriptions import Subscription, check_name
from ...runtime.wal import Append, From, GroupInfo, GroupMember, Start, Wal
from . import group_following
from .group_channels import Finder
from .group_following import Following
from .group_log import HOLDER, GroupLog
from .group_records import Drop, Found, Join, Release, Seek, SeekGroup
from .ids import following
from .topics import HOLD_CURSOR, Topic, group_of, group_policy, group_topic

log = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

MAKE_ATTEMPTS = 5
CLOSE_WITHIN_S = 10.0


class Host(Wal, group_following.Host, Protocol):
    """What groups need of the WAL."""


class Groups:
    """The groups of one open log, as far as this process has to do with them; `GroupLink` for its members. Belongs to
    one event loop."""

    def __init__(self, wal: Host) -> None:
        self._wal = wal
        self._finder = Finder(wal)
        self._heart = Heart()
        self._followed: dict[str, asyncio.Task[Following]] = {}
        self._users: Counter[asyncio.Task[Following]] = Counter()  # beside the members
        self._loop = asyncio.get_running_loop()
        self._closed = False

    # ---- for `Wal` --------------------------------------------------------------------------------------------------

    async def start_member(
        self, group: str, channels: Sequence[str], start: From, reset_to: From | None, session_timeout_s: float
    ) -> Member:
        """`Wal.join`."""
        check_name("group", group)
        Subscription(channels)
        if not session_timeout_s > 0:
            raise InvalidRequest(f"a session timeout of {session_timeout_s} s leaves no time for a session")
        timeout_s = session_timeout_s
        return await start_member(
            self._wal, self, group, channels, start=start, reset_to=reset_to, session_timeout_s=timeout_s
        )

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        topics = set(await self._wal.blocking(self._wal.admin.topics))
        names = sorted(name for name in map(group_of, topics) if name is not None)
        infos: list[GroupInfo] = []
        for info in await asyncio.gather(*map(self._info, names)):
            if info is not None:
                positions = {name: at for name, at in info.positions.items() if Topic(name).name in topics}
                if positions or info.members:
                    infos.append(GroupInfo(info.name, positions, info.members))
        return infos

    async def _info(self, group: str) -> GroupInfo | None:
        async def info(followed: Following) -> GroupInfo | None:
            await followed.log.catch_up()
            return None if followed.log.state.dropped else followed.log.state.info()

        with suppress(ChannelNotFound, Fenced, ReadOnly):  # dropped meanwhile, or not begun: not by who only reads
            return await self._visit(group, info, make=False)
        return None

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        """`Wal.seek_group`."""
        check_name("group", group)
        upto = await resolve(self._wal, channel, start)
        found = await self._finder.named(group, channel)
        await self._visit(group, lambda followed: followed.log.ask(SeekGroup(channel, found, upto or found.begin)))
        await self._forget(found, channel, upto)

    async def drop_group(self, group: str) -> None:
        """`Wal.drop_group`."""
        check_name("group", group)

        async def drop(followed: Following) -> None:
            state = followed.log.state
            if not state.dropped:
                await followed.log.ask(Drop())
            await self._finder.let_go(group, [channel for channel, found in state.known.items() if found.queue])
            await self._wal.blocking(partial(self._wal.admin.delete, Topic(group_topic(group))))

        with suppress(ChannelNotFound, Fenced):
            await self._visit(group, drop, make=False)

    def channels_changed(self) -> None:
        """To be called, from anywhere, when a channel was made or dropped."""
        with suppress(RuntimeError):  # the loop is closed, and with it the groups are
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        for task in self._followed.values():
            if _result(task) is not None and task.result().log.local:
                task.result().look()

    async def close(self) -> None:
        """Leave all groups, as long as Pulsar answers."""
        self._closed = True
        leaving = asyncio.create_task(self._leave_all(), name="leave all groups")
        await asyncio.wait({leaving}, timeout=CLOSE_WITHIN_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    async def _leave_all(self) -> None:
        self._heart.stop()
        tasks = list(self._followed.values())
        await asyncio.gather(*tasks, return_exceptions=True)
        followed = [each for each in map(_result, tasks) if each is not None]
        await asyncio.gather(*(each.leave(member) for each in followed for member in list(each.log.local)))
        await asyncio.gather(*(each.close() for each in followed))

    # ---- `GroupLink` ------------------------------------------------------------------------------------------------

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        found = await self._finder.asked_for(group, channels)
        join = Join(member, self._wal.process, list(channels), start, session_timeout_s, found)

        async def ask(followed: Following) -> None:
            followed.log.local.setdefault(member, asyncio.Event())
            try:
                await followed.log.ask(join)
            except BaseException:
                del followed.log.local[member]
                raise
            self._heart.add(followed.log)
            followed.look()

        for _ in range(MAKE_ATTEMPTS):
            with suppress(Fenced):  # dropped just now: it is made again
                return await self._visit(group, ask)
        raise Unavailable(f"group {group} is dropped again and again")

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        return await self._of(group, member).log.shares(member, seen, wait_s)

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        try:
            followed = self._of(group, member)
            ids = await followed.commit(member, acks, outputs)
        except Fenced as error:
            if "channel" in error.fields or not acks:
                raise
            fields = {**error.fields, "channel": acks[0].channel, "term": acks[0].lease}
            raise Fenced(error.message, **fields) from error
        for ack in acks:
            await self._forget(followed.log.state.known.get(ack.channel), ack.channel, ack.upto)
        return ids

    async def _forget(self, found: Found | None, channel: str, upto: bytes | None) -> None:
        """Of a queue what lies before its group's position goes at once. Where that fails the next step makes up for
        it."""
        if found is not None and found.queue and upto:
            try:
                await self._wal.truncate(channel, following(upto))
            except TidewalError as error:
                log.warning("what is acknowledged of %s cannot be removed: %s", channel, error)

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        await self._of(group, member).log.ask(Release(member, channel, lease))

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        found = await self._finder.named(group, channel)
        await self._of(group, member).log.ask(Seek(member, channel, lease, upto or found.begin))
        await self._forget(found, channel, upto)

    async def leave(self, group: str, member: str) -> None:
        followed = _result(self._followed.get(group))
        if followed is not None and member in followed.log.local and not self._closed:
            await followed.leave(member)
            followed.log.local.pop(member, None)
            await self._close_if_idle(group, self._followed.get(group))

    # ---- which groups are followed ----------------------------------------------------------------------------------

    def _of(self, group: str, member: str) -> Following:
        self._check_open()
        followed = _result(self._followed.get(group))
        if followed is None or member not in followed.log.local:
            raise Fenced(f"{member} is no member of group {group} (any more): join again", group=group, member=member)
        return followed

    async def _visit(self, group: str, call: Callable[[Following], Awaitable[T]], *, make: bool = True) -> T:
        """Call with the group, followed and caught up with. It is followed as long as somebody visits it or is its
        member here. Raises `ChannelNotFound` where it is not to be made."""
        self._check_open()
        task = self._followed.get(group)
        if task is None or (task.done() and (_result(task) is None or task.result().log.ended is not None)):
            ended = _result(task)
            task = self._followed[group] = asyncio.create_task(self._follow(group, make), name=f"open group {group}")
            if ended is not None:
                self._heart.remove(ended.log)
                await ended.close()
        self._users[task] += 1
        try:
            return await call(await asyncio.shield(task))
        finally:
            self._users[task] -= 1
            await self._close_if_idle(group, task)

    async def _close_if_idle(self, group: str, task: asyncio.Task[Following] | None) -> None:
        followed = _result(task)
        if task is None or self._users[task] or (followed is not None and followed.log.local):
            return
        del self._users[task]
        if self._followed.get(group) is task:
            del self._followed[group]
        if followed is not None:
            self._heart.remove(followed.log)
            await followed.close()

    async def _follow(self, group: str, make: bool) -> Following:
        for _ in range(MAKE_ATTEMPTS):
            topic = Topic(group_topic(group), group_policy())
            if make:
                await self._wal.blocking(partial(self._make, topic))
            followed = Following(self._wal, group, self._finder)
            try:
                await followed.log.open()
            except BaseException:
                await followed.close()
                raise
            if not (make and followed.log.state.dropped):
                return followed
            await followed.close()
            await self._wal.blocking(partial(self._wal.admin.delete, topic))  # whoever dropped it may have died
        raise Unavailable(f"group {group} is dropped again and again")

    def _make(self, topic: Topic) -> None:
        admin = self._wal.admin
        admin.create(topic)
        admin.make_cursor(topic, HOLD_CURSOR + HOLDER)
        admin.set_policies(topic)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the Pulsar log is closed")


class Heart:
    """A thread that lets this process beat in the groups where it has members, however busy the event loop is. It is
    there while there are such. Thread-safe."""

    def __init__(self) -> None:
        self._next: dict[GroupLog, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, followed: GroupLog) -> None:
        """Beat there from now on."""
        with self._changed:
            self._next[followed] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tidewal-heart", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, followed: GroupLog) -> None:
        """Beat there no more; unknown is fine."""
        with self._changed:
            self._next.pop(followed, None)
            self._changed.notify()

    def stop(self) -> None:
        """Beat no more."""
        with self._changed:
            self._next.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._next:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [followed for followed, at in self._next.items() if at <= now]
                for followed in due:
                    self._next[followed] = now + followed.beat_every_s
                if not due:
                    self._changed.wait(min(self._next.values()) - now)
            for followed in due:
                followed.beat()


def _result(task: asyncio.Task[Following] | None) -> Following | None:
    """What is followed, once it is."""
    done = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and done else None


class WithGroups(ABC):
    """The part of the `Wal` that concerns groups."""

    __groups: Groups | None = None  # made when they are needed, on the loop that does

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
    ) -> GroupMember:
        return await self._groups().start_member(group, channels, start, reset_to, session_timeout_s)

    async def groups(self) -> list[GroupInfo]:
        return await self._groups().groups()

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        await self._groups().seek_group(group, channel, start)

    async def drop_group(self, group: str) -> None:
        await self._groups().drop_group(group)

    def _groups(self) -> Groups:
        self._check_open()
        if self.__groups is None:
            self.__groups = Groups(cast(Host, self))
        return self.__groups

    def _channels_changed(self) -> None:
        """To be called when a channel was made or dropped."""
        if self.__groups is not None:
            self.__groups.channels_changed()

    async def _close_groups(self) -> None:
        if self.__groups is not None:
            await self.__groups.close()

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `Closed` once the log is closed."""
