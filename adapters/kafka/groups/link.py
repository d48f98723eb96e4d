"""`GroupLink` over Kafka: the sessions of this process's members."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

from ....runtime.errors import Closed, Fenced, MessageTooLarge
from ....runtime.groups.link import Ack, Shares
from ....runtime.groups.progress import Progress
from ....runtime.groups.subscriptions import Subscription, check_name
from ....runtime.wal import Append, From
from ..catalog import Catalog, Channel
from ..cluster import Cluster
from ..io_thread import IoThread
from ..management import Management
from .committing import Committer, forget
from .holdings import lease_over
from .offsets import to_position
from .session import Membership, Session
from .transaction import Producer

CONNECTION = 1  # of all sessions, for what does not wait long; joining has one of its own for each


def group_id(prefix: str, group: str) -> str:
    """A group's name in Kafka, which knows no logs."""
    return f"{prefix}.{group}"


class Sessions:
    """What members do, on the I/O loop."""

    def __init__(
        self,
        cluster: Cluster,
        catalog: Catalog,
        management: Management,
        io: IoThread,
        connection: Callable[[Channel], int],
        connections: Iterator[int],
    ) -> None:
        """`connection` is for appending to a channel; `connections` are for joining."""
        self._cluster, self._catalog, self._management, self._io = cluster, catalog, management, io
        self._connection = connection
        self._sessions: dict[tuple[str, str], tuple[Session, Committer]] = {}
        self._known_as: dict[tuple[str, str], str] = {}
        self._producers: dict[str, Producer] = {}
        self._numbers = itertools.count(1)
        self._connections = connections
        self._free: list[int] = []
        self._closed = False
        catalog.changed = self._channels_changed

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        """`GroupLink.join`."""
        self._check_open()
        self._forget(group, member)
        joining = self._free.pop() if self._free else next(self._connections)
        id = group_id(self._cluster.options.prefix, group)
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
        committer = Committer(
            session, self._cluster, self._management, lambda of: self._producer(id, of), self._connection
        )
        self._sessions[group, member] = session, committer
        self._io.spawn(self._run(session, joining))
        await asyncio.shield(session.holdings.settled)

    async def _run(self, session: Session, joining: int) -> None:
        await session.run()
        if not session.in_join:  # otherwise an answer is still to come on it
            self._free.append(joining)

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        """`GroupLink.shares`."""
        session, _ = self._find(group, member)
        return await session.holdings.shares(seen, wait_s)

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """`GroupLink.commit`."""
        _, committer = self._find(group, member)
        channels = {name: await self._management.find(name) for name in {output.channel for output in outputs}}
        for output in outputs:
            limit = channels[output.channel].policy.max_message_bytes
            if len(output.payload) > limit:
                raise MessageTooLarge(
                    f"a message of {len(output.payload)} bytes for {output.channel} is over its limit of {limit}",
                    size=len(output.payload),
                    limit=limit,
                )
        return await committer.commit(acks, outputs, channels)

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        """`GroupLink.release`."""
        session, _ = self._find(group, member)
        try:
            hold = session.holdings.find(channel, lease)
        except Fenced:
            return
        session.holdings.lease_anew(hold)

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        """`GroupLink.seek`."""
        session, committer = self._find(group, member)
        hold = session.holdings.find(channel, lease)
        at = upto or await self._management.before_first(hold.channel)
        holdings = session.holdings
        holdings.find(channel, lease)
        hold.commits_in_flight += 1  # the position is looked up behind this
        holdings.lease_anew(hold)  # first: what is acknowledged from now on must not pass this
        try:
            await committer.finish(hold)
            if not holdings.keeps(hold):
                raise lease_over(channel, lease)
            await session.committed.store({hold.channel.topic: to_position(hold.channel, Progress(at))})
        finally:
            holdings.decided(hold)
        await forget(self._management, hold.channel, at)

    async def leave(self, group: str, member: str) -> None:
        """`GroupLink.leave`."""
        session, committer = self._sessions.pop((group, member), (None, None))
        self._known_as.pop((group, member), None)
        if session is not None and committer is not None:
            if session.over is None:
                await committer.finish()
            left = f"{member} has left group {group}"
            await session.leave(Closed("the log is closed") if self._closed else Fenced(left, group=group))

    async def check(self, group: str, channels: Sequence[str]) -> None:
        """Whether a member may ask for these channels. Raises what `Wal.join` does."""
        check_name("group", group)
        for name in sorted(Subscription(channels).names):
            await self._management.open_to(group, await self._management.find(name))

    async def close(self) -> None:
        """End all sessions."""
        self._closed = True
        await asyncio.gather(*(self.leave(*key) for key in list(self._sessions)))

    # ---- for sessions ------------------------------------------------------------------------------------------------

    def look(self, group_id: str) -> None:
        """Have the members of a group in this process ask whether it changes."""
        for session, _ in self._sessions.values():
            if session.group_id == group_id:
                session.look()

    async def abort_left_open(self, group_id: str, channel: Channel) -> None:
        """End the transaction that whoever had the channel before has left open, if there is one."""
        await self._producer(group_id, channel).cut_off()

    def _producer(self, group_id: str, channel: Channel) -> Producer:
        name = f"{group_id}/{channel.topic}"
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = Producer(self._cluster, name)
        return producer

    def _forget(self, group: str, member: str) -> None:
        """The session that a member had is over; what Kafka called it is not forgotten."""
        session, _ = self._sessions.pop((group, member), (None, None))
        if session is not None:
            self._known_as[group, member] = session.kafka_member
            session.end(Fenced(f"{member} joins group {group} again", group=group))

    def _find(self, group: str, member: str) -> tuple[Session, Committer]:
        self._check_open()
        found = self._sessions.get((group, member))
        if found is None:
            raise Fenced(f"{member} is no member of group {group} (any more): join again", group=group)
        return found

    def _channels_changed(self) -> None:
        for session, _ in self._sessions.values():
            session.channels_changed()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the log is closed")


class KafkaLink:
    """`GroupLink`, from any loop."""

    def __init__(self, sessions: Sessions, io: IoThread) -> None:
        self._sessions, self._io = sessions, io

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        await self._io.call(lambda: self._sessions.join(group, member, channels, start, session_timeout_s))

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        return await self._io.call(lambda: self._sessions.shares(group, member, seen, wait_s))

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        return await self._io.call(lambda: self._sessions.commit(group, member, acks, outputs))

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        await self._io.call(lambda: self._sessions.release(group, member, channel, lease))

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        await self._io.call(lambda: self._sessions.seek(group, member, channel, lease, upto))

    async def leave(self, group: str, member: str) -> None:
        await self._io.call(lambda: self._sessions.leave(group, member))
