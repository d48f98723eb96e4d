"""The present catalog, for a reader outside the node."""

from __future__ import annotations

from typing import Final

from ...runtime.catalog.catalog import Catalog, catalog_fold
from ...runtime.errors import ChannelNotFound, CorruptLog, PositionLost
from ...runtime.log.blocking_reader import BlockingReader

ATTEMPTS: Final = 10  # to read up to the end before the next snapshot has removed that


class CatalogView:
    """Folds the records of `channel`, each once. An absent channel is an empty catalog. `known` is the catalog as it
    was last read."""

    def __init__(self, log: BlockingReader, channel: str) -> None:
        self._log = log
        self._channel = channel
        self._fold = catalog_fold()

    @property
    def known(self) -> Catalog:
        return self._fold.state

    def now(self) -> Catalog:
        """The catalog with all records there are now. Raises `PositionLost` or `CorruptLog` where the channel has lost
        its entries and no snapshot replaces them."""
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                self._follow()
                break
            except (PositionLost, CorruptLog):  # a snapshot has replaced the next entries
                self._fold = catalog_fold()
                if not attempts_left:
                    raise
        return self.known

    def _follow(self) -> None:
        try:
            latest = self._log.latest_id(self._channel)
        except ChannelNotFound:
            return
        fold = self._fold
        if latest is None or latest == fold.position:
            return
        for entries in self._log.read(self._channel, fold.position or None, latest):
            for entry in entries:
                fold.read(entry)
        fold.finish()
        if fold.position != latest:  # a read from the beginning does not notice that entries are gone
            raise PositionLost(
                f"channel {self._channel} has lost its entries up to {latest.hex()}",
                requested=latest,
                channel=self._channel,
            )
