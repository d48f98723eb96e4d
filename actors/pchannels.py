"""The pchannels of collections."""

from __future__ import annotations

from ..runtime.catalog.catalog import Collection
from ..runtime.log.names import pchannel_of


def pchannels_of(collection: Collection) -> list[str]:
    """The physical channels of a collection, sorted."""
    return sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})
