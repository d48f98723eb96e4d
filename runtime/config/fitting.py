"""Settings whose defaults depend on the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..log.wal import Capabilities
from .settings import Settings

COSTLY_APPENDS: Final[Mapping[str, Mapping[str, int]]] = {
    "cluster": {"lease_ms": 15_000, "renew_ms": 5_000},
    "common": {"graceful_time": 25_000},  # an owner that was killed is missed for a lease and some requests
}


def fitted(settings: Settings, capabilities: Capabilities) -> Settings:
    """The settings of a node on a log with these capabilities. Of a section of which one of these values was given, the
    others stay as they are, too."""
    fitting: dict[str, Any] = {}
    for name, values in COSTLY_APPENDS.items() if capabilities.costly_appends else ():
        section = getattr(settings, name)
        if not section.model_fields_set.intersection(values):
            fitting[name] = section.model_copy(update=dict(values))
    return settings.model_copy(update=fitting)
