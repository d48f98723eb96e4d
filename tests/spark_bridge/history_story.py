"""A story whose rows a DataNode stores in a real table, and whose log retention then cuts off."""

from __future__ import annotations

import random
from functools import partial

import pyarrow as pa
from story import NAMES, Append, ListLog, Story, number, random_row

from tidewal.actors.datanode.log_table import LogTable
from tidewal.runtime.clock import add_ms
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.tables.table_store import LOG, StoreUri, open_tables


class StoredStory:
    """Three vchannels on two pchannels. What `flush` stores, `truncate` may remove from the log."""

    def __init__(self, folder: StoreUri, append: Append | None = None) -> None:
        """With `append` the log is another one, and `log` just tells what is in it."""
        self.folder = folder
        self.log = ListLog()
        self.story = Story(self.log.append if append is None else partial(self._append, append))
        self.flights = self.story.create(shards=3, pchannels=2)
        schema = self.flights.schema
        self.table = LogTable.open(open_tables(folder).table(schema.name, LOG), schema.arrow(), schema.primary_key)
        self.times = dict.fromkeys(self.flights.vchannels, 0)

    def _append(self, append: Append, channel: str, payload: bytes, timestamp: int) -> bytes:
        id = append(channel, payload, timestamp)
        self.log.entries.setdefault(channel, []).append(Entry(id, timestamp, payload))
        return id

    def play(self, rng: random.Random, batches: int) -> None:
        for _ in range(batches):
            rows = [random_row(rng) for _ in range(rng.randrange(1, 6))]
            self.story.write(self.flights, rng.randrange(3), rows, parts=rng.choice([1, 1, 2]))
            if rng.random() < 0.3:
                self.story.record(NAMES.pchannel(rng.randrange(2)), Record(RecordType.TIME_TICK))
            if rng.random() < 0.3:
                self.story.cut(self.flights)

    def flush(self, rng: random.Random, vchannels: tuple[str, ...] = (), *, back: int = 20) -> None:
        """Store some vchannels (or all) up to a time not far `back`; a position lies in one of the places it may."""
        start = {name: self.times[name] for name in vchannels or self.flights.vchannels}
        first = max(start.values()) + 1
        if first > self.story.now:
            return
        end = rng.randint(max(first, self.story.now - back), self.story.now)
        rows = [
            {**{name: value for name, value in row.items() if name in self.table.schema.names}}
            | {"_vchannel": row["_channel"], "_term": 1}
            for row in self.story.rows
            if row["_channel"] in start and start[str(row["_channel"])] < number(row, "_ts") <= end
        ]
        self.table.flush(
            pa.Table.from_pylist(rows, schema=self.table.schema),
            start=start,
            end=dict.fromkeys(start, end),
            positions={name: self._position(pchannel_of(name), end, before=rng.random() < 0.5) for name in start},
        )
        self.times.update(dict.fromkeys(start, end))

    def _position(self, channel: str, time: int, *, before: bool) -> Position:
        """Behind the last entry up to `time`; or `before` the first behind it, as of a stream that read no other."""
        records = [decode(entry.payload, entry.id) for entry in self.log.entries[channel]]
        place = max((record for record in records if record.ts <= time), key=lambda record: record.id, default=None)
        later = next((record for record in records if record.ts > time), None)
        if later is not None and (before or place is None):
            id, term, cseq = later.id, later.term, later.cseq - 1
        else:
            assert place is not None
            id, term, cseq = place.id, place.term, place.cseq
        return Position(channel, id, term, cseq, timestamp=time, wal="rocksmq")

    def truncate(self) -> dict[str, bytes]:
        """Remove what the DataNode lets go of: all before the positions of the table, which are returned."""
        holds: dict[str, bytes] = {}
        for position in self.table.positions().values():
            channel, id = position.channel, position.message_id
            holds[channel] = min(holds.get(channel, id), id)
        for channel in {pchannel_of(name) for name in self.flights.vchannels if not self.times[name]}:
            holds.pop(channel, None)
        for channel, id in holds.items():
            entries = self.log.entries[channel]
            entries[:] = [entry for entry in entries if entry.id >= id]
        return holds

    def removable(self) -> dict[str, bytes]:
        """`truncate`, and what MixCoord lets go of: the catalog before a snapshot of it, and old cuts."""
        snapshot = self.story.snapshot()
        self.story.cut(self.flights)
        return {**self.truncate(), NAMES.catalog: snapshot, NAMES.cuts: self.log.entries[NAMES.cuts][-1].id}

    def pass_time(self, ms: int) -> None:
        """Let the clock go on."""
        self.story.now = add_ms(self.story.now, ms)

    @property
    def time(self) -> int:
        return min(self.times.values())
