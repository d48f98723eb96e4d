"""A version of Tidewal that comes after this one, and one after that: with kinds of their own in the catalog and among
the records of members, behind the third feature level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tidewal.runtime.catalog.catalog import NODE_KINDS, Catalog
from tidewal.runtime.cluster.state import ClusterState
from tidewal.runtime.cluster.version import THIS_VERSION, TidewalVersion
from tidewal.runtime.replicated.records import Event, FeatureLevels, typed


class NextCatalog(Catalog):
    """From the third level on the leader can give the catalog labels, and a node a mark."""

    own_kinds = NODE_KINDS | {"mark"}
    kind_levels: ClassVar[Mapping[str, int]] = {**Catalog.kind_levels, "label": 3, "mark": 3}

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "labels": self.labels}

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.labels = [typed(label, str) for label in snapshot.get("labels", [])]

    def _on_label(self, event: Event) -> None:
        self.labels = [*self.labels, typed(event["label"], str)]

    _on_mark = _on_label


class NextClusterState(ClusterState):
    """From the third level on nodes can greet the others."""

    kind_levels: ClassVar[dict[str, int]] = {"greet": 3}

    def __init__(self) -> None:
        super().__init__()
        self.greetings: list[str] = []

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "greetings": self.greetings}

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.greetings = [typed(greeting, str) for greeting in snapshot.get("greetings", [])]

    def _on_greet(self, event: Event) -> None:
        self.greetings = [*self.greetings, typed(event["greeting"], str)]


OLD = THIS_VERSION
NEW = TidewalVersion("99.1.0", FeatureLevels(1, 3), NextClusterState, NextCatalog)
NEWEST = TidewalVersion("99.2.0", FeatureLevels(3, 4), NextClusterState, NextCatalog)
