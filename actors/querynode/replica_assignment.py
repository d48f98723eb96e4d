"""Which QueryNodes are to have which vchannels, by the members and the wishes of operators that this node knows of."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.placement_wishes import DRAINED
from ...runtime.cluster.replica_order import replica_order
from ..cluster_member import ClusterMember


class ReplicaAssignment:
    """The QueryNodes of each vchannel, in `replica_order`. What it says changes with `refresh` only."""

    def __init__(self, cluster: ClusterMember, catalog: CatalogLog, role: str) -> None:
        self._cluster, self._catalog, self._role = cluster, catalog, role
        self._basis: object = None
        self._orders: dict[str, Sequence[str]] = {}

    def refresh(self) -> None:
        """Look at the members and the wishes as they are now."""
        members = [(each.incarnation, each.draining) for each in self._cluster.members(self._role)]
        basis = members, self._drained()
        if basis != self._basis:
            self._basis = basis
            self._orders.clear()

    def has_others(self) -> bool:
        """Whether there are other QueryNodes, by the members as they are now."""
        return self._cluster.has_other(self._role)

    def order(self, vchannel: str) -> Sequence[str]:
        """All QueryNodes, in the order in which they are to have `vchannel`."""
        found = self._orders.get(vchannel)
        if found is None:
            members = self._cluster.members(self._role)
            found = self._orders[vchannel] = replica_order(vchannel, members, self._drained())
        return found

    def nodes(self, collection: Collection, vchannel: str) -> Sequence[str]:
        """Those that are to have it: as many as `collection` has replicas now, where there are so many."""
        replicas = (self._catalog.catalog.by_id(collection.id) or collection).replicas
        return self.order(vchannel)[:replicas]

    def own(self, collection: Collection) -> list[str]:
        """The vchannels that this node is to have."""
        own = self._cluster.incarnation
        return [vchannel for vchannel in collection.vchannels if own in self.nodes(collection, vchannel)]

    def _drained(self) -> frozenset[str]:
        wishes = self._catalog.catalog.wishes.nodes
        return frozenset(name for name, state in wishes.items() if state == DRAINED)
