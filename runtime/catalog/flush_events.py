"""The events of `insert_events`: up to which T a DataNode has stored a collection in its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from ..errors import BadRecord
from ..log.record import DECODE_ERRORS, Record, RecordType

VERSION = 1


@dataclass(frozen=True, slots=True)
class FlushEvent:
    """Everything of the collection's vchannels with ts ≤ `times[vchannel]` is in the table, which is at `version`.
    `rows` and `bytes` (of Parquet) count what this flush added."""

    collection_id: int
    collection: str
    times: Mapping[str, int]
    version: int
    rows: int
    bytes: int

    def to_record(self, ts: int) -> Record:
        """The record of this event, with the timestamp `ts`."""
        body = {
            "v": VERSION,
            "id": self.collection_id,
            "times": self.times,
            "version": self.version,
            "rows": self.rows,
            "bytes": self.bytes,
        }
        key = self.collection.encode()
        return Record(RecordType.FLUSHED, ts=ts, key=key, body=cast(bytes, msgpack.packb(body)))

    @classmethod
    def from_record(cls, record: Record) -> FlushEvent:
        """The event in `record`. Raises `BadRecord`, for one of a later version, too: the next event of a collection
        covers it."""
        if record.type is not RecordType.FLUSHED:
            raise BadRecord(f"a record of type {record.type.name} among insert events", reason="type")
        try:
            body = cast("dict[str, Any]", msgpack.unpackb(record.body))
            if body["v"] != VERSION:
                raise BadRecord(f"a flush event of version {body['v']!r}, known is {VERSION}", reason="version")
            name = record.key.decode()
            return cls(body["id"], name, body["times"], body["version"], body["rows"], body["bytes"])
        except (*DECODE_ERRORS, KeyError) as error:
            raise BadRecord(f"unreadable insert event: {error}", reason="body") from error
