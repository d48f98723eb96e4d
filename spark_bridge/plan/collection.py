"""The driver's side of a collection: its catalog entry, the next cut, and the range of each task. Does not import
Spark."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.cuts import Cut, CutEnd
from ...runtime.errors import CollectionNotFound, InvalidRequest
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.names import Names
from ..options import EARLIEST, LATEST, MicroBatchLimits
from ..scan.collection import ChannelRange
from .catalog_view import CatalogView
from .cut_log import CutLog
from .limits import CutSizes, last_within
from .offsets import (
    BEGINNING,
    beginning,
    end_before,
    from_json,
    is_further,
    is_history,
    lies_before,
    pchannels_of,
    scheme_of,
)
from .splitting import split


class _Counted(NamedTuple):
    """A lower bound of the rows between two cuts."""

    start: int
    upto: Cut
    rows: int


class CollectionPlanner:
    """Follows the catalog and the stored cuts of one collection over one connection."""

    history = False  # whether plans include the rows in tables

    def __init__(
        self, log: BlockingReader, wal: str, collection: str, prefix: str, *, fail_on_data_loss: bool = True
    ) -> None:
        self._log = log
        self._wal = wal
        self._name = collection
        self._prefix = prefix
        self._fail_on_data_loss = fail_on_data_loss
        names = Names(prefix)
        self._catalog = CatalogView(log, names.catalog)
        self._known: Collection | None = None
        self._cuts_channel = names.cuts
        self._cut_log: CutLog | None = None
        self._counted: _Counted | None = None

    def collection(self) -> Collection:
        """The collection as the catalog has it now. Raises `CollectionNotFound`."""
        catalog = self._catalog.now()
        try:
            self._known = catalog.collection(self._name)
        except CollectionNotFound as error:
            known = ", ".join(sorted(catalog.collections)) or "none"
            raise CollectionNotFound(
                f"no collection {self._name!r} in {self._wal} under prefix {self._prefix!r}; there are: {known}. "
                "Check options collection, wal and prefix, or create it first",
                collection=self._name,
            ) from error
        return self._known

    def known(self) -> Collection:
        """The collection as the catalog had it at the last call of `collection`."""
        return self._known or self.collection()

    @property
    def cuts(self) -> CutLog:
        """The cuts of the collection as it is now. Raises `CollectionNotFound`."""
        id = self.collection().id
        if self._cut_log is None or self._cut_log.id != id:
            self._cut_log = CutLog(self._log, self._cuts_channel, id, self._name)
        return self._cut_log

    # ---- which cut --------------------------------------------------------------------------------------------------

    def resolve(self, text: str) -> Cut:
        """The cut that an option names: `earliest`, `latest` (before the first cut: the beginning), the time of a
        stored cut, or an offset as JSON. Raises `InvalidRequest`."""
        collection = self.collection()
        if text == EARLIEST:
            return self._first(collection)
        if text == LATEST:
            return self.newest() or self._first(collection)
        return self._stored_at(int(text)) if text.isdecimal() else from_json(text, collection, scheme_of(self._wal))

    def _first(self, collection: Collection) -> Cut:
        """The cut before the entries that are first now: a later read from it gives the same rows, or raises
        `PositionLost` when they are gone."""
        cut = beginning(collection)
        return replace(cut, ends={name: end_before(self._log.id_at(name, 0)) for name in cut.ends})

    def _stored_at(self, time: int) -> Cut:
        for cut in self.cuts.between(time - 1, time):
            return cut
        raise InvalidRequest(
            f"no cut of {self._name!r} is stored at {time}: give a time that the node answered when it was asked for "
            "a cut, or latest"
        )

    def newest(self) -> Cut | None:
        """The newest cut there is; None when none was ever stored."""
        return self.cuts.newest()

    def before(self, timestamp: int) -> Cut:
        """Where to start to get the rows with a log time ≥ `timestamp`, which may still come. Its channels end where
        those of the last stored cut before `timestamp` end."""
        collection = self.collection()
        cut = self.cuts.last_upto(timestamp - 1) or self._first(collection)
        return replace(cut, time=max(timestamp - 1, 0))

    def upto(self, timestamp: int) -> tuple[Cut, bool]:
        """Where to end to get those rows of the newest cut that have a log time < `timestamp`; and whether the channels
        of the returned cut end later than its time."""
        cut = next(self.cuts.between(timestamp - 2), None)
        if cut is None:
            return self.resolve(LATEST), False
        return replace(cut, time=timestamp - 1), cut.time > timestamp - 1

    def next(self, start: Cut, limits: MicroBatchLimits, upto: Cut) -> Cut | None:
        """The last cut behind `start`, not behind `upto`, within the limits, or else the first one: a limit holds whole
        cuts. None when there is no cut there."""
        if upto.time <= start.time:
            return None
        if not limits.bounded:
            return upto
        cuts = chain(self.cuts.ahead(start.time, upto.time - 1), [upto])
        sizes = CutSizes(self._log, self.ranges(start, upto))
        return last_within(((cut, sizes.upto(cut)) for cut in cuts), limits)

    def narrowed(self, start: Cut, end: Cut, first_ts: int, last_ts: int) -> tuple[Cut, Cut]:
        """Cuts between `start` and `end` that enclose all rows with `first_ts` ≤ ts ≤ `last_ts` of those between
        them."""
        if first_ts > start.time + 1:
            later = self.cuts.last_upto(min(first_ts - 1, end.time))
            start = later if later is not None and later.time > start.time else start
        if last_ts < end.time:
            end = next(self.cuts.between(max(last_ts, start.time) - 1, end.time - 1), end)
        return start, end

    def has_rows(self, start: Cut, upto: Cut, rows: int) -> bool:
        """Whether at least `rows` rows lie between two cuts. A later call with a later cut continues the count."""
        counted = self._counted
        if counted is None or counted.start != start.time or counted.upto.time > upto.time:
            counted = _Counted(start.time, start, 0)
        sizes = CutSizes(self._log, self.ranges(counted.upto, upto)).upto(upto)
        total = counted.rows
        for size in sizes:
            total += size.rows
            if total >= rows:
                return True
        self._counted = _Counted(start.time, upto, total)
        return total >= rows

    # ---- what each task reads ---------------------------------------------------------------------------------------

    def ranges(self, start: Cut, end: Cut, *, tasks: int = 1, end_beyond: bool = False) -> list[ChannelRange]:
        """What lies between two cuts: one range for each pchannel that has entries there, or more of them for about
        `tasks` tasks. `end_beyond` is that of `ChannelRange`. Raises `InvalidRequest` when the cuts do not belong
        together."""
        collection = self.collection()
        channels = pchannels_of(collection)
        if end.collection_id != collection.id or start.collection_id != collection.id or set(channels) - set(end.ends):
            raise InvalidRequest(f"a cut is not of collection {self._name!r} as it is now: start with a new checkpoint")
        if end.time < start.time:
            raise InvalidRequest(f"the end ({end.time}) lies before the start ({start.time}); check the offsets")
        if not self.history and (is_history(start) or is_history(end)):
            raise InvalidRequest("an offset lies within the tables' rows: set option history as it was set before")
        fences = self._catalog.known.fences(channels)
        ranges = [
            self._from_entry(
                ChannelRange(
                    self._wal,
                    channel,
                    tuple(sorted(collection.vchannels)),
                    start.ends[channel],
                    end.ends[channel],
                    start.time,
                    end.time,
                    fences.get(channel, {}),
                    collection.schema,
                    self._fail_on_data_loss,
                    end_beyond=end_beyond,
                )
            )
            for channel in channels
            if is_further(end.ends[channel], start.ends[channel])
        ]
        return split(ranges, self.cuts.points(start.time, end.time), tasks) if 0 < len(ranges) < tasks else ranges

    def _from_entry(self, wanted: ChannelRange) -> ChannelRange:
        """A range that begins before an entry, or where the log begins, with that entry as its first: when it is gone
        by the time it is read, the task raises `PositionLost`."""
        begin = end_before(self._log.id_at(wanted.channel, 0)) if wanted.begin == BEGINNING else wanted.begin
        if not lies_before(begin) or begin.id > wanted.end.id:
            return wanted  # it begins behind an entry, or has no entries any more
        return replace(wanted, begin=CutEnd(0, 0, begin.id), begin_included=True)

    def close(self) -> None:
        """Close the connection."""
        self._log.close()
