"""The rows of a write, on their way to records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pyarrow as pa

from ...runtime.catalog.catalog import Collection
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Payload
from ...runtime.rows.row_codec import encode_rows, is_compact
from ...runtime.rows.schema import OP_COLUMN, OPS, Op
from ...runtime.rpc.protocol import Params
from ..local_owner import WritePart
from ..rows import split_by_bytes, split_by_shard

RECORD_OVERHEAD_BYTES = 4 * 1024  # of a message's limit, for names, counts and the checksum beside the rows


class ShardedRows:
    """The checked `rows` of one write to `collection`, by shard; `body` is as the client has encoded them."""

    def __init__(self, collection: Collection, rows: pa.RecordBatch, body: Payload) -> None:
        self.collection: Collection = collection
        self.rows: pa.RecordBatch = rows
        self._body = body
        shards = split_by_shard(rows, collection.schema, collection.shards)
        self._shards = [
            (vchannel, channel, part)
            for vchannel, channel, part in zip(
                collection.vchannels, _pchannels(collection.vchannels), shards, strict=True
            )
            if part is not None
        ]
        self.records: list[tuple[str, Record]] = []  # once it is split

    @property
    def channels(self) -> set[str]:
        """The pchannels that it is for; without rows, those of its collection."""
        return {channel for _, channel, _ in self._shards} or set(_pchannels(self.collection.vchannels))

    def part(self, params: Params, message_bytes: Mapping[str, int]) -> WritePart:
        """What its owners are asked to append for a request with `params`, split as `split` does it."""
        collection = self.collection
        return WritePart(
            collection.name,
            collection.id,
            collection.schema.version,
            self.split(message_bytes),
            params["producer"],
            params["pseq"],
            self.rows.num_rows,
            params.get("digest", 0),
            len(self.channels),
        )

    def split(self, message_bytes: Mapping[str, int]) -> list[tuple[str, Record]]:
        """Its records, split by shard and by `message_bytes`, which a message of each pchannel may have. The channel
        owner chains those of one pchannel, so that readers see all of a batch or nothing. Rows that are not split go
        into the log as the client has encoded them, unless the body holds more than the rows."""
        if self.records:
            return self.records
        records: list[tuple[str, Record]] = []
        for vchannel, channel, part in self._shards:
            limit = message_bytes[channel] - RECORD_OVERHEAD_BYTES
            if part is self.rows and len(self._body) <= limit and is_compact(self._body, part):
                records.append((channel, _record(vchannel, part, self.collection, self._body)))
                continue
            slices = split_by_bytes(part, limit, self.collection.schema.primary_key)
            records += [(channel, _record(vchannel, each, self.collection, encode_rows(each))) for each in slices]
        self.records = records
        return records


@lru_cache(maxsize=1024)
def _pchannels(vchannels: tuple[str, ...]) -> tuple[str, ...]:
    """The pchannel of each of `vchannels`, parsed once for all writes to a collection."""
    return tuple(map(pchannel_of, vchannels))


def _record(vchannel: str, rows: pa.RecordBatch, collection: Collection, body: Payload) -> Record:
    return Record(
        RecordType.ROWS,
        vchannel=vchannel,
        tags={"rows": rows.num_rows, **_ops(rows)},
        schema_version=collection.schema.version,
        body=body,
    )


def _ops(rows: pa.RecordBatch) -> dict[str, int]:
    """Rows per operation, for the record's tags: a reader that filters or inspects need not decode the rows."""
    counts = np.bincount(rows.column(OP_COLUMN).to_numpy(), minlength=len(Op)).tolist()
    return {name: counts[op] for name, op in OPS.items() if counts[op]}
