"""The plan of a collection: from cut to cut, as MixCoord has stored them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import physical_ms
from ...runtime.errors import InvalidRequest, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.names import Names, pchannel_of
from ...runtime.rows.hashing import shard_of_key
from ..log import first_entries
from ..options import LATEST, ReadOptions
from ..scan.channel_range import BEGINNING, IN_TABLE, ChannelPlace, ChannelRange
from ..scan.columns import spark_schema
from .catalog_view import CatalogView
from .cut_log import CutLog
from .limits import OffsetSizes, Size
from .offsets import Offset, StoredOffset
from .predicate import EVERYTHING, Predicate
from .read_plan import ReadPlan
from .splitting import split

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ..scan.scanner import ReadTask


class CollectionPlan(ReadPlan):
    """Offsets are stored cuts, with exact ends in all channels."""

    def __init__(self, log: BlockingReader, options: ReadOptions) -> None:
        super().__init__(log, options)
        self._catalog = CatalogView(log, options.wal, options.prefix)
        self._known: Collection | None = None
        self._cut_log: CutLog | None = None

    def collection(self) -> Collection:
        """The collection as the catalog has it now. Raises `CollectionNotFound`."""
        self._known = self._catalog.collection(self._options.collection)
        return self._known

    @property
    def known(self) -> Collection:
        """The collection as the catalog had it at the last call of `collection`."""
        return self._known or self.collection()

    @property
    def cuts(self) -> CutLog:
        """The cuts of the collection as it is now. Raises `CollectionNotFound`."""
        collection = self.collection()
        if self._cut_log is None or self._cut_log.collection.id != collection.id:
            self._cut_log = CutLog(self._log, Names(self._options.prefix).cuts, collection)
        return self._cut_log

    def what(self) -> str:
        """What is read, as errors name it."""
        return f"collection {self._options.collection!r}"

    def schema(self) -> StructType:
        """All columns of the read, in Spark's types."""
        return spark_schema(self.known.schema, change_feed=self._options.change_feed)

    def all_tasks(self, predicate: Predicate = EVERYTHING) -> Sequence[ReadTask]:
        """As `ReadPlan.all_tasks`. As of a time it raises `PositionLost` when retention has removed the collection's
        beginning, unless data loss is allowed: what is left is not how the collection was."""
        tasks = super().all_tasks(predicate)
        if self._options.timestamp_as_of is not None and self._options.fail_on_data_loss:
            # Checked after planning: a task raises for what is removed later.
            for each in tasks:
                if isinstance(each, ChannelRange) and (each.begin == BEGINNING or not each.begin.behind):
                    self._check_beginning(each)
        return tasks

    # ---- which cut --------------------------------------------------------------------------------------------------

    @property
    def _of(self) -> str:
        return f"collection {self.known.name!r} {self.known.id} created at {self.known.created_ts}"

    def _offset(self, stored: StoredOffset) -> Offset:
        offset = super()._offset(stored)
        channels = pchannels_of(self.known)
        if sorted(offset.ends) != channels:
            raise InvalidRequest(f"the offset is of channels {sorted(offset.ends)}, the collection's: {channels}")
        return offset

    def _bounds(self) -> tuple[Offset, Offset]:
        """As of a time it raises `InvalidRequest` when no cut has passed that yet."""
        time = self._options.timestamp_as_of
        if time is None:
            return super()._bounds()
        end = self._upto(time + 1)
        if end.time < time:
            raise InvalidRequest(
                f"what was there at {_iso_time(time)} is not known yet: the newest cut is of {_iso_time(end.time)}. "
                "Ask the node for a cut first, or give an earlier timestampAsOf"
            )
        return self._earliest(), end

    def _earliest(self) -> Offset:
        return Offset(0, dict.fromkeys(pchannels_of(self.collection()), BEGINNING))

    def _newest(self) -> Offset | None:
        newest = self.cuts.newest()
        return None if newest is None else Offset.of_cut(newest)

    def _at(self, time: int) -> Offset:
        for cut in self.cuts.between(time - 1, time):
            return Offset.of_cut(cut)
        raise InvalidRequest(
            f"no cut of {self._options.collection!r} is stored at {time}: give a time that the node answered when it "
            "was asked for a cut, or latest"
        )

    def _before(self, time: int) -> Offset:
        """Channels begin where those of the last stored cut before `time` end."""
        cut = self.cuts.last_upto(time - 1)
        return replace(self._earliest() if cut is None else Offset.of_cut(cut), time=max(time - 1, 0))

    def _upto(self, time: int) -> Offset:
        cut = next(self.cuts.between(time - 2), None)
        if cut is None:
            return self._named(LATEST, LATEST)
        return replace(Offset.of_cut(cut), time=time - 1, ends_beyond=cut.time > time - 1)

    def _steps(self, begin: Offset, end: Offset) -> Generator[tuple[Offset, Iterable[Size]]]:
        sizes = OffsetSizes(self._log, self.ranges(begin, end))
        for cut in self.cuts.ahead(begin.time, end.time - 1):
            offset = Offset.of_cut(cut)
            yield offset, sizes.upto(offset)
        yield end, sizes.upto(end)

    def _narrowed(self, begin: Offset, end: Offset, predicate: Predicate) -> tuple[Offset, Offset]:
        if predicate.first_ts > begin.time + 1:
            later = self.cuts.last_upto(min(predicate.first_ts - 1, end.time))
            begin = Offset.of_cut(later) if later is not None and later.time > begin.time else begin
        if predicate.last_ts < end.time:
            earlier = next(self.cuts.between(max(predicate.last_ts, begin.time) - 1, end.time - 1), None)
            end = end if earlier is None else Offset.of_cut(earlier)
        return begin, end

    # ---- what each task reads ---------------------------------------------------------------------------------------

    def _check(self, begin: Offset, end: Offset) -> None:
        before = self.known
        if self.collection().id != before.id:
            raise InvalidRequest(f"{self.what()} was dropped and created anew meanwhile: start with a new checkpoint")
        if end.time < begin.time:
            raise InvalidRequest(f"the end ({end.time}) lies before the start ({begin.time}); check the offsets")
        self._check_table(begin, end)

    def _check_table(self, begin: Offset, end: Offset) -> None:
        if in_table(begin) or in_table(end):
            raise InvalidRequest("an offset lies within the tables' rows: set option history as it was set before")

    def _range(self, channel: str, begin: ChannelPlace, end: ChannelPlace, first: Offset, last: Offset) -> ChannelRange:
        return replace(
            super()._range(channel, begin, end, first, last),
            begin_ts=first.time,
            end_ts=last.time,
            watermark=last.time,
            fences=self._catalog.known.fences([channel]).get(channel, {}),
            end_beyond=last.ends_beyond,
            schema=self.known.schema,
            vchannels=tuple(sorted(self.known.vchannels)),
        )

    def _split(self, ranges: Sequence[ChannelRange], begin: Offset, end: Offset) -> list[ChannelRange]:
        tasks = self._options.min_partitions
        if not 0 < len(ranges) < tasks:
            return list(ranges)
        return split(ranges, [Offset.of_cut(cut) for cut in self.cuts.points(begin.time, end.time)], tasks)

    def _asked(self, wanted: ChannelRange, predicate: Predicate) -> ChannelRange | None:
        """All versions of a key come through one vchannel."""
        keys, channels = predicate.values(self.known.schema.primary_key), predicate.values("_channel")
        found = frozenset(wanted.vchannels)
        if keys is not None:
            found &= {self.known.vchannels[shard_of_key(key, self.known.shards)] for key in keys}
        if channels is not None:
            found &= channels
        vchannels = tuple(sorted(found))
        there = any(pchannel_of(name) == wanted.channel for name in vchannels)
        return replace(wanted, vchannels=vchannels) if there else None

    def _check_beginning(self, wanted: ChannelRange) -> None:
        """Raise `PositionLost` unless the channel still has the collection's beginning: the first entry is older than
        the collection, or not behind the first fence."""
        first = first_entries(self._log.read(wanted.channel, None, wanted.end.id))
        fence = min((wanted.fences or {}).values(), default=b"")
        if first and (first[0].timestamp <= self.known.created_ts or first[0].id <= fence):
            return
        upto = _iso_time(first[0].timestamp) if first else "where the read ends"
        raise PositionLost(
            f"retention has removed the beginning of {wanted.channel}, up to {upto}. Give option history, for the "
            "tables keep all rows; or set failOnDataLoss=false to read what is left",
            requested=b"",
            first_available=first[0].id if first else None,
            channel=wanted.channel,
        )


def pchannels_of(collection: Collection) -> list[str]:
    """The physical channels of a collection, sorted."""
    return sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})


def in_table(offset: Offset) -> bool:
    """Whether an offset is one of the table only, which has no place in the log."""
    return IN_TABLE in offset.ends.values()


def _iso_time(ts: int) -> str:
    """The physical time of a timestamp as ISO 8601, UTC."""
    return datetime.fromtimestamp(physical_ms(ts) / 1000, UTC).isoformat(timespec="milliseconds")
