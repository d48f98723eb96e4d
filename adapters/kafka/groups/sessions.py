"""The sessions of this process's members, and the administration of groups."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from ....runtime.errors import Closed, Fenced
from ....runtime.groups.coordinator_client import Ack, MemberAssignment
from ....runtime.groups.progress import GroupProgress
from ....runtime.groups.subscriptions import Subscription
from ....runtime.log.checks import check_name, check_size
from ....runtime.log.wal import Append, From, GroupInfo
from ..catalog import KafkaChannel
from ..channel_access import ChannelAccess, EncodedEntries, KafkaCatalog
from ..cluster import Cluster
from ..io_thread import IoThread
from .assigned_topics import epoch_over
from .group_admin import GroupAdmin
from .offset_committer import OffsetCommitter, forget
from .offsets import to_position
from .session import Membership, Session
from .transaction import TransactionalProducer

NO_OUTPUTS = EncodedEntries((), (), ())
CONNECTION = 1  # of all sessions, for short requests; each session joins over a connection of its own
APPEND_CONNECTIONS = range(CONNECTION + 1, CONNECTION + 5)  # for the entries of transactions
FIRST_JOIN_CONNECTION = APPEND_CONNECTIONS.stop


class Sessions:
    """The sessions of this process's members, and the administration of groups: `CoordinatorClient`, on the I/O
    loop."""

    def __init__(self, cluster: Cluster, catalog: KafkaCatalog, management: ChannelAccess, io: IoThread) -> None:
        self._cluster, self._catalog, self._management, self._io = cluster, catalog, management, io
        self._admin = GroupAdmin(cluster, catalog)
        self._sessions: dict[tuple[str, str], tuple[Session, OffsetCommitter]] = {}
        self._known_as: dict[tuple[str, str], str] = {}
        self._producers: dict[str, TransactionalProducer] = {}
        self._numbers = itertools.count(1)
        self._join_connections = itertools.count(FIRST_JOIN_CONNECTION)
        self._free: list[int] = []
        self._closed = False
        catalog.changed = self._channels_changed

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        """`CoordinatorClient.join`. A member that joins again goes on without channels that were dropped meanwhile."""
        self._check_open()
        if (group, member) not in self._sessions:
            await self._check(group, channels)
        self._forget(group, member)
        joining = self._free.pop() if self._free else next(self._join_connections)
        id = self._cluster.options.group_id(group)
        session = Session(
            Membership(group, id, member, tuple(channels), start, session_timeout_s),
            self._cluster,
            self._catalog,
            self._management,
            (joining, CONNECTION),
            self._numbers,
            self,
            self._known_as.pop((group, member), ""),
        )
        committer = OffsetCommitter(
            session, self._cluster, self._management, lambda of: self._producer(id, of), _append_connection
        )
        self._sessions[group, member] = session, committer
        self._io.spawn(self._run(session, joining))
        await asyncio.shield(session.assigned_topics.settled)

    async def _run(self, session: Session, joining: int) -> None:
        await session.run()
        if not session.in_join:  # otherwise an answer is still outstanding on it
            self._free.append(joining)

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        """`CoordinatorClient.assignment`."""
        session, _ = self._find(group, member)
        return await session.assigned_topics.assignment(seen, wait_s)

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """`CoordinatorClient.commit`."""
        _, committer = self._find(group, member)
        for name in {output.channel for output in outputs}:
            await self._management.subscribed(name)
        encoded = self._management.route(self._management.encode(outputs)) if outputs else NO_OUTPUTS
        channels = {name: await self._management.find(name) for name in set(encoded.names)}
        for name, size in zip(encoded.names, encoded.sizes, strict=True):
            check_size(name, size, channels[name].policy.max_message_bytes)
        return await committer.commit(acks, encoded, channels)

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        """`CoordinatorClient.release`."""
        session, _ = self._find(group, member)
        try:
            assigned = session.assigned_topics.find(channel, assignment_epoch)
        except Fenced:
            return
        session.assigned_topics.renew_epoch(assigned)

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        """`CoordinatorClient.seek`."""
        session, committer = self._find(group, member)
        assigned = session.assigned_topics.find(channel, assignment_epoch)
        at = upto or await self._management.before_first(assigned.channel)
        assigned_topics = session.assigned_topics
        assigned_topics.find(channel, assignment_epoch)
        assigned.commits_in_flight += 1  # so that the position is looked up after this
        assigned_topics.renew_epoch(assigned)  # first: acknowledgements from now on must not overtake the seek
        try:
            await committer.finish(assigned)
            if not assigned_topics.keeps(assigned):
                raise epoch_over(channel, assignment_epoch)
            await session.offset_store.store({assigned.channel.key: to_position(assigned.channel, GroupProgress(at))})
        finally:
            assigned_topics.decided(assigned)
        await forget(self._management, assigned.channel, at)

    async def leave(self, group: str, member: str) -> None:
        """`CoordinatorClient.leave`."""
        session, committer = self._sessions.pop((group, member), (None, None))
        self._known_as.pop((group, member), None)
        if session is not None and committer is not None:
            if session.over is None:
                await committer.finish()
            left = f"{member} has left group {group}"
            await session.leave(Closed("the log is closed") if self._closed else Fenced(left, group=group))

    async def groups(self) -> list[GroupInfo]:
        """`CoordinatorClient.groups`."""
        return await self._admin.groups()

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        """`CoordinatorClient.seek_group`, only for a group without members: `InvalidRequest` where it has some."""
        found = await self._management.find(channel)
        await self._management.open_to(group, found)
        upto = upto or await self._management.before_first(found)
        await self._admin.move(group, found, upto)
        await forget(self._management, found, upto)

    async def drop_group(self, group: str) -> None:
        """`CoordinatorClient.drop_group`."""
        await self._admin.drop(group)

    async def close(self) -> None:
        """End all sessions."""
        self._closed = True
        await asyncio.gather(*(self.leave(*key) for key in list(self._sessions)))

    # ---- for sessions ------------------------------------------------------------------------------------------------

    def heartbeat_now(self, group_id: str) -> None:
        """Let the members of a group in this process send a heartbeat, which tells them whether it rebalances."""
        for session, _ in self._sessions.values():
            if session.group_id == group_id:
                session.heartbeat_now()

    async def abort_left_open(self, group_id: str, channel: KafkaChannel) -> None:
        """End the transaction that the previous member with the channel has left open, if any."""
        await self._producer(group_id, channel).fence()

    def _producer(self, group_id: str, channel: KafkaChannel) -> TransactionalProducer:
        name = f"{group_id}/{channel.key}"
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = TransactionalProducer(self._cluster, name)
        return producer

    async def _check(self, group: str, channels: Sequence[str]) -> None:
        """Check that a member may subscribe to these channels. Raises what `Wal.join` does."""
        check_name("group", group)
        for name in sorted(Subscription(channels).names):
            for channel in await self._management.subscribed(name):
                await self._management.open_to(group, channel)

    def _forget(self, group: str, member: str) -> None:
        """End the session that a member had, and keep Kafka's member id of it."""
        session, _ = self._sessions.pop((group, member), (None, None))
        if session is not None:
            self._known_as[group, member] = session.kafka_member
            session.end(Fenced(f"{member} joins group {group} again", group=group))

    def _find(self, group: str, member: str) -> tuple[Session, OffsetCommitter]:
        self._check_open()
        found = self._sessions.get((group, member))
        if found is None:
            raise Fenced(f"{member} is not a member of group {group} (any more): join again", group=group)
        return found

    def _channels_changed(self) -> None:
        for session, _ in self._sessions.values():
            session.channels_changed()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the log is closed")


def _append_connection(channel: KafkaChannel) -> int:
    return APPEND_CONNECTIONS[channel.incarnation % len(APPEND_CONNECTIONS)]
