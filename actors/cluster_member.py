"""The process as a member of the cluster of its log, and what its roles know of the others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..runtime.actor.heartbeat import HeartbeatCallback, HeartbeatThread
from ..runtime.clock import HybridClock
from ..runtime.cluster.cluster_log import ClusterLog
from ..runtime.cluster.detector import SilenceDetector
from ..runtime.cluster.identity import found_or_check
from ..runtime.cluster.membership import NodeMembership
from ..runtime.cluster.pressure import REPORTED, Usage, usages_in
from ..runtime.cluster.roles import STREAMING_NODE
from ..runtime.cluster.state import CLOCK_MS, LOADED, PRESSURE, ClusterState, NodeMember, Report, rendezvous_rank
from ..runtime.cluster.version import THIS_VERSION, TidewalVersion
from ..runtime.config.settings import ClusterSettings
from ..runtime.errors import Fenced, PreconditionFailed, TidewalError, WrongCluster
from ..runtime.log.names import Names
from ..runtime.log.wal import Wal
from ..runtime.streams.channel_reader import OnBadRecord

DRAIN_S = 2.0  # how long the end of a node waits for the log to take a record of it

_log = logging.getLogger("tidewal.cluster")


class ClusterMember:
    """The membership of a process, from its start to its end: it outlives the roles, which may be restarted.

    `open` makes the process a member, `close` ends that; what the process owned was released before. A process whose
    membership is ended by others is to end (`until_fenced`): it may come back under a new incarnation only.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        roles: Sequence[str],
        wal: Wal,
        names: Names,
        clock: HybridClock,
        settings: ClusterSettings,
        *,
        predecessor: str = "",
        version: TidewalVersion = THIS_VERSION,
        on_bad: OnBadRecord | None = None,
    ) -> None:
        """`predecessor` is an incarnation that is known to be dead. `version` is that of the process; `on_bad` gets the
        records of members that cannot be read."""
        self._predecessor = predecessor
        self.incarnation: str = incarnation
        self.version: TidewalVersion = version
        self.log: ClusterLog = ClusterLog(wal, names, clock, incarnation, version=version, on_bad=on_bad)
        self._settings = settings
        lease_s = settings.lease_ms / 1000
        self._renew_s = settings.renew_ms / 1000
        # With such a log, only the process that has it open may own channels.
        self._sole = wal.capabilities.one_node and STREAMING_NODE in roles
        self._lag_s: Callable[[], float] = lambda: 0.0
        # What it says of itself with each renewal, by name; called on any thread.
        self.reports: dict[str, Callable[[], object]] = {CLOCK_MS: clock.clock.wall_ms, PRESSURE: self._pressure}
        # What it uses of a limit, and the limit, by its setting; called on any thread.
        self.measures: dict[str, Callable[[], tuple[int, int]]] = {}
        self._membership = NodeMembership(
            self.log,
            clock.clock,
            NodeMember(
                incarnation,
                name,
                tuple(roles),
                settings.lease_ms,
                version.levels.highest,
                min_level=version.levels.lowest,
                version=version.number,
                host=socket.gethostname(),
                since_ms=clock.clock.wall_ms(),
            ),
            may_renew=lambda: self._lag_s() < lease_s,
            report=self._report,
            unwritten=wal.capabilities.one_node,
        )
        self.detector: SilenceDetector = SilenceDetector(
            self.log, self._membership, clock.clock, renew_s=self._renew_s, sole=self._sole
        )
        self._beat: HeartbeatCallback | None = None

    def _report(self) -> Report:
        return {name: value for name, said in list(self.reports.items()) if (value := said()) is not None}

    def _pressure(self) -> Mapping[str, tuple[int, int]] | None:
        measured = {limit: measure() for limit, measure in list(self.measures.items())}
        return {limit: (value, bound) for limit, (value, bound) in measured.items() if value > REPORTED * bound} or None

    async def open(
        self, heartbeat: HeartbeatThread, loop_lag_s: Callable[[], float], *, tables: str = "", address: str = ""
    ) -> None:
        """Become a member, and renew that on the `heartbeat` while the loop is late by less than a lease. `tables` is
        the id of the store of the tables that the process uses, `address` where other nodes reach it. Raises
        `WrongCluster`, `FormatTooNew` or `FormatTooOld` where the cluster has a feature level that this version does
        not know, and what ends following the log."""
        self._membership.member = replace(self._membership.member, tables=tables, address=address)
        await self.log.open()
        await found_or_check(self.log, self._settings.id, self._settings.secret.get_secret_value())
        await self._bury()
        await self._membership.join()
        await self._check_tables()
        self._lag_s = loop_lag_s
        self._beat = heartbeat.every(self._renew_s, self._membership.renew, "the lease")
        roles = ", ".join(sorted(self._membership.member.roles))
        _log.info("%s is a member of the cluster, as %s", self.incarnation, roles)

    async def _check_tables(self) -> None:
        """Leave again where another member has other tables before it: what one stores the other would miss."""
        own = self._membership.member.tables
        others = [each for each in self.state.members.values() if own and each.tables not in ("", own)]
        if others:
            await self._membership.leave()
            raise WrongCluster(
                f"the tables of this node are not those of {others[0].name} ({others[0].host}): all nodes of a log "
                "keep them in one directory; start it with that one (--data)",
                key="data",
                found=others[0].tables,
            )

    async def _bury(self) -> None:
        """Let those leave that are known to be dead: the predecessor; and owners that had the log open before, or this
        process would not have it."""
        dead = {self._predecessor, *(member.incarnation for member in self.members(STREAMING_NODE) if self._sole)}
        for incarnation in sorted(filter(self.has, dead)):
            try:
                await self.log.propose({"kind": "leave", "incarnation": incarnation})
            except PreconditionFailed:
                pass  # it was evicted meanwhile
            except TidewalError as error:
                if not error.retryable:
                    raise
                _log.warning("the end of %s is not told, its lease is waited for: %s", incarnation, error)

    async def drain(self) -> None:
        """Let the others answer what comes from now on, as far as there are any, and be granted nothing more."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._membership.drain()
        except (TidewalError, TimeoutError) as error:
            _log.warning("%s ends without having said so: %s", self.incarnation, error)

    async def close(self) -> None:
        """End the membership: nothing may rest on it any more."""
        if self._beat is not None:
            self._beat.cancel()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._membership.leave()
        except (TidewalError, TimeoutError) as error:
            _log.warning("%s has not left the cluster, its lease ends later: %s", self.incarnation, error)
        await self.log.close()

    # ---- this process -----------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether this process may acknowledge and promise. Callable from any thread."""
        return self._membership.holds()

    def on_confirmed(self, call: Callable[[float], None]) -> None:
        """`NodeMembership.on_confirmed`."""
        self._membership.on_confirmed(call)

    @property
    def fenced(self) -> Fenced | None:
        """The error with which others have ended the membership."""
        return self._membership.fenced

    async def until_fenced(self) -> Fenced:
        """Wait until others have ended the membership, and return with which error."""
        return await self._membership.until_fenced()

    # ---- the cluster ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ClusterState:
        """The cluster as far as it was read."""
        return self.log.cluster

    @property
    def level(self) -> int:
        """The feature level of the cluster: what belongs to a later one may not be written, or asked of others, yet."""
        return self.log.fold.level

    def has(self, incarnation: str) -> bool:
        """Whether that process is a member."""
        return incarnation in self.state.members

    def member(self, incarnation: str) -> NodeMember | None:
        """That process; None where it is no member."""
        return self.state.members.get(incarnation)

    def members(self, role: str) -> list[NodeMember]:
        """The members that offer `role`."""
        return self.state.with_role(role)

    def has_other(self, role: str) -> bool:
        """Whether another member offers `role`."""
        own = self.incarnation
        if self.state.members.keys() == {own}:
            return False
        return any(member.incarnation != own for member in self.members(role))

    def usages(self) -> list[Usage]:
        """What this process and the other members use of limits, where it is half of one or more. A report counts for
        as long as the lease of its member."""
        loaded = self.reports.get(LOADED)
        found = usages_in(self._pressure(), self._membership.member.name, loaded and loaded())
        for incarnation, member in self.state.members.items():
            if incarnation != self.incarnation and self.detector.heard_ago_s(incarnation) * 1000 <= member.lease_ms:
                found += usages_in(member.report.get(PRESSURE), member.name, member.report.get(LOADED))
        return found

    def first(self, role: str, subject: str) -> str:
        """Which member with `role` is to care for `subject`: the incarnation that ranks first (`rendezvous_rank`),
        those that are about to leave last. "" where there is none."""
        members = self.members(role)
        if len(members) > 1:
            return max(members, key=lambda member: (not member.draining, rendezvous_rank(subject, member))).incarnation
        return members[0].incarnation if members else ""

    def changed(self) -> Coroutine[Any, Any, ClusterState]:
        """Wait until a record of the cluster is read after this call: also where what it returns is awaited later."""
        return self.log.changed()
