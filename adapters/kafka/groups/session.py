"""One member of a group as Kafka sees it: joined, kept alive by heartbeats, joined anew whenever the group changes.

The session runs on the I/O loop, so no handler can starve it. Every request has an answer or a time limit, and after
each failure it is sent again, to the broker that coordinates the group by then; so no outage and no rebalance leaves a
member silent. When Kafka does not know the member any more, or no broker has answered for the session timeout, the
session has ended: calls under its assignments raise the error, and the member may join anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokafka.protocol.group import (
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)

from ....runtime.errors import Fenced, InvalidRequest, TidewalError, Unavailable
from ....runtime.groups.subscriptions import Subscription
from ....runtime.log.wal import From
from .. import faults
from ..catalog import KafkaChannel
from ..channel_access import ChannelAccess, KafkaCatalog
from ..cluster import PAUSE_S, Cluster
from .assigned_topics import AssignedTopics
from .assignor import PROTOCOL, PROTOCOL_TYPE, MemberMetadata, TopicAssignment, assign_topics
from .coordinator_broker import Code, CoordinatorBroker, CoordinatorType
from .offset_store import STALE_S, OffsetStore

if TYPE_CHECKING:
    from .sessions import Sessions

LEAST_SESSION_S = 6.0  # the brokers' default minimum (group.min.session.timeout.ms)
HEARTBEAT_S = 0.5  # the longest time until a member learns that its group rebalances
HEARTBEATS = 4  # in one session timeout, at least
CATALOG_S = 1.0  # how long an assignment waits for the newest channels: the next one may include them
NO_GENERATION = -1
NO_INSTANCE: Any = None
_NOT_JOINED = (Code.MEMBER_ID_REQUIRED, Code.UNKNOWN_MEMBER, Code.INCONSISTENT_PROTOCOL)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Membership:
    """The parameters with which a member joins a group."""

    group: str
    group_id: str  # in Kafka, where groups of all logs are
    member: str
    channels: tuple[str, ...]
    start: From
    session_timeout_s: float


class Session:
    """The session of one member. Belongs to the I/O loop."""

    def __init__(
        self,
        membership: Membership,
        cluster: Cluster,
        catalog: KafkaCatalog,
        management: ChannelAccess,
        connections: tuple[int, int],
        numbers: Iterator[int],
        peers: Sessions,
        known_as: str,
    ) -> None:
        """`connections` are for joining, which may take long, and for other requests. `known_as` is Kafka's id of the
        same member in an earlier session, so that joining need not wait for the end of that session; "" for none."""
        self.membership = membership
        self.group: str = membership.group
        self.group_id: str = membership.group_id
        self.coordinator: CoordinatorBroker = CoordinatorBroker(cluster, CoordinatorType.GROUP, membership.group_id)
        self.offset_store: OffsetStore = OffsetStore(cluster, self, connections[1])
        self.kafka_member: str = known_as
        self.generation: int = NO_GENERATION
        self.assigned_topics: AssignedTopics = AssignedTopics(self, cluster, catalog, management, numbers)
        self.over: TidewalError | None = None
        self._cluster, self._catalog = cluster, catalog
        self._joining, self._connection = connections
        self._subscription = Subscription(membership.channels)
        self._known_to = catalog.applied_to
        self._partitions = Counter(channel.topic for channel in self._subscribed() if channel.foreign)
        self._turn = 0
        self._led_subscriptions: Sequence[Subscription] = ()  # of all members, while this one is the leader
        self._assigned_channels: frozenset[tuple[int, str | None]] = frozenset()
        self.in_join: bool = False
        self._rejoin = asyncio.Event()
        self._heartbeat_due = asyncio.Event()
        self._joined = asyncio.Event()  # set while the generation is known
        self._answered_at = asyncio.get_running_loop().time()
        self._session_s = membership.session_timeout_s  # the session timeout that the brokers allow
        self._peers = peers
        self._main: asyncio.Task[None] | None = None

    # ---- for callers -------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Let the group begin another generation, so that requests of this one that are still in flight are refused."""
        self._joined.clear()
        self._turn += 1
        self._rejoin.set()

    def channel_released(self) -> None:
        """The member has released a channel: the group has to assign it anew."""
        self._rejoin.set()

    async def abort_left_open(self, channel: KafkaChannel) -> None:
        """End the transaction that the previous member with the channel has left open, if any."""
        await self._peers.abort_left_open(self.group_id, channel)

    def heartbeat_now(self) -> None:
        """Send a heartbeat now: the group may rebalance."""
        self._heartbeat_due.set()

    def channels_changed(self) -> None:
        """The catalog has changed; the leader starts a rebalance where that changes the assignment."""
        if self._led_subscriptions and self._assigned_channels != self._assignable_channels():
            self._turn += 1
            self._rejoin.set()

    async def leave(self, why: TidewalError) -> None:
        """End the session with the error `why`; the other members get the channels at once, or after the session
        timeout where no broker answers."""
        member = self.kafka_member
        self.end(why)
        if member:
            with contextlib.suppress(*faults.Foreign):
                async with asyncio.timeout(self._cluster.options.request_timeout_s):
                    await self.coordinator.ask(LeaveGroupRequest(self.group_id, member), self._connection)
        self._peers.heartbeat_now(self.group_id)

    def end(self, error: TidewalError) -> None:
        """End the session: its assignments are over, and calls raise `error`."""
        if self.over is not None:
            return
        self.over = error
        self.assigned_topics.end(error)
        self._joined.set()
        if self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()

    # ---- joining -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join, and join anew whenever there is a reason, until the session is over."""
        self._main = asyncio.current_task()
        heartbeat = asyncio.create_task(self._heartbeat_loop())
        heartbeat.add_done_callback(self._heartbeat_ended)
        try:
            while self.over is None:
                self._rejoin.clear()
                self.in_join = True
                await self._join()
                self.in_join = False
                await self._rejoin.wait()
        except TidewalError as error:
            self.end(error)
        except Exception as error:  # unexpected: raised in the consumer
            _log.exception("the session of group %s failed", self.group)
            self.end(Unavailable(f"the session of group {self.group} failed: {error!r}"))
        finally:
            heartbeat.cancel()

    async def _join(self) -> None:
        reported = False
        while self.over is None:
            try:
                if await self._join_once():
                    return
                await asyncio.sleep(STALE_S)
            except faults.Foreign as error:
                if faults.final(error):
                    raise faults.mapped(error, f"join group {self.group}") from error
                if not reported:
                    reported = True
                    _log.info("joining group %s takes another attempt: %r", self.group, error)
                await asyncio.sleep(PAUSE_S)
                await self._cluster.refresh()

    async def _join_once(self) -> bool:
        """One attempt to join: send the metadata and receive the assignment. Returns whether that succeeded."""
        asking = self._ask_to_join()
        asyncio.get_running_loop().call_later(STALE_S, self._peers.heartbeat_now, self.group_id)
        response = await self.coordinator.ask(asking, self._joining)
        code = self.coordinator.check(
            response.error_code,
            but=(*_NOT_JOINED, Code.INVALID_SESSION_TIMEOUT),
        )
        self._note_answer()
        if code == Code.INCONSISTENT_PROTOCOL:
            raise InvalidRequest(
                f"group {self.group_id} has members of another client, which do not divide channels as Tidewal does:"
                " end them first, or take another group"
            )
        if code == Code.INVALID_SESSION_TIMEOUT and self._session_s < LEAST_SESSION_S:
            self._session_s = LEAST_SESSION_S
            return await self._join_once()
        if code == Code.INVALID_SESSION_TIMEOUT:
            raise InvalidRequest(
                f"the brokers allow no session of {self.membership.session_timeout_s} s: see group.min.session.timeout"
                f".ms and group.max.session.timeout.ms"
            )
        if code == Code.UNKNOWN_MEMBER:
            if self.generation != NO_GENERATION:
                raise self._not_a_member()
            self.kafka_member = ""
            return False
        self.kafka_member = response.member_id
        if code == Code.MEMBER_ID_REQUIRED:
            return await self._join_once()
        self._joined.clear()
        self.generation = response.generation_id
        self._led_subscriptions = ()
        leads = response.leader_id == self.kafka_member
        assignments = await self._assign(response.members) if leads else []
        return await self._synchronize(assignments)

    async def _synchronize(self, assignments: list[tuple[str, bytes]]) -> bool:
        request = SyncGroupRequest(self.group_id, self.generation, self.kafka_member, NO_INSTANCE, assignments)
        response = await self.coordinator.ask(request, self._joining)
        again = (Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION)
        code = self.coordinator.check(response.error_code, but=(Code.UNKNOWN_MEMBER, *again))
        self._note_answer()
        if code == Code.UNKNOWN_MEMBER:
            raise self._not_a_member()
        if code:
            return False
        foreign = self._cluster.options.foreign
        await self._apply(TopicAssignment.decode(response.member_assignment, foreign=foreign))
        self._joined.set()
        return True

    def _ask_to_join(self) -> JoinGroupRequest:
        membership = self.membership
        metadata = MemberMetadata(
            membership.member,
            membership.channels,
            membership.start,
            self._known_to,
            sorted({channel.topic for channel in self._subscribed()}),
            frozenset(self.assigned_topics.by_topic),
            self._turn,
            self._partitions,
        )
        session_ms = int(self._session_s * 1000)
        protocols = [(PROTOCOL, metadata.encode())]
        return JoinGroupRequest(
            membership.group_id, session_ms, session_ms, self.kafka_member, NO_INSTANCE, PROTOCOL_TYPE, protocols
        )

    async def _assign(self, members: Sequence[tuple[Any, ...]]) -> list[tuple[str, bytes]]:
        await self._learn_of_channels()
        metadata_by_member: dict[str, MemberMetadata] = {}
        for member, *_, data in members:
            try:
                metadata_by_member[member] = MemberMetadata.decode(data)
            except (ValueError, KeyError):  # another client: it gets no channels
                _log.warning("group %s has a member with unknown metadata", self.group_id)
        self._led_subscriptions = [Subscription(metadata.channels) for metadata in metadata_by_member.values()]
        self._assigned_channels = self._assignable_channels()
        assignments = assign_topics(self.group, metadata_by_member, self._catalog.all())
        return [(member, assignment.encode()) for member, assignment in assignments.items()]

    async def _apply(self, assignment: TopicAssignment) -> None:
        known = {channel.key: channel for channel in self._catalog.all()}
        if not assignment.topics <= known.keys():
            await self._learn_of_channels()
            known = {channel.key: channel for channel in self._catalog.all()}
        channels = {
            known[topic]: From.LATEST if topic in assignment.from_latest else From.EARLIEST
            for topic in sorted(assignment.topics & known.keys())
        }
        self.assigned_topics.apply(channels, assignment.revoking)

    async def _learn_of_channels(self) -> None:
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(CATALOG_S):
                await self._catalog.sync()

    def _subscribed(self) -> list[KafkaChannel]:
        return [channel for channel in self._catalog.all() if self._subscription.takes(channel.name)]

    def _assignable_channels(self) -> frozenset[tuple[int, str | None]]:
        wanted = (
            channel
            for channel in self._catalog.all()
            if any(each.takes(channel.name) for each in self._led_subscriptions)
        )
        return frozenset((channel.incarnation, channel.queue_of) for channel in wanted)

    # ---- for `OffsetStore` -------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Return once the member knows its generation and assignment. Raises what ended the session."""
        await self._joined.wait()
        if self.over is not None:
            raise self.over

    def refused(self, code: int) -> None:
        """The coordinator has refused a request of a stale generation or unknown member with `code`. Raises what ended
        the session."""
        if code == Code.UNKNOWN_MEMBER:
            self.end(self._not_a_member())
        if self.over is not None:
            raise self.over
        self._rejoin.set()

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    async def _heartbeat_loop(self) -> None:
        while self.over is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(HEARTBEAT_S, self._session_s / HEARTBEATS)):
                    await self._heartbeat_due.wait()
            self._heartbeat_due.clear()
            if self.kafka_member:
                await self._heartbeat()
            self._check_silence()
            self.assigned_topics.release_overdue(self.membership.session_timeout_s)

    def _heartbeat_ended(self, heartbeat: asyncio.Task[None]) -> None:
        if (
            not heartbeat.cancelled() and (error := heartbeat.exception()) is not None
        ):  # unexpected: raised in the consumer
            self.end(Unavailable(f"the session of group {self.group} is not kept any more: {error!r}"))

    async def _heartbeat(self) -> None:
        generation = self.generation
        request = HeartbeatRequest(self.group_id, generation, self.kafka_member)
        try:
            response = await self.coordinator.ask(request, self._connection)
            again = (Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION)
            code = self.coordinator.check(response.error_code, but=(Code.UNKNOWN_MEMBER, *again))
        except faults.Foreign:
            return
        self._note_answer()
        if self.in_join or generation != self.generation:
            return  # joining handles it
        if code == Code.UNKNOWN_MEMBER:
            self.end(self._not_a_member())
        elif code:
            self._rejoin.set()

    def _note_answer(self) -> None:
        self._answered_at = asyncio.get_running_loop().time()

    def _check_silence(self) -> None:
        """End the session once Kafka may have assigned this member's channels to other members."""
        joined = self.generation != NO_GENERATION
        limit_s = self._session_s if joined else self._cluster.options.delivery_timeout_s
        if asyncio.get_running_loop().time() - self._answered_at > limit_s:
            self.end(Unavailable(f"no broker has answered for group {self.group} in {limit_s} s"))

    def _not_a_member(self) -> Fenced:
        membership = self.membership
        self.kafka_member = ""
        return Fenced(
            f"{membership.member} is no member of group {membership.group} (any more): join again", group=self.group
        )
