"""A log written by hand: what the roles would write, and the rows that a reader must get out of it."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from tidewal.runtime.catalog.catalog import Collection, catalog_fold
from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.clock import compose, physical_ms
from tidewal.runtime.errors import ChannelNotFound, PositionLost
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.replicated.records import Claim, claim_event, encode_event, pages_of
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.runtime.rows.schema import OPS, CollectionSchema, Field

NAMES = Names()
FLIGHTS = CollectionSchema(
    "flights",
    (
        Field("flight", "varchar"),
        Field("origin", "varchar", nullable=True),
        Field("event_time", "timestamp", nullable=True),
        Field("delay", "double", nullable=True),
        Field("stops", "int16", nullable=True),
        Field("place", "float_vector", dim=2),
    ),
    "flight",
)
NOON = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.UTC)

Row = dict[str, object]
Append = Callable[[str, bytes, int], bytes]


class ListLog:
    """The log of the bridge's Protocol, in lists."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Entry]] = {}
        self.reads: list[tuple[str, bytes | None, bytes | None]] = []
        self.closed = False
        self._last = 0
        self._ids: dict[str, list[bytes]] = {}  # those of entries that were removed too

    def append(self, channel: str, payload: bytes, timestamp: int) -> bytes:
        self._last += 1
        id = self._last.to_bytes(8, "big")
        self.entries.setdefault(channel, []).append(Entry(id, timestamp, payload))
        self._ids.setdefault(channel, []).append(id)
        return id

    def channels(self) -> list[str]:
        return sorted(self.entries)

    def latest_id(self, channel: str) -> bytes | None:
        if channel not in self.entries:
            raise ChannelNotFound(f"no channel {channel}", channel=channel)
        ids = [entry.id for entry in self.entries[channel]] or self._ids.get(channel, [])
        return ids[-1] if ids else None

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        self.reads.append((channel, after, upto))
        if channel not in self.entries:
            raise ChannelNotFound(f"no channel {channel}", channel=channel)
        entries = self.entries[channel]
        first = entries[0].id if entries else None
        gone = max((id for id in self._ids.get(channel, []) if first is None or id < first), default=b"")
        if after is not None and (after < gone or (inclusive and after == gone)):
            raise PositionLost(f"{after.hex()} is gone", requested=after, first_available=first)
        wanted = [
            each
            for each in entries
            if ((after or b"") < each.id or (inclusive and each.id == after)) and (upto is None or each.id <= upto)
        ]
        for start in range(0, len(wanted), 3):
            yield wanted[start : start + 3]

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        if channel not in self.entries:
            raise ChannelNotFound(f"no channel {channel}", channel=channel)
        return next((each.id for each in self.entries[channel] if each.timestamp >= timestamp), None)

    def alive(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class Story:
    """Writes through `append`; `rows` holds every row version as a DataFrame must show it, less `_watermark`."""

    def __init__(self, append: Append) -> None:
        self.append = append
        self.now = compose(1_700_000_000_000)
        self.rows: list[Row] = []
        self.cuts: list[Cut] = []
        self.term = 1
        self._events = 0
        self._terms: dict[str, int] = {}
        self._catalog = catalog_fold()
        self._catalog.settle()
        self._cseq: dict[str, int] = {}
        self._ends: dict[str, CutEnd] = {}
        self.claim("n")

    def claim(self, node: str) -> None:
        """A node begins to lead."""
        claim = self._catalog.claim
        self._event(claim_event(node, claim), Claim(b"", claim.term + 1, node))

    def event(self, event: Mapping[str, object]) -> None:
        """An event of the present leader."""
        self._event(event, self._catalog.claim)

    def _event(self, event: Mapping[str, object], claim: Claim) -> None:
        self.now += 1
        self._events += 1
        payload = encode(encode_event(RecordType.CATALOG, event, claim.node, self._events, claim))
        self._catalog.read(Entry(self.append(NAMES.catalog, payload, self.now), self.now, payload))

    def snapshot(self) -> bytes:
        """A snapshot of the catalog; returns the id before which the catalog's entries may go."""
        as_of = self._catalog.as_of
        for page in pages_of(self._catalog.snapshot(), as_of, 1):
            self.event(page)
        return as_of

    def create(
        self, id: int = 7, schema: CollectionSchema = FLIGHTS, shards: int = 2, pchannels: int | None = None
    ) -> Collection:
        places = [NAMES.pchannel(shard % (pchannels or shards)) for shard in range(shards)]
        vchannels = tuple(NAMES.vchannel(place, id, shard) for shard, place in enumerate(places))
        collection = Collection(id, schema, vchannels, self.now)
        self.event({"kind": "create", "collection": collection.to_wire()})
        self.own(sorted(set(places)), self.term)
        self.event({"kind": "ready", "id": id})
        return collection

    def own(self, pchannels: Sequence[str], term: int) -> None:
        """A new owner: fences in the channels, and in the catalog."""
        self.term = term
        grants = {channel: (term, self._terms.get(channel, 0)) for channel in pchannels}
        self._terms.update(dict.fromkeys(pchannels, term))
        self.event({"kind": "grant", "node": "n", "channels": grants, "limit": 1 << 62})
        self._cseq.update(dict.fromkeys(pchannels, 0))
        fences = {channel: (term, self.record(channel, Record(RecordType.FENCE))) for channel in pchannels}
        self.event({"kind": "fenced", "channels": fences})

    def record(self, channel: str, record: Record) -> bytes:
        """Stamp and append as the channel's owner."""
        self.now += 1
        return self.stamped(channel, record, self.now)

    def stamped(self, channel: str, record: Record, ts: int) -> bytes:
        self._cseq[channel] += 1
        cseq = self._cseq[channel]
        payload = encode(replace(record, ts=ts, term=self.term, cseq=cseq))
        id = self.append(channel, payload, ts)
        self._ends[channel] = CutEnd(self.term, cseq, id)
        return id

    def write(self, collection: Collection, shard: int, rows: Sequence[Row], parts: int = 1) -> None:
        """One batch in one shard, perhaps in several records."""
        vchannel = collection.vchannels[shard]
        self.now += 1
        for number in range(parts):
            some = list(rows[number::parts])
            part = BatchPart(self.now, number, parts) if parts > 1 else None
            body = bytes(encode_rows(batch_of(collection.schema, some)))
            self.stamped(
                pchannel_of(vchannel), Record(RecordType.ROWS, vchannel=vchannel, part=part, body=body), self.now
            )
            cseq = self._cseq[pchannel_of(vchannel)]
            self.rows += [
                {**dict.fromkeys(collection.schema.arrow().names), **row}
                | {"_ts": self.now, "_time": time_of(self.now), "_channel": vchannel, "_cseq": cseq, "_row": place}
                for place, row in enumerate(some)
            ]

    def cut(self, collection: Collection) -> Cut:
        """Store a cut of now."""
        self.now += 1
        channels = sorted(map(pchannel_of, collection.vchannels))
        cut = Cut(self.now, {name: self._ends[name] for name in channels})
        self.append(NAMES.cuts, encode(cut.to_record()), self.now)
        self.cuts.append(cut)
        return cut

    def between(self, begin: int, end: int) -> list[Row]:
        """The rows with begin < ts <= end as a read up to `end` shows them."""
        return sorted_rows([{**row, "_watermark": end} for row in self.rows if begin < number(row, "_ts") <= end])

    def play(self, collection: Collection, rng: random.Random, batches: int) -> None:
        """Write batches of all operations, with ticks and other collections' records between them, and cuts that have
        at least one batch between two."""
        for following in reversed(range(batches)):
            self.write(collection, rng.randrange(2), [random_row(rng) for _ in range(rng.randrange(1, 9))])
            if rng.random() < 0.3:
                channel = NAMES.pchannel(rng.randrange(2))
                self.record(channel, Record(RecordType.TIME_TICK))
            if rng.random() < 0.3:
                foreign = NAMES.vchannel(NAMES.pchannel(0), 99, 0)
                self.record(NAMES.pchannel(0), Record(RecordType.ROWS, vchannel=foreign, body=b"not ours"))
            if not following or rng.random() < 0.4:
                self.cut(collection)


def time_of(ts: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=physical_ms(ts))


def number(row: Row, name: str) -> int:
    value = row[name]
    assert isinstance(value, int)
    return value


def random_row(rng: random.Random) -> Row:
    key = f"UA{rng.randrange(20)}"
    op = rng.choice(list(OPS))
    if op == "delete":
        return {"_op": op, "flight": key}
    return {
        "_op": op,
        "flight": key,
        "origin": rng.choice(["JFK", "LGA", "EWR", None]),
        "event_time": NOON + datetime.timedelta(microseconds=rng.randrange(10**11)),
        "delay": rng.choice([None, rng.uniform(-20, 200)]),
        "stops": rng.choice([None, 0, 1]),
        "place": [float(rng.randrange(9)), 0.5],
    }


def batch_of(schema: CollectionSchema, rows: Sequence[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{**row, "_op": int(OPS[str(row["_op"])])} for row in rows], schema=schema.row_arrow()
    )


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["_ts"], row["_channel"], row["_cseq"], row["_row"]))
