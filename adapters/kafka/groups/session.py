"""One member of a group as Kafka sees it: joined, kept alive by heartbeats, joined anew whenever the group changes.

All of it runs on the I/O loop, so no handler can starve it. Every request has an answer or a time limit, and after each
failure it is sent again, to whichever broker coordinates the group by then; so no outage and no rebalance leaves a
member silent. When Kafka does not know the member any more, or nobody has answered for as long as the session lasts,
the session is over: everybody with a lease of it is told, and may join anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiokafka.protocol.group import (
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)

from ....runtime.errors import Fenced, InvalidRequest, TidewalError, Unavailable
from ....runtime.groups.subscriptions import Subscription
from ....runtime.wal import From
from .. import faults
from ..catalog import Catalog, Channel
from ..cluster import PAUSE_S, Cluster
from ..management import Management
from .committed import STALE_S, Committed
from .coordinator import Code, Coordinator, Kind
from .holdings import Holdings
from .sharing import PROTOCOL, PROTOCOL_TYPE, Claim, Grant, share_out

LEAST_SESSION_S = 6.0  # what brokers take unless told otherwise (group.min.session.timeout.ms)
HEARTBEAT_S = 0.5  # so long it takes at most until a member knows that its group changes
BEATS = 4  # in a session, at least
CATALOG_S = 1.0  # how long a division waits for the newest channels: they may come with the next one
NO_GENERATION = -1
NO_INSTANCE: Any = None

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Membership:
    """Who joins what, and how."""

    group: str
    group_id: str  # in Kafka, where groups of all logs are
    member: str
    channels: tuple[str, ...]
    start: From
    session_timeout_s: float


class Peers(Protocol):
    """What a session needs of the rest of this process."""

    def look(self, group_id: str) -> None:
        """The group's members should ask whether it changes."""
        ...

    async def abort_left_open(self, group_id: str, channel: Channel) -> None:
        """End the transaction that whoever had the channel before has left open, if there is one."""
        ...


class Session:
    """Belongs to the I/O loop."""

    def __init__(
        self,
        membership: Membership,
        cluster: Cluster,
        catalog: Catalog,
        management: Management,
        connections: tuple[int, int],
        numbers: Iterator[int],
        peers: Peers,
        known_as: str,
    ) -> None:
        """`connections` are for joining, which may take long, and for the rest. `known_as` is what Kafka called the
        same member before, so that it need not wait until that one's session is over."""
        self.membership = membership
        self.group, self.group_id = membership.group, membership.group_id
        self.coordinator = Coordinator(cluster, Kind.GROUP, membership.group_id)
        self.committed = Committed(cluster, self, connections[1])
        self.kafka_member = known_as
        self.generation = NO_GENERATION
        self.holdings = Holdings(self, cluster, catalog, management, numbers)
        self.over: TidewalError | None = None
        self._cluster, self._catalog = cluster, catalog
        self._joining, self._connection = connections
        self._subscription = Subscription(membership.channels)
        self._known_to = catalog.applied_to
        self._turn = 0
        self._led: Sequence[Subscription] = ()  # of all members, while this one leads them
        self._divided: frozenset[tuple[int, str | None]] = frozenset()
        self.in_join = False
        self._rejoin = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._joined = asyncio.Event()  # whenever the generation is settled
        self._heard_at = asyncio.get_running_loop().time()
        self._session_s = membership.session_timeout_s  # as the brokers allow it
        self._peers = peers
        self._main: asyncio.Task[None] | None = None

    # ---- for who has it ----------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """`Standing.renew`."""
        self._joined.clear()
        self._turn += 1
        self._rejoin.set()

    def let_go(self) -> None:
        """`Member.let_go`."""
        self._rejoin.set()

    async def abort_left_open(self, channel: Channel) -> None:
        """`Member.abort_left_open`."""
        await self._peers.abort_left_open(self.group_id, channel)

    def look(self) -> None:
        """Something may have changed in the group: ask now."""
        self._beat_now.set()

    def channels_changed(self) -> None:
        """The catalog has; who leads divides anew."""
        if self._led and self._divided != self._to_divide():
            self._turn += 1
            self._rejoin.set()

    async def leave(self, why: TidewalError) -> None:
        """End the session; the others get the channels at once. Where no broker answers they wait for its end."""
        member = self.kafka_member
        self.end(why)
        if member:
            with contextlib.suppress(*faults.Foreign):
                async with asyncio.timeout(self._cluster.options.request_timeout_s):
                    await self.coordinator.ask(LeaveGroupRequest(self.group_id, member), self._connection)
        self._peers.look(self.group_id)

    def end(self, error: TidewalError) -> None:
        """Nothing of this session counts any more."""
        if self.over is not None:
            return
        self.over = error
        self.holdings.end(error)
        self._joined.set()
        if self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()

    # ---- joining -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join, and join anew whenever there is a reason, until the session is over."""
        self._main = asyncio.current_task()
        beating = asyncio.create_task(self._beat())
        beating.add_done_callback(self._beat_ended)
        try:
            while self.over is None:
                self._rejoin.clear()
                self.in_join = True
                await self._join()
                self.in_join = False
                await self._rejoin.wait()
        except TidewalError as error:
            self.end(error)
        except Exception as error:  # not foreseen: told to who iterates
            _log.exception("the session of group %s failed", self.group)
            self.end(Unavailable(f"the session of group {self.group} failed: {error!r}"))
        finally:
            beating.cancel()

    async def _join(self) -> None:
        reported = False
        while self.over is None:
            try:
                if await self._round():
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

    async def _round(self) -> bool:
        """One attempt: say what we have, and hear what we get. Whether that came about."""
        asking = self._ask_to_join()
        asyncio.get_running_loop().call_later(STALE_S, self._peers.look, self.group_id)
        response = await self.coordinator.ask(asking, self._joining)
        code = self.coordinator.check(
            response.error_code,
            but=(Code.MEMBER_ID_REQUIRED, Code.UNKNOWN_MEMBER, Code.INVALID_SESSION_TIMEOUT),
        )
        self._heard()
        if code == Code.INVALID_SESSION_TIMEOUT and self._session_s < LEAST_SESSION_S:
            self._session_s = LEAST_SESSION_S
            return await self._round()
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
            return await self._round()
        self._joined.clear()
        self.generation = response.generation_id
        self._led = ()
        leads = response.leader_id == self.kafka_member
        grants = await self._divide(response.members) if leads else []
        return await self._synchronize(grants)

    async def _synchronize(self, grants: list[tuple[str, bytes]]) -> bool:
        request = SyncGroupRequest(self.group_id, self.generation, self.kafka_member, NO_INSTANCE, grants)
        response = await self.coordinator.ask(request, self._joining)
        again = (Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION)
        code = self.coordinator.check(response.error_code, but=(Code.UNKNOWN_MEMBER, *again))
        self._heard()
        if code == Code.UNKNOWN_MEMBER:
            raise self._not_a_member()
        if code:
            return False
        await self._apply(Grant.decode(response.member_assignment))
        self._joined.set()
        return True

    def _ask_to_join(self) -> JoinGroupRequest:
        who = self.membership
        claim = Claim(
            who.member,
            who.channels,
            who.start,
            self._known_to,
            [channel.topic for channel in self._catalog.all() if self._subscription.takes(channel.name)],
            frozenset(self.holdings.by_topic),
            self._turn,
        )
        session_ms = int(self._session_s * 1000)
        protocols = [(PROTOCOL, claim.encode())]
        return JoinGroupRequest(
            who.group_id, session_ms, session_ms, self.kafka_member, NO_INSTANCE, PROTOCOL_TYPE, protocols
        )

    async def _divide(self, members: Sequence[tuple[Any, ...]]) -> list[tuple[str, bytes]]:
        await self._learn_of_channels()
        claims: dict[str, Claim] = {}
        for member, *_, data in members:
            try:
                claims[member] = Claim.decode(data)
            except (ValueError, KeyError):  # of no Tidewal: it gets nothing, and the others all
                _log.warning("group %s has a member that says nothing we know", self.group_id)
        self._led = [Subscription(claim.channels) for claim in claims.values()]
        self._divided = self._to_divide()
        grants = share_out(self.group, claims, self._catalog.all())
        return [(member, grant.encode()) for member, grant in grants.items()]

    async def _apply(self, grant: Grant) -> None:
        known = {channel.topic: channel for channel in self._catalog.all()}
        if not grant.topics <= known.keys():
            await self._learn_of_channels()
            known = {channel.topic: channel for channel in self._catalog.all()}
        granted = {
            known[topic]: From.LATEST if topic in grant.from_latest else From.EARLIEST
            for topic in sorted(grant.topics & known.keys())
        }
        self.holdings.apply(granted, grant.wanted_back)

    async def _learn_of_channels(self) -> None:
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(CATALOG_S):
                await self._catalog.sync()

    def _to_divide(self) -> frozenset[tuple[int, str | None]]:
        wanted = (channel for channel in self._catalog.all() if any(each.takes(channel.name) for each in self._led))
        return frozenset((channel.incarnation, channel.queue_of) for channel in wanted)

    # ---- for who commits ---------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """`Standing.settled`."""
        await self._joined.wait()
        if self.over is not None:
            raise self.over

    def refused(self, code: int) -> None:
        """`Standing.refused`."""
        if code == Code.UNKNOWN_MEMBER:
            self.end(self._not_a_member())
        if self.over is not None:
            raise self.over
        self._rejoin.set()

    # ---- staying alive -----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while self.over is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(HEARTBEAT_S, self._session_s / BEATS)):
                    await self._beat_now.wait()
            self._beat_now.clear()
            if self.kafka_member:
                await self._beat_once()
            self._check_silence()
            self.holdings.release_overdue(self.membership.session_timeout_s)

    def _beat_ended(self, beating: asyncio.Task[None]) -> None:
        if not beating.cancelled() and (error := beating.exception()) is not None:  # not foreseen: told to who iterates
            self.end(Unavailable(f"the session of group {self.group} is not kept any more: {error!r}"))

    async def _beat_once(self) -> None:
        generation = self.generation
        request = HeartbeatRequest(self.group_id, generation, self.kafka_member)
        try:
            response = await self.coordinator.ask(request, self._connection)
            again = (Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION)
            code = self.coordinator.check(response.error_code, but=(Code.UNKNOWN_MEMBER, *again))
        except faults.Foreign:
            return
        self._heard()
        if self.in_join or generation != self.generation:
            return  # joining hears of it itself
        if code == Code.UNKNOWN_MEMBER:
            self.end(self._not_a_member())
        elif code:
            self._rejoin.set()

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def _check_silence(self) -> None:
        """Once Kafka may have given our channels away we must not go on as if we had them."""
        joined = self.generation != NO_GENERATION
        limit_s = self._session_s if joined else self._cluster.options.delivery_timeout_s
        if asyncio.get_running_loop().time() - self._heard_at > limit_s:
            self.end(Unavailable(f"nobody has answered for group {self.group} in {limit_s} s"))

    def _not_a_member(self) -> Fenced:
        who = self.membership
        self.kafka_member = ""
        return Fenced(f"{who.member} is no member of group {who.group} (any more): join again", group=self.group)
