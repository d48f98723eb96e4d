"""The catalog as it is now, followed by a reader outside the node."""

from __future__ import annotations

from ..runtime.catalog import Catalog
from ..runtime.errors import PositionLost
from ..runtime.record import decode
from .log import Follower, Log


class CatalogView:
    """Folds the records of `channel`, each once. An absent channel is an empty catalog."""

    def __init__(self, log: Log, channel: str) -> None:
        self._log = log
        self._channel = channel
        self._catalog = Catalog()
        self._entries = Follower(log, channel)

    def now(self) -> Catalog:
        """The catalog with all that is recorded by now."""
        try:
            self._follow()
        except PositionLost:  # a snapshot took the place of what was to come next
            self._catalog = Catalog()
            self._entries = Follower(self._log, self._channel)
            self._follow()
        return self._catalog

    def _follow(self) -> None:
        for entry in self._entries.new_entries():
            self._catalog.apply(decode(entry.payload, entry.id))
