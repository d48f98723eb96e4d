"""The present catalog, for a reader outside the node."""

from __future__ import annotations

from typing import Final

from ...runtime.catalog.catalog import Catalog
from ...runtime.errors import ChannelNotFound, PositionLost
from ...runtime.log.blocking_reader import BlockingReader

ATTEMPTS: Final = 10  # to read up to the end before the next snapshot has removed that


class CatalogView:
    """Folds the records of `channel`, each once. An absent channel is an empty catalog. `known` is the catalog as it
    was last read."""

    def __init__(self, log: BlockingReader, channel: str) -> None:
        self._log = log
        self._channel = channel
        self.known = Catalog()
        self._position: bytes | None = None

    def now(self) -> Catalog:
        """The catalog with all records there are now. Raises `PositionLost` where the channel has lost its entries and
        no snapshot replaces them."""
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                self._follow()
                break
            except PositionLost:  # a snapshot has replaced the next entries
                self.known, self._position = Catalog(), None
                if not attempts_left:
                    raise
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
        if self._position != latest:  # a read from the beginning does not notice that entries are gone
            raise PositionLost(
                f"channel {self._channel} has lost its entries up to {latest.hex()}",
                requested=latest,
                channel=self._channel,
            )
