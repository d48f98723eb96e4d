"""Who is silent, so that its lease is to be ended, and whose lease has ended, so that others may have its channels.

The two are kept apart. *Evicting* is a guess that costs nothing but a restart where it is wrong, for the record alone
ends nothing that its member still relies on. *Granting* what an evicted member had is what must be safe:

- the eviction was read here: no renewal behind it counts, for its author neither;
- the duration that the member stated, and `MARGIN` of it, have passed on this process' clock since this process itself
  read the last record of the member that counts. The member counts from when it asked for that record, which was
  earlier; and the margin is for clocks that run at different rates. No two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ..clock import Clock
from ..ownership.lease import LEASE_MS
from ..replicated.records import Event
from .cluster_log import ClusterLog
from .membership import RENEW_S, NodeMembership
from .state import LEFT, REPLACED, ClusterState

MARGIN = 0.1  # of the stated duration
EARLY = 0.05  # of it: silence is known in steps of renewals, and one that lacks some ms would cost another step
OWN_GAPS = 2.5  # more of `renew_s` than this between two own records read back, and the time between does not count


@dataclass(frozen=True, slots=True)
class _Heard:
    """When a member's last record that counts was read, by this process' clock, and how much time it had observed."""

    read_s: float
    observed_s: float


class SilenceDetector:
    """Judges the members by what this process has read of `log`. Belongs to the log's loop.

    Silence is counted only over time that was *observed*: in which records of this process, asked for every `renew_s`,
    came back promptly. While the log takes no records, or this process reads late or stands still, nobody's silence
    grows; so an outage of the log evicts nobody. What was read before this process was a member, or is read anew,
    counts as heard at that moment: a process that has just started finds nobody missing before one lease has passed.
    Until then another member may have had the cluster to itself, and have renewed its lease without a record.

    `sole` says that only the process which has the log open may own channels: then no lease but its own is waited for.
    """

    def __init__(
        self,
        log: ClusterLog,
        membership: NodeMembership,
        clock: Clock,
        *,
        renew_s: float = RENEW_S,
        sole: bool = False,
    ) -> None:
        self._log, self._membership, self._clock = log, membership, clock
        self._renew_s, self._sole = renew_s, sole
        self._counts = False  # this process is a member
        self._heard: dict[str, _Heard] = {}
        self._observed_s = 0.0
        self._confirmed_s = clock.monotonic()
        log.observe(self._on_read)
        membership.on_confirmed(self._on_confirmed)

    # ---- what it says -----------------------------------------------------------------------------------------------

    def silent(self, *, longer_s: float = 0.0) -> Set[str]:
        """The members of which nothing came for the duration that they stated, and `longer_s`."""
        return {
            incarnation
            for incarnation, member in self._log.cluster.members.items()
            if incarnation != self._membership.member.incarnation
            and self._silence_s(incarnation) >= member.lease_ms / 1000 * (1 - EARLY) + longer_s
        }

    def heard_ago_s(self, incarnation: str) -> float:
        """For how many seconds this process has read no record of that member that counts, observed or not; 0 of one
        that it does not know."""
        heard = self._heard.get(incarnation)
        return 0.0 if heard is None else self._clock.monotonic() - heard.read_s

    def is_over(self, incarnation: str) -> bool:
        """Whether nothing can rest on the lease of that process any more.

        Of one that is unknown here the registration may not have been read yet, so the time since it was first asked
        about must be observed: the own records that came back since lie behind all that led to the question."""
        cluster = self._log.cluster
        if incarnation in cluster.members:
            return False
        if self._sole:
            return True
        gone = cluster.gone.get(incarnation)
        if gone is not None and gone.how in (LEFT, REPLACED):
            return True
        heard = self._heard.setdefault(incarnation, self._now())
        if gone is None:
            return self._observed_s - heard.observed_s >= self._longest_s(cluster) * (1 + MARGIN)
        return self._clock.monotonic() - heard.read_s >= gone.lease_ms / 1000 * (1 + MARGIN)

    @staticmethod
    def _longest_s(cluster: ClusterState) -> float:
        """How long a process may rely on a lease that states none here: one that is remembered no more, or that was
        never a member."""
        return max(cluster.longest_lease_ms, LEASE_MS) / 1000

    def _silence_s(self, incarnation: str) -> float:
        heard = self._heard.get(incarnation)
        return 0.0 if heard is None else self._observed_s - heard.observed_s

    # ---- what it reads ----------------------------------------------------------------------------------------------

    def _on_read(self, event: Event | None) -> None:
        if event is None:
            self._hear_all()
        elif event["kind"] in ("register", "renew"):
            self._heard[event["incarnation"]] = self._now()

    def _hear_all(self) -> None:
        """The state was read anew: whatever it rests on was in the log by now."""
        cluster, now = self._log.cluster, self._now()
        self._heard = dict.fromkeys([*cluster.members, *cluster.gone], now)

    def _now(self) -> _Heard:
        return _Heard(self._clock.monotonic(), self._observed_s)

    def _on_confirmed(self, asked_s: float) -> None:
        """An own record came back: the time since the one before was observed, unless either took long. What was heard
        meanwhile is silent only since then."""
        now = self._clock.monotonic()
        gap_s = now - self._confirmed_s
        if not self._counts:
            self._counts = True
            self._hear_all()
            gap_s = 0.0
        if now - asked_s <= self._renew_s and gap_s <= OWN_GAPS * self._renew_s:
            for incarnation, heard in self._heard.items():
                since_s = heard.read_s - self._confirmed_s
                if since_s > 0:
                    self._heard[incarnation] = _Heard(heard.read_s, self._observed_s + since_s)
            self._observed_s += gap_s
        self._confirmed_s = now
        self._forget()

    def _forget(self) -> None:
        cluster = self._log.cluster
        if len(self._heard) > 2 * (len(cluster.members) + len(cluster.gone)) + 100:
            known = cluster.members.keys() | cluster.gone.keys()
            self._heard = {incarnation: heard for incarnation, heard in self._heard.items() if incarnation in known}
