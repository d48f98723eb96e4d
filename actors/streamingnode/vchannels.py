"""Which rows the vchannels of an owner take: a door may have an old catalog, the owner never has.

Rows may stand behind the CREATE record of their collection and before its DROP record only, for no reader stores what
stands elsewhere. The owner writes both records itself, so it changes this state as it does; of the records that earlier
owners wrote it learns when it acquires a channel, from the catalog as it is after its own fence was written. That
suffices:

- A DROP record follows the event `drop`. One that lies below the fence was appended before the fence was, so the
  catalog has the event: the vchannel is closed. Above the fence only this owner writes.
- A CREATE record precedes the event `ready`, and a door accepts rows only of a collection that it has seen ready. So
  where the catalog still says that the collection is being created, its vchannels may be open: no rows come before the
  record is there, whichever owner has written it.
- A collection that the catalog does not have yet is announced to this owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...runtime.catalog.catalog import DROPPING, Collection
from ...runtime.errors import CollectionNotFound, InvalidRows
from ...runtime.log.names import pchannel_of
from ..local_owner import WritePart


class VChannels:
    """The vchannels that take rows, each with its collection."""

    def __init__(self) -> None:
        self._open: dict[str, Collection] = {}

    def rebuild(self, pchannels: Iterable[str], collections: Iterable[Collection]) -> None:
        """Take the state of the vchannels on `pchannels` from the catalog's `collections`, read after their fences were
        written."""
        acquired = set(pchannels)
        self._open = {name: found for name, found in self._open.items() if pchannel_of(name) not in acquired}
        for collection in collections:
            if collection.state != DROPPING:
                names = (name for name in collection.vchannels if pchannel_of(name) in acquired)
                self._open.update(dict.fromkeys(names, collection))

    def begin(self, collection: Collection, vchannels: Iterable[str]) -> None:
        """The CREATE records of `collection` are in the log of these vchannels: they take rows."""
        self._open.update(dict.fromkeys(vchannels, collection))

    def end(self, vchannels: Iterable[str]) -> None:
        """The DROP records of these vchannels are about to be submitted: they take no more rows."""
        for name in vchannels:
            self._open.pop(name, None)

    def all(self) -> Mapping[str, Collection]:
        """The vchannels that take rows, each with its collection."""
        return self._open

    def is_open(self, vchannel: str) -> bool:
        """Whether the vchannel takes rows. From any thread."""
        return vchannel in self._open

    def check_open(self, collection: Collection | None, pchannels: Iterable[str]) -> None:
        """Raise `CollectionNotFound` unless the `collection` of the catalog has an open vchannel on each of
        `pchannels`."""
        vchannels = () if collection is None else collection.vchannels
        if not {pchannel_of(name) for name in vchannels if name in self._open}.issuperset(pchannels):
            raise CollectionNotFound("the collection that was asked about was dropped; describe it again")

    def check(self, part: WritePart) -> Collection | None:
        """The collection of the records in `part`; None where it has none. Raises `CollectionNotFound` where it has
        ended, and `InvalidRows` where its schema has another version."""
        found: Collection | None = None
        for _, record in part.records:
            found = self._open.get(record.vchannel)
            if found is None or found.id != part.collection_id:
                raise CollectionNotFound(
                    f"the collection {part.collection} that these rows are for was dropped; describe it again",
                    collection=part.collection,
                )
            if found.schema.version != part.schema_version:
                raise InvalidRows(f"the rows are of another version of {part.collection}; describe it again")
        return found
