"""The catalog as it is now, followed by a reader outside the node."""

from __future__ import annotations

from ..runtime.catalog import Catalog
from ..runtime.errors import ChannelNotFound, PositionLost
from .log import Log


class CatalogView:
    """Folds the records of `channel`, each once. An absent channel is an empty catalog. `known` is the catalog when it
    was last looked at."""

    def __init__(self, log: Log, channel: str) -> None:
        self._log = log
        self._channel = channel
        self.known = Catalog()
        self._position: bytes | None = None

    def now(self) -> Catalog:
        """The catalog with all that is recorded by now."""
        try:
            self._follow()
        except PositionLost:  # a snapshot took the place of what was to come next
            self.known, self._position = Catalog(), None
            self._follow()
        return self.known

    def _follow(self) -> None:
        try:
            latest = self._log.latest_id(self._channel)
        except ChannelNotFound:
            return
        if latest is None or latest == self._position:
            return
        for entries in self._log.read(self._channel, self._position, latest):
            for entry in entries:
                self.known.fold(entry)
                self._position = entry.id
