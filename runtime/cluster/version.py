"""What a process of this version is for the others of its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from ..catalog.catalog import Catalog
from ..replicated.records import LEVELS, FeatureLevels
from .state import ClusterState


@dataclass(frozen=True, slots=True)
class TidewalVersion:
    """The version `number` of a Tidewal, the feature levels that it knows, and what it makes of the records of the
    cluster's members and of the catalog."""

    number: str
    levels: FeatureLevels = LEVELS
    cluster: Callable[[], ClusterState] = ClusterState
    catalog: Callable[[], Catalog] = Catalog


THIS_VERSION = TidewalVersion(metadata.version("tidewal"))
