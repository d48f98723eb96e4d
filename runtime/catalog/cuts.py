"""Cuts: one time `T` and, per channel, the exclusive end of the records with ts ≤ T. A cut is a consistent line across
all collections whose channels it has. MixCoord stores a cut in the log before it hands it out, so all readers see the
same cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import msgpack

from ..errors import BadRecord, check_version
from ..log.names import pchannel_of
from ..log.record import DECODE_ERRORS, Record, RecordType
from .catalog import Collection

VERSION = 1


@dataclass(frozen=True, slots=True)
class CutEnd:
    """Where a cut ends in one pchannel: behind the record (term, cseq), whose message id is `id`."""

    term: int
    cseq: int
    id: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """Everything with ts ≤ `time` in the pchannels of `ends`: of each collection that has all of its pchannels there.
    One that an earlier Tidewal has stored is about one collection alone, and names it."""

    time: int
    ends: Mapping[str, CutEnd]
    collection_id: int = 0
    collection: str = ""

    def of(self, collection: Collection) -> Cut | None:
        """This cut with the ends of the pchannels of `collection` alone; None where it is not about that."""
        channels = set(map(pchannel_of, collection.vchannels))
        about = self.collection_id in (0, collection.id) and channels <= self.ends.keys()
        if not about or self.time < collection.created_ts:
            return None
        return replace(self, ends={name: end for name, end in self.ends.items() if name in channels})

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
            return cls(body["time"], ends, body["id"], record.key.decode())
        except (*DECODE_ERRORS, LookupError) as error:
            raise BadRecord(f"unreadable cut: {error}", reason="cut") from error
