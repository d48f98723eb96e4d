"""The tables of nodes in a promotion without the source: they go on from the line, or from before."""

from __future__ import annotations

from collections.abc import Mapping, Set

from ..catalog.catalog import CREATING
from ..clock import to_datetime
from ..errors import CorruptLog, InvalidRequest
from ..log.record import read_header
from ..log.wal import ChannelInfo, FromId
from ..migration.node_tables import NodeTables, lost_position
from ..streams.messages import Position
from ..streams.stream_base import reading
from .line_log import LineLog
from .replicated_node import DISORDER


class LineTables:
    """`NodeTables` for a migration of `log`. The positions that `tables` have are ids of the source: here they are ids
    of the replica, found by the term and number of their records. A table that has more than the line goes back to
    it."""

    def __init__(self, tables: NodeTables, log: LineLog) -> None:
        self._tables, self._log = tables, log

    @property
    def latest(self) -> int:
        """`NodeTables.latest`: a clock that is behind may have said before the line what is stored above it."""
        return self._log.line.time

    async def collections(self) -> Set[str]:
        """`NodeTables.collections`."""
        return await self._tables.collections()

    async def positions(self, collection: str) -> Mapping[str, Position]:
        """`NodeTables.positions`, none of them above the line. Raises `InvalidRequest` where the table was filled from
        another log, or of a collection that was created above the line, and `PositionLost` where the replica has
        removed what follows."""
        found = await self._tables.positions(collection)
        self._check_own(collection, found)
        return {vchannel: await self._at_line(collection, at) for vchannel, at in found.items()}

    async def move(self, collection: str, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """`NodeTables.move`; what the table has above the line is removed in the same step."""
        found = await self._tables.positions(collection)
        if found == after:
            return
        if await self.positions(collection) != before:
            raise CorruptLog(
                f"the table of {collection} is not as it was when the replica was copied: something has written to it",
                table=collection,
            )
        await self._tables.move(collection, found, after)

    def _check_own(self, name: str, found: Mapping[str, Position]) -> None:
        """Raise `InvalidRequest` unless the table, with the positions `found`, is that of the line's collection."""
        collection, time = self._log.collections.get(name), f"{to_datetime(self._log.line.time):%Y-%m-%d %H:%M:%S} UTC"
        if collection is None or not found:
            return
        if collection.state == CREATING:
            raise InvalidRequest(
                f"there is a table of {name}, which was created after {time}: move it away, for it begins empty then",
                table=name,
            )
        if found.keys() - set(collection.vchannels):
            raise InvalidRequest(
                f"the table of {name} is another collection's: give the tables of this log's nodes. If {name} was "
                f"dropped after {time} and created again, move its table away, and give --dropped {name}",
                table=name,
            )

    async def _at_line(self, collection: str, at: Position) -> Position:
        info, time = await self._log.describe(at.channel), self._log.line.time
        if info.first_id is None or info.latest_id is None:
            raise lost_position(at.channel, at.message_id)
        wanted = (at.term, at.cseq) if at.timestamp <= time else None
        start = await self._log.id_at(at.channel, max(0, min(at.timestamp, time) - DISORDER))
        for first in (start or info.first_id, info.first_id):
            if first <= info.latest_id and (found := await self._find(at.channel, info, first, wanted)) is not None:
                id, term, cseq = found
                return Position(at.channel, id, term, cseq, min(at.timestamp, time), self._log.name, at.group)
        raise InvalidRequest(
            f"the table of {collection} goes on at a record that the replica does not have: it was filled from another "
            "log, or is older than what the replica keeps",
            table=collection,
        )

    async def _find(
        self, channel: str, info: ChannelInfo, start: bytes, wanted: tuple[int, int] | None
    ) -> tuple[bytes, int, int] | None:
        """The id, the term and the number of the record with that term and number, at `start` or behind it, or of the
        last one of the line that counts, where that record is above the line: a table up to a time may go on at an
        owner's fence, which is stamped later. None where it lies before, or is not there."""
        last: tuple[bytes, int, int] | None = None
        async with reading(self._log, channel, FromId(start, inclusive=True)) as batches:
            async for entries in batches:
                for entry in entries:
                    header = read_header(entry.payload)
                    if header is None or (last is not None and header[2:4] < last[1:]):
                        continue
                    last = entry.id, *header[2:4]
                    if header[2:4] == wanted:
                        return last
                if entries[-1].id >= (info.latest_id or b""):
                    break
        return last if wanted is None or (last is not None and last[1:] < wanted) else None
