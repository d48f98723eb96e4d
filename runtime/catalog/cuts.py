"""Cuts: one time `T` and, per channel, the exclusive end of the records with ts ≤ T. A cut is a consistent line across
all channels of a collection. MixCoord stores a cut in the log before it hands it out, so all readers see the same cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from ..errors import BadRecord, check_version
from ..log.record import DECODE_ERRORS, Record, RecordType

VERSION = 1


@dataclass(frozen=True, slots=True)
class CutEnd:
    """Where a cut ends in one pchannel: behind the record (term, cseq), whose message id is `id`."""

    term: int
    cseq: int
    id: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """Everything with ts ≤ `time`. `ends` has one entry per pchannel of the collection."""

    collection_id: int
    collection: str
    time: int
    ends: Mapping[str, CutEnd]

    def to_record(self) -> Record:
        """The record to store."""
        ends = {channel: (end.term, end.cseq, end.id) for channel, end in self.ends.items()}
        body = cast(bytes, msgpack.packb({"v": VERSION, "id": self.collection_id, "time": self.time, "ends": ends}))
        return Record(RecordType.CUT, ts=self.time, key=self.collection.encode(), body=body)

    @classmethod
    def from_record(cls, record: Record) -> Cut:
        """The cut in a record of the cuts channel. Raises `BadRecord`, and `FormatTooNew` for a newer Tidewal's."""
        if record.type is not RecordType.CUT:
            raise BadRecord(f"a record of type {record.type.name} among cuts", reason="type")
        try:
            body = cast("dict[str, Any]", msgpack.unpackb(record.body))
            check_version("a cut", body["v"], VERSION)
            ends = {channel: CutEnd(*end) for channel, end in dict(body["ends"]).items()}
            return cls(body["id"], record.key.decode(), body["time"], ends)
        except (*DECODE_ERRORS, LookupError) as error:
            raise BadRecord(f"unreadable cut: {error}", reason="cut") from error
