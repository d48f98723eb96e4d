"""The present catalog, for a reader outside the node."""

from __future__ import annotations

from typing import Final

from ...runtime.catalog.catalog import Catalog, Collection, catalog_fold
from ...runtime.errors import ChannelNotFound, CollectionNotFound, CorruptLog, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.names import Names
from ...runtime.log.redaction import shown_url

ATTEMPTS: Final = 10  # to read up to the end before the next snapshot has removed that


class CatalogView:
    """The catalog under `prefix` in `log`, which is at the URL `wal`; its records are folded once each. An absent
    channel is an empty catalog."""

    def __init__(self, log: BlockingReader, wal: str, prefix: str) -> None:
        self._log = log
        self._wal = wal
        self._prefix = prefix
        self._channel = Names(prefix).catalog
        self._fold = catalog_fold()

    @property
    def known(self) -> Catalog:
        """The catalog as it was last read."""
        return self._fold.state

    def collection(self, name: str) -> Collection:
        """The collection as the catalog has it now. Raises `CollectionNotFound`, and what `now` raises."""
        catalog = self.now()
        try:
            return catalog.collection(name)
        except CollectionNotFound as error:
            known = ", ".join(sorted(catalog.collections)) or "none"
            raise CollectionNotFound(
                f"no collection {name!r} in {shown_url(self._wal)} under prefix {self._prefix!r}; there are: {known}. "
                "Check options collection, wal and prefix, or create it first",
                collection=name,
            ) from error

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
