"""A join with a collection: its rows as of the log time of each entry of an input.

The lookup follows the collection's channels itself, and keeps versions of its rows, not only the newest: the entries of
an input are as old as its backlog. It reads no further than it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, Self, cast

import pyarrow as pa

from ..arguments import checked
from ..catalog.catalog import Catalog, Collection
from ..clock import add_ms
from ..errors import BadRecord, CollectionNotFound, InvalidRequest, MemoryLimitExceeded, PositionLost, WatermarkStalled
from ..log.heartbeats import heard
from ..log.names import Names, pchannel_of
from ..log.record import Record, RecordType
from ..log.wal import Delivered, From, FromTime, Wal
from ..replicated.fold import Fold
from ..replicated.follower import Follower
from ..rows.row_codec import decode_rows
from ..rows.schema import OP_COLUMN, Op
from ..streams.channel_reader import Granted
from ..streams.stream_base import BUFFER_BYTES
from ..streams.tt_stream import TtMsgStream

LOOKUP_BYTES = 256 * 1024 * 1024
LOOKUP_STALLED_S = 30.0
VERSION_BYTES = 256  # what a version of a row takes beside its values: key, time, places in a list and a dictionary
CREATED_WITHIN_MS = 5 * 60 * 1000  # after its entry in the catalog a collection's channels say that it begins

_log = logging.getLogger("tidewal.dataflow")
_timestamp = attrgetter("timestamp")

Row = Mapping[str, Any]


class CollectionSnapshot(Protocol):
    """The rows of a collection at the time `tsafe`, such as what `Client.query` returns."""

    @property
    def table(self) -> pa.Table: ...

    @property
    def tsafe(self) -> int: ...


class Lookup:
    """The rows of a collection by primary key, as of a log time.

        cities = tidewal.Lookup(wal, "cities")

        async def handle(delivered, state):
            await cities.follow(delivered)
            for entry in delivered.entries:
                city = cities.get(key_of(entry), entry.timestamp)

    A row of a time T has every write of the collection with a timestamp ≤ T, and none behind: the answer is the same
    whenever, and however often, an entry is processed. `follow` waits until the collection's own watermark has reached
    the newest entry of the batch.

    It begins with the first record of the collection in the log. Where retention has removed that, give a `snapshot`,
    the answer of a query for all rows; times before its `tsafe` cannot be looked up then (`PositionLost`).

    At most `max_bytes` are held (an estimate of what the rows take). Older versions of rows go first; an input that
    asks for a time before them makes the lookup read the log again (`rebuilds`). A collection whose rows alone need
    more raises `MemoryLimitExceeded` (`limit` "lookup.max_bytes"): name the `columns` that are needed, raise the limit,
    or join in Spark. One lookup belongs to one program; `async with` closes it.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        collection: str,
        *,
        columns: Sequence[str] | None = None,
        snapshot: CollectionSnapshot | None = None,
        max_bytes: int = LOOKUP_BYTES,
        stalled_after_s: float | None = LOOKUP_STALLED_S,
        names: Names | None = None,
    ) -> None:
        """`columns` are those that rows have, None: all; the key is always there. `names` are the channels of the node
        where they do not have the usual prefix. With `stalled_after_s` `follow` raises `WatermarkStalled` once the
        collection's time has not moved for so many seconds; it may be called again."""
        self.rebuilds: int = 0
        self.bytes: int = 0
        self.bad: int = 0
        self._wal, self._name = wal, collection
        self._columns = None if columns is None else tuple(columns)
        self._snapshot, self._max_bytes, self._stalled_after_s = snapshot, max_bytes, stalled_after_s
        self._names = names or Names()
        self._versions: dict[Any, list[tuple[int, Row | None, int]]] = {}  # since when, the row, its bytes
        self._superseded: deque[tuple[int, Any]] = deque()  # since when a key has a newer version
        self._floor = 0  # versions that ended at or before this time are gone
        self._time = 0  # all versions that began at or before this time are there
        self._read_ahead: deque[Record] = deque()  # the rest of the last pack, behind that time
        self._dropped: int | None = None
        self._begun: set[str] = set()  # the vchannels whose beginning was read
        self._catalog: Follower[Catalog] | None = None
        self._collection: Collection | None = None
        self._stream: TtMsgStream | None = None
        self._listening: asyncio.Task[None] | None = None

    # ---- asking -----------------------------------------------------------------------------------------------------

    @checked
    async def follow(self, delivered: Delivered) -> None:
        """Wait until all times of the entries of `delivered` can be looked up with `get`.

        Raises `CollectionNotFound`, also once it was dropped; `PositionLost` for times that nothing is known of;
        `MemoryLimitExceeded`; `WatermarkStalled`; `InvalidRequest` for entries without a timestamp; and what reading
        the log raises."""
        times = list(map(_timestamp, delivered.entries))
        if not times or min(times) <= 0:
            raise InvalidRequest(
                f"entries of {delivered.channel} have no timestamp, so there is no time to look up: append them with "
                "one (a MsgStream does)"
            )
        await self.follow_to(min(times), max(times))

    @checked
    async def follow_to(self, first: int, last: int) -> None:
        """As `follow`, for the times from `first` to `last`."""
        if self._stream is None:
            await self._open()
        if first < self._floor:
            await self._rebuild(first)
        try:
            while not self._apply_to(last, first):
                self._check_listening()
                pack = await anext(cast(TtMsgStream, self._stream))
                self._read_ahead.extend(pack.messages)
            self._check_beginning(last)
        except StopAsyncIteration:
            raise InvalidRequest("the lookup was closed") from None
        except WatermarkStalled:
            raise
        except Exception:  # what is held may be half of a pack: begin anew when it is called again
            await self._forget()
            raise
        if self._dropped is not None and last >= self._dropped:
            raise CollectionNotFound(f"the collection {self._name!r} was dropped", collection=self._name)

    def get(self, key: object, time: int) -> Row | None:
        """The row of `key` as of the log time `time`, or None where it had none. Do not change it. Raises
        `InvalidRequest` for a time that `follow` has not reached, or that lies before what is still held."""
        if not self._floor <= time <= self._time:
            raise InvalidRequest(f"the time {time} was not followed: await follow() with the batch first")
        for since, row, _ in reversed(self._versions.get(key, ())):
            if since <= time:
                return row
        return None

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Read the catalog, and begin to read the collection's channels."""
        follower = await self._follow_catalog()
        catalog = await follower.catch_up()
        self._collection = collection = catalog.collection(self._name)
        self._check_columns(collection)
        channels = sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})
        stream = TtMsgStream(
            self._wal,
            vchannels=collection.vchannels,
            buffer_bytes=max(1, min(BUFFER_BYTES, self._max_bytes // 4)),
            grants=_Grants(follower),
            stalled_after_s=self._stalled_after_s,
            on_bad=self._count_bad,
        )
        start = collection.created_ts - 1 if self._snapshot is None else self._snapshot.tsafe
        stream.as_consumer(channels, FromTime(start), fences=catalog.fences(channels))
        if self._snapshot is not None:
            self._load(self._snapshot, collection)
        self._stream = stream
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name=f"lookup {self._name}")

    async def _follow_catalog(self) -> Follower[Catalog]:
        """The catalog's follower; one that has ended, or could not begin, is replaced by the next call."""
        ended = self._catalog
        if ended is not None and ended.ended is None:
            return ended
        follower = Follower(
            self._wal,
            self._names.catalog,
            lambda on_bad: Fold(Catalog, RecordType.CATALOG, led=True, on_bad=on_bad),
        )
        try:
            await follower.open()
        except BaseException:
            await follower.close()
            raise
        self._catalog = follower
        if ended is not None:
            await ended.close()
        return follower

    def _check_columns(self, collection: Collection) -> None:
        known = [field.name for field in collection.schema.fields]
        for name in self._columns or ():
            if name not in known:
                raise InvalidRequest(f"{self._name} has no column {name!r}; there are {', '.join(known)}")

    def _load(self, snapshot: CollectionSnapshot, collection: Collection) -> None:
        self._floor = self._time = snapshot.tsafe
        self._begun = set(collection.vchannels)
        key = collection.schema.primary_key
        wanted = self._wanted(collection)
        missing = set(wanted) - set(snapshot.table.column_names)
        if missing:
            raise InvalidRequest(f"the snapshot of {self._name} has no column {', '.join(sorted(missing))}")
        for batch in snapshot.table.select(wanted).to_batches():
            for row in batch.to_pylist():
                self._put(row[key], snapshot.tsafe, row)
        self._shrink(snapshot.tsafe)

    async def _rebuild(self, first: int) -> None:
        """Begin anew, for a time before what is held."""
        if self._snapshot is not None:
            raise PositionLost(
                f"{self._name} is known from its snapshot at {self._snapshot.tsafe} on, and an entry of {first} lies "
                "before that: leave the snapshot out where the log still has the whole collection",
                requested=first,
                first_available=self._snapshot.tsafe,
            )
        self.rebuilds += 1
        _log.warning("lookup of %s: older versions are needed than memory holds; reading the log again", self._name)
        await self._forget()
        await self._open()

    async def _forget(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        self._versions.clear()
        self._superseded.clear()
        self._begun.clear()
        self._read_ahead.clear()
        self.bytes = self._floor = self._time = 0
        self._dropped = None

    async def _listen(self) -> None:
        """Pass on what the owners announce, so that idle channels do not hold the others back."""
        async for entries in self._wal.read(self._names.heartbeats, From.EARLIEST):
            for entry in entries:
                for announcement in heard(entry.payload):
                    granted = _Grants(cast("Follower[Catalog]", self._catalog)).granted(announcement.channel)
                    if self._stream is not None and granted.covers(announcement.term, announcement.time):
                        self._stream.announce(*announcement)

    def _check_listening(self) -> None:
        if self._listening is not None and self._listening.done():
            task, self._listening = self._listening, asyncio.create_task(self._listen(), name=f"lookup {self._name}")
            task.result()

    def _check_beginning(self, last: int) -> None:
        """Raise unless the channels were read from the collection's beginning on."""
        collection = self._collection
        assert collection is not None
        missing = set(collection.vchannels) - self._begun
        if missing and last >= add_ms(collection.created_ts, CREATED_WITHIN_MS):
            raise self._beginning_lost(min(missing))

    def _beginning_lost(self, vchannel: str) -> PositionLost:
        return PositionLost(
            f"retention has removed the beginning of {vchannel}: give the lookup of {self._name} a snapshot, as in "
            f"snapshot=await client.query({self._name!r}, consistency='strong')",
            channel=vchannel,
        )

    # ---- versions of rows -------------------------------------------------------------------------------------------

    def _apply_to(self, last: int, needed: int) -> bool:
        """Apply what was read, up to the time `last`; whether all up to there was read. Versions that ended before the
        time `needed` may go."""
        collection, stream = self._collection, self._stream
        assert collection is not None
        assert stream is not None
        while self._read_ahead and self._read_ahead[0].ts <= last:
            self._apply(self._read_ahead.popleft(), collection)
            self._shrink(needed)
        if stream.end_ts < last:
            return False
        self._time = max(self._time, last)
        return True

    def _apply(self, record: Record, collection: Collection) -> None:
        if record.type is RecordType.CREATE_COLLECTION:
            self._begun.add(record.vchannel)
        elif record.type is RecordType.DROP_COLLECTION:
            self._dropped = record.ts
        elif record.type is RecordType.ROWS:
            if record.vchannel not in self._begun:
                raise self._beginning_lost(record.vchannel)
            self._add(record, collection)

    def _add(self, record: Record, collection: Collection) -> None:
        try:
            columns = [*self._wanted(collection), OP_COLUMN]
            rows = decode_rows(record.body, collection.schema.row_arrow(), columns)
        except BadRecord:  # a node keeps it as a dead letter
            self.bad += 1
            return
        key = collection.schema.primary_key
        for row in rows.to_pylist():
            self._put(row[key], record.ts, None if row.pop(OP_COLUMN) == Op.DELETE else row)

    def _wanted(self, collection: Collection) -> list[str]:
        fields = [field.name for field in collection.schema.fields]
        if self._columns is None:
            return fields
        return [name for name in fields if name in self._columns or name == collection.schema.primary_key]

    def _put(self, key: Any, since: int, row: Row | None) -> None:
        size = VERSION_BYTES + (0 if row is None else _bytes_of(row))
        versions = self._versions.setdefault(key, [])
        if versions or row is None:
            self._superseded.append((since, key))
        versions.append((since, row, size))
        self.bytes += size

    def _shrink(self, needed: int) -> None:
        """Forget versions that ended at or before the time `needed`, oldest first, while too much is held."""
        while self.bytes > self._max_bytes and self._superseded and self._superseded[0][0] <= needed:
            since, key = self._superseded.popleft()
            versions = self._versions.get(key, [])  # none where it was superseded twice at one time
            while len(versions) > 1 and versions[1][0] <= since:
                self.bytes -= versions.pop(0)[2]
            if len(versions) == 1 and versions[0][1] is None:
                self.bytes -= self._versions.pop(key)[0][2]
            self._floor = max(self._floor, since)
        if self.bytes > self._max_bytes:
            raise MemoryLimitExceeded(
                f"the rows of {self._name} take over {self._max_bytes} bytes; name fewer columns, raise max_bytes, or "
                "join in Spark",
                limit="lookup.max_bytes",
            )

    def _count_bad(self, *_: object) -> None:
        self.bad += 1

    # ---- closing ----------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Stop following. A second call does nothing."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        await self._forget()
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            await catalog.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Grants:
    """The grants of the catalog, for the stream."""

    def __init__(self, catalog: Follower[Catalog]) -> None:
        self._catalog = catalog

    def granted(self, pchannel: str) -> Granted:
        return self._catalog.fold.state.granted(pchannel)

    async def catch_up(self) -> object:
        return await self._catalog.catch_up()


def _bytes_of(row: Row) -> int:
    """About what a row takes in memory."""
    size = sys.getsizeof(row)
    for value in row.values():
        size += sys.getsizeof(value)
        if type(value) is list:
            members = cast("list[object]", value)
            size += sum(map(sys.getsizeof, members))
    return size
