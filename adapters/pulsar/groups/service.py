"""Consumer groups on Pulsar: members are `GroupConsumer`s, over the log of their group.

Pulsar's subscriptions are not used, since they guarantee less: the client library cannot wait for an acknowledgement,
brokers store positions once a second, clients are not told which Failover consumer is active, channels are assigned
anew without a revocation, and the position of a group within a batch cannot be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from ....runtime.actor.heartbeat import HeartbeatCallback, HeartbeatThread
from ....runtime.errors import ChannelNotFound, Closed, Fenced, InvalidRequest, ReadOnly, TidewalError, Unavailable
from ....runtime.groups.commands import ChannelIdentity, Drop, Join, Release, Seek, SeekGroup
from ....runtime.groups.coordinator_client import Ack, MemberAssignment
from ....runtime.groups.group_log import HOLDER, GroupLog
from ....runtime.log.checks import check_name
from ....runtime.log.wal import Append, From, GroupInfo, Wal
from ..ids import next_id
from ..topics import HOLD_CURSOR, PulsarTopic, group_of, group_policy, group_topic
from . import session as group_session
from .channels import ChannelFinder
from .session import GroupSession

log: logging.Logger = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

MAKE_ATTEMPTS = 5
CLOSE_WITHIN_S = 10.0


class GroupsHost(Wal, group_session.GroupSessionHost, Protocol):
    """What groups need of the WAL."""


class Groups:
    """The groups of one open log that this process uses, and the `CoordinatorClient` of its members. Belongs to one
    event loop."""

    def __init__(self, wal: GroupsHost) -> None:
        self._wal = wal
        self._finder = ChannelFinder(wal)
        self._heartbeat = HeartbeatThread()  # of this process, in each group where it has members
        self._beating: dict[GroupLog, HeartbeatCallback] = {}
        self._sessions: dict[str, asyncio.Task[GroupSession]] = {}
        self._users: Counter[asyncio.Task[GroupSession]] = Counter()  # calls in progress, besides the members
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._heartbeat.start()

    # ---- administration ---------------------------------------------------------------------------------------------

    async def groups(self) -> list[GroupInfo]:
        topics = set(await self._wal.blocking(self._wal.admin.topics))
        names = sorted(name for name in map(group_of, topics) if name is not None)
        infos: list[GroupInfo] = []
        for info in await asyncio.gather(*map(self._info, names)):
            if info is not None:
                positions = {name: at for name, at in info.positions.items() if PulsarTopic(name).name in topics}
                metadata = {name: stored for name, stored in info.metadata.items() if name in positions}
                if positions or info.members:
                    infos.append(GroupInfo(info.name, positions, info.members, metadata))
        return infos

    async def _info(self, group: str) -> GroupInfo | None:
        async def info(session: GroupSession) -> GroupInfo | None:
            await session.log.catch_up()
            return None if session.log.state.dropped else session.log.state.info()

        with suppress(
            ChannelNotFound, Fenced, ReadOnly
        ):  # dropped meanwhile, or without records, which a read-only log cannot append
            return await self._with_session(group, info, make=False)
        return None

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        check_name("group", group)
        found = await self._finder.named(group, channel)
        await self._with_session(group, lambda session: session.log.ask(SeekGroup(channel, found, upto or found.begin)))
        await self._forget(found, channel, upto)

    async def drop_group(self, group: str) -> None:
        check_name("group", group)

        async def drop(session: GroupSession) -> None:
            state = session.log.state
            if not state.dropped:
                await session.log.ask(Drop())
            await self._finder.unbind_queues(group, [channel for channel, found in state.known.items() if found.queue])
            await self._wal.blocking(partial(self._wal.admin.delete, PulsarTopic(group_topic(group))))

        with suppress(ChannelNotFound, Fenced):
            await self._with_session(group, drop, make=False)

    def channels_changed(self) -> None:
        """To be called, from any thread, when a channel was created or dropped."""
        with suppress(RuntimeError):  # the loop is closed, and the groups with it
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        for task in self._sessions.values():
            if _result(task) is not None and task.result().log.local:
                task.result().look()

    async def close(self) -> None:
        """Leave all groups, for `CLOSE_WITHIN_S` at most."""
        self._closed = True
        leaving = asyncio.create_task(self._leave_all(), name="leave all groups")
        await asyncio.wait({leaving}, timeout=CLOSE_WITHIN_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    async def _leave_all(self) -> None:
        for group_log in list(self._beating):
            self._stop_beating(group_log)
        tasks = list(self._sessions.values())
        await asyncio.gather(*tasks, return_exceptions=True)
        sessions = [each for each in map(_result, tasks) if each is not None]
        await asyncio.gather(*(each.leave(member) for each in sessions for member in list(each.log.local)))
        await asyncio.gather(*(each.close() for each in sessions))

    # ---- members -----------------------------------------------------------------------------------------------------

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        check_name("group", group)
        if not session_timeout_s > 0:
            raise InvalidRequest(f"a session timeout of {session_timeout_s} s leaves no time for a session")
        found = await self._finder.asked_for(group, channels)

        async def ask(session: GroupSession) -> None:
            numbers_from = session.log.numbers_from()
            join = Join(member, self._wal.process, list(channels), start, session_timeout_s, found, numbers_from)
            session.log.local.setdefault(member, asyncio.Event())
            try:
                await session.log.ask(join)
            except BaseException:
                del session.log.local[member]
                raise
            self._beat_now(session.log)
            session.look()

        for _ in range(MAKE_ATTEMPTS):
            with suppress(Fenced):  # dropped meanwhile: it is created again
                return await self._with_session(group, ask)
        raise Unavailable(f"group {group} is dropped again and again")

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        return await self._of(group, member).log.assignment(member, seen, wait_s)

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        try:
            session = self._of(group, member)
            ids = await session.commit(member, acks, outputs)
        except Fenced as error:
            if "channel" in error.fields or not acks:
                raise
            fields = {**error.fields, "channel": acks[0].channel, "term": acks[0].assignment_epoch}
            raise Fenced(error.message, **fields) from error
        for ack in acks:
            await self._forget(session.log.state.known.get(ack.channel), ack.channel, ack.upto)
        return ids

    async def _forget(self, found: ChannelIdentity | None, channel: str, upto: bytes | None) -> None:
        """Remove the entries of a queue before its group's position. A failure is logged: the next acknowledgement
        removes them."""
        if found is not None and found.queue and upto:
            try:
                await self._wal.truncate(channel, next_id(upto))
            except TidewalError as error:
                log.warning(
                    "acknowledged entries of %s cannot be removed: %s", channel, error, extra={"channel": channel}
                )

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        await self._of(group, member).log.ask(Release(member, channel, assignment_epoch))

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        found = await self._finder.named(group, channel)
        await self._of(group, member).log.ask(Seek(member, channel, assignment_epoch, upto or found.begin))
        await self._forget(found, channel, upto)

    async def leave(self, group: str, member: str) -> None:
        session = _result(self._sessions.get(group))
        if session is not None and member in session.log.local and not self._closed:
            await session.leave(member)
            session.log.local.pop(member, None)
            await self._close_if_idle(group, self._sessions.get(group))

    # ---- sessions of groups ----------------------------------------------------------------------------------------

    def _of(self, group: str, member: str) -> GroupSession:
        self._check_open()
        session = _result(self._sessions.get(group))
        if session is None or member not in session.log.local:
            raise Fenced(
                f"{member} is not a member of group {group} (any more): join again", group=group, member=member
            )
        return session

    async def _with_session(self, group: str, call: Callable[[GroupSession], Awaitable[T]], *, make: bool = True) -> T:
        """Call with the session of the group, whose log is followed and caught up with. The session lasts as long as
        there are calls or members of this process. The log is created where there is none; without `make` that raises
        `ChannelNotFound`."""
        self._check_open()
        task = self._sessions.get(group)
        if task is None or (task.done() and (_result(task) is None or task.result().log.ended is not None)):
            ended = _result(task)
            task = self._sessions[group] = asyncio.create_task(
                self._open_session(group, make), name=f"open group {group}"
            )
            if ended is not None:
                self._stop_beating(ended.log)
                await ended.close()
        self._users[task] += 1
        try:
            return await call(await asyncio.shield(task))
        finally:
            self._users[task] -= 1
            await self._close_if_idle(group, task)

    async def _close_if_idle(self, group: str, task: asyncio.Task[GroupSession] | None) -> None:
        session = _result(task)
        if task is None or self._users[task] or (session is not None and session.log.local):
            return
        del self._users[task]
        if self._sessions.get(group) is task:
            del self._sessions[group]
        if session is not None:
            self._stop_beating(session.log)
            await session.close()

    async def _open_session(self, group: str, make: bool) -> GroupSession:
        for _ in range(MAKE_ATTEMPTS):
            topic = PulsarTopic(group_topic(group), group_policy())
            if make:
                await self._wal.blocking(partial(self._create_topic, topic))
            session = GroupSession(self._wal, group, self._finder)
            try:
                await session.log.open()
            except BaseException:
                await session.close()
                raise
            if not (make and session.log.state.dropped):
                return session
            await session.close()
            await self._wal.blocking(
                partial(self._wal.admin.delete, topic)
            )  # the process that dropped it may have died
        raise Unavailable(f"group {group} is dropped again and again")

    def _beat_now(self, group_log: GroupLog) -> None:
        """Send a heartbeat of this process now, and again and again from now on."""
        beating = self._beating.get(group_log)
        if beating is None:
            beating = self._heartbeat.every(
                lambda: group_log.beat_every_s, group_log.beat, f"in the log {group_log.topic}"
            )
            self._beating[group_log] = beating
        beating.within(0)

    def _stop_beating(self, group_log: GroupLog) -> None:
        beating = self._beating.pop(group_log, None)
        if beating is not None:
            beating.cancel()

    def _create_topic(self, topic: PulsarTopic) -> None:
        admin = self._wal.admin
        admin.create(topic)
        admin.make_cursor(topic, HOLD_CURSOR + HOLDER)
        admin.set_policies(topic)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the Pulsar log is closed")


def _result(task: asyncio.Task[GroupSession] | None) -> GroupSession | None:
    """The session, once it is open; None before, and when opening it failed."""
    done = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and done else None
