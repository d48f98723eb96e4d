"""The driver's side: which collection, which cut comes next, and what each task reads. Knows nothing of Spark."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..runtime.catalog import Catalog, Collection
from ..runtime.cuts import Cut
from ..runtime.errors import BadRecord, CollectionNotFound, InvalidRequest, PositionLost
from ..runtime.names import Names
from ..runtime.record import decode
from .log import Follower, Log
from .offsets import beginning, from_json, pchannels_of
from .options import EARLIEST, LATEST
from .rows import ChannelRange, row_counts

_logger = logging.getLogger("tidewal.spark")

CUTS_AHEAD_MAX = 4096  # cuts held to choose from when a trigger is limited


class Planner:
    """Follows the catalog and the stored cuts of one collection over one connection.

    The first look at the cuts reads all that are stored (about 10 µs each), later ones only what is new.
    """

    def __init__(self, log: Log, wal: str, collection: str, prefix: str, *, fail_on_data_loss: bool = True) -> None:
        self._log = log
        self._wal = wal
        self._name = collection
        self._prefix = prefix
        self._fail_on_data_loss = fail_on_data_loss
        names = Names(prefix)
        self._catalog = Catalog()
        self._catalog_channel = names.catalog
        self._catalog_entries = Follower(log, names.catalog)
        self._newest: Cut | None = None
        self._cuts_channel = names.cuts
        self._newest_entries = Follower(log, names.cuts, gaps=True)
        self._ahead: deque[Cut] = deque()
        self._ahead_entries = Follower(log, names.cuts, gaps=True)

    def collection(self) -> Collection:
        """The collection as the catalog has it now. Raises `CollectionNotFound`."""
        try:
            self._follow_catalog()
        except PositionLost:  # a snapshot took the place of what was to come next
            self._catalog = Catalog()
            self._catalog_entries = Follower(self._log, self._catalog_channel)
            self._follow_catalog()
        try:
            return self._catalog.collection(self._name)
        except CollectionNotFound as error:
            known = ", ".join(sorted(self._catalog.collections)) or "none"
            raise CollectionNotFound(
                f"no collection {self._name!r} in {self._wal} under prefix {self._prefix!r}; there are: {known}. "
                "Check options collection, wal and prefix, or create it first",
                collection=self._name,
            ) from error

    def _follow_catalog(self) -> None:
        for entry in self._catalog_entries.new_entries():
            self._catalog.apply(decode(entry.payload, entry.id))

    # ---- which cut --------------------------------------------------------------------------------------------------

    def resolve(self, text: str) -> Cut:
        """The cut that an option names: `earliest`, `latest` (before the first cut: the beginning), the time of a
        stored cut, or an offset as JSON. Raises `InvalidRequest`."""
        collection = self.collection()
        if text == EARLIEST:
            return beginning(collection)
        if text == LATEST:
            return self.newest() or beginning(collection)
        return self._stored_at(int(text)) if text.isdecimal() else from_json(text, collection)

    def _stored_at(self, time: int) -> Cut:
        for cut in self._new_cuts(Follower(self._log, self._cuts_channel, gaps=True)):
            if cut.time == time:
                return cut
        raise InvalidRequest(
            f"no cut of {self._name!r} is stored at {time}: give a time that the node answered when it was asked for "
            "a cut, or latest"
        )

    def newest(self) -> Cut | None:
        """The newest cut there is; None when none was ever stored."""
        for cut in self._new_cuts(self._newest_entries):
            if self._newest is None or cut.time > self._newest.time:
                self._newest = cut
        return self._newest

    def next(self, start: Cut, max_rows: int, upto: int | None = None) -> Cut | None:
        """The last cut behind `start` with at most `max_rows` rows between them, or else the first one: a limit holds
        whole cuts. None when there is no cut behind `start`, or none with a time ≤ `upto`."""
        while self._ahead and self._ahead[0].time <= start.time:
            self._ahead.popleft()
        if len(self._ahead) < CUTS_AHEAD_MAX // 2:
            self._read_ahead(start)
        cuts = [cut for cut in self._ahead if upto is None or cut.time <= upto]
        if not cuts:
            return None
        sums = accumulate(self._rows_between(start, cuts, max_rows))
        within = sum(1 for total in sums if total <= max_rows)
        return cuts[max(within, 1) - 1]

    def _read_ahead(self, start: Cut) -> None:
        last = self._ahead[-1].time if self._ahead else start.time
        for cut in self._new_cuts(self._ahead_entries):
            if cut.time > last:
                self._ahead.append(cut)
                last = cut.time
                if len(self._ahead) == CUTS_AHEAD_MAX:
                    return

    def _new_cuts(self, entries: Follower) -> Iterator[Cut]:
        id = self.collection().id
        key = self._name.encode()
        for entry in entries.new_entries():
            try:
                record = decode(entry.payload, entry.id)
                cut = Cut.from_record(record) if record.key == key else None
            except BadRecord as error:
                _logger.warning("a cut is skipped, the next one takes its place: %s", error.message)
                continue
            if cut is not None and cut.collection_id == id:  # else of one of that name that was dropped
                yield cut

    def _rows_between(self, start: Cut, cuts: Sequence[Cut], enough: int) -> list[int]:
        """The rows up to each of `cuts` behind the one before. Counting a channel ends where it alone has `enough`."""
        times = [cut.time for cut in cuts]
        rows = [0] * len(cuts)
        for each in self.ranges(start, cuts[-1]):
            total = 0
            for ts, count in row_counts(self._log, each):
                rows[bisect_left(times, ts)] += count
                total += count
                if total > enough:
                    break
        return rows

    # ---- what each task reads ---------------------------------------------------------------------------------------

    def ranges(self, start: Cut, end: Cut) -> list[ChannelRange]:
        """One range per pchannel that has entries between two cuts. Raises `InvalidRequest` when they do not belong
        together."""
        collection = self.collection()
        channels = pchannels_of(collection)
        if end.collection_id != collection.id or start.collection_id != collection.id or set(channels) - set(end.ends):
            raise InvalidRequest(f"a cut is not of collection {self._name!r} as it is now: start with a new checkpoint")
        if end.time < start.time:
            raise InvalidRequest(f"the end ({end.time}) lies before the start ({start.time}); check the offsets")
        fences = self._catalog.fences(channels)
        return [
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
            )
            for channel in channels
            if end.ends[channel].id > start.ends[channel].id
        ]

    def close(self) -> None:
        """Close the connection."""
        self._log.close()
