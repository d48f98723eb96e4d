"""Faults that are planted in the real code: the simulation finds each. So what it does not find is worth something."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tidewal.runtime.catalog.catalog import Catalog, PChannelState
from tidewal.runtime.cluster.detector import SilenceDetector
from tidewal.runtime.cluster.membership import NodeMembership
from tidewal.runtime.cluster.state import ClusterState
from tidewal.runtime.errors import PreconditionFailed
from tidewal.runtime.log.wal import Append, Wal
from tidewal.runtime.ownership import ChannelOwner
from tidewal.runtime.replicated.fold import Fold
from tidewal.runtime.replicated.records import Event, Proposed
from tidewal.runtime.testing import ClusterViolation, simulate_cluster

SEEDS = 500
FOUND_BY = {  # seeds that have found a fault, and are tried first
    "lease_not_checked": 26,
    "eviction_not_waited_for": 9,
    "renewal_counted_behind_eviction": 8,
    "fence_skipped": 2,
    "channel_not_read_below_the_fence": 2,
    "claim_and_precondition_not_checked": 33,
}

Plant = Callable[[pytest.MonkeyPatch], None]


def lease_not_checked(patch: pytest.MonkeyPatch) -> None:
    """An owner acknowledges whether its lease holds or not."""
    patch.setattr(NodeMembership, "holds", lambda self: True)


def eviction_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What an evicted node had is granted at once."""
    patch.setattr(SilenceDetector, "is_over", lambda self, name: name not in self._log.cluster.members)


def renewal_counted_behind_eviction(patch: pytest.MonkeyPatch) -> None:
    """A node that was evicted takes its later renewals for a lease."""
    renew, look = ClusterState._on_renew, NodeMembership._look

    def on_renew(self: ClusterState, event: Event) -> None:
        if event["incarnation"] not in self.gone:
            renew(self, event)

    def on_read(self: NodeMembership, event: Event | None) -> None:
        own = event is not None and event.get("incarnation") == self.member.incarnation
        if not self._registered or self.member.incarnation in self._log.cluster.members:
            look(self, event)
        elif own and event["kind"] == "renew" and event["number"] in self._asked_s:
            self._lease.renew(self._asked_s.pop(event["number"]))

    patch.setattr(ClusterState, "_on_renew", on_renew)
    patch.setattr(NodeMembership, "_look", on_read)


@dataclass
class _NoFences:
    """A log that takes the last entry of a channel for the fence that it was to append."""

    wal: Wal

    def __getattr__(self, name: str) -> object:
        return getattr(self.wal, name)

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        last = await self.wal.latest_id(entries[0].channel)
        return [last] if last is not None else await self.wal.append_many(entries)


def fence_skipped(patch: pytest.MonkeyPatch) -> None:
    """A new owner reads the channel to its end, and writes no fence."""
    init = ChannelOwner.__init__

    def without_fences(self: ChannelOwner, wal: Wal, *arguments: object, **options: object) -> None:
        init(self, wal, *arguments, **options)
        self._wal = _NoFences(wal)

    patch.setattr(ChannelOwner, "__init__", without_fences)


def channel_not_read_below_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A new owner does not know what the one before has written."""

    async def nothing(*_: object) -> object:
        for records in ():
            yield records

    patch.setattr("tidewal.runtime.ownership.channel_owner.records_below", nothing)


def claim_and_precondition_not_checked(patch: pytest.MonkeyPatch) -> None:
    """What a superseded leader writes counts, and so does a grant that another one came before."""

    def check(self: Fold[Catalog], proposed: Proposed) -> None:
        if proposed.record.pseq <= self._numbers_of(proposed).get(proposed.record.producer, 0):
            raise PreconditionFailed("too late, or again")

    def on_grant(self: Catalog, event: Event) -> None:
        for name, (term, _) in event["channels"].items():
            state = self.channels.setdefault(name, PChannelState())
            state.previous_limit = state.used_limit
            state.owner, state.term, state.limit = event["node"], term, event["limit"]

    patch.setattr(Fold, "_check", check)
    patch.setattr(Catalog, "_on_grant", on_grant)


PLANTED: list[Plant] = [
    lease_not_checked,
    eviction_not_waited_for,
    renewal_counted_behind_eviction,
    fence_skipped,
    channel_not_read_below_the_fence,
    claim_and_precondition_not_checked,
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("tidewal").setLevel(logging.ERROR)
    plant(monkeypatch)
    for seed in (FOUND_BY.get(plant.__name__, 0), *range(SEEDS)):
        try:
            simulate_cluster(seed)
        except ClusterViolation:
            return
    raise AssertionError(f"not found in {SEEDS} clusters")
