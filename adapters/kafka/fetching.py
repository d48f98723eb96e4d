"""Reading records: one request, and what its answer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from aiokafka import errors as kafka_errors
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record import MemoryRecords

from ...runtime.errors import CorruptLog
from ...runtime.wal import Entry
from . import faults
from .cluster import PARTITION, Cluster
from .positions import from_native

WAIT_S = 2.0  # how long the broker waits for something to answer with

make_entry = cast("Callable[[tuple[bytes, int, bytes]], Entry]", partial(tuple.__new__, Entry))


class Fetched(NamedTuple):
    """Batches as they came, unchecked; the offset that was asked for and the one behind them, their size, and where
    the topic ends."""

    batches: Sequence[Any]
    offset: int
    next_offset: int
    size: int
    end: int


async def fetch(cluster: Cluster, topic: str, offset: int, connection: int, wait_s: float = WAIT_S) -> Fetched:
    """What there is from an offset on; after `wait_s` nothing. Raises the library's errors."""
    piece_bytes = cluster.options.fetch_bytes
    wait_s = min(wait_s, cluster.options.request_timeout_s / 2)
    partitions = [(topic, [(PARTITION, offset, piece_bytes)])]
    request = FetchRequest(int(wait_s * 1000), 1, piece_bytes, 0, partitions)
    response = await cluster.ask_leader(topic, request, connection)
    ((_, ((_, code, end, *details),)),) = response.topics
    if code:
        raise kafka_errors.for_code(code)
    data: bytes = details[-1] or b""
    records = MemoryRecords(data)
    batches: list[Any] = []
    behind = offset
    while records.has_next():
        batch = records.next_batch()
        assert batch is not None
        behind = max(behind, batch.next_offset)
        batches.append(batch)
    return Fetched(batches, offset, behind, len(data), end)


def records(batches: Sequence[Any], first_offset: int) -> Iterator[Any]:
    """The records from an offset on: a batch comes whole, also what lies before it. Raises `CorruptLog`."""
    for batch in batches:
        if not batch.validate_crc():
            raise CorruptLog(f"a batch at offset {batch.base_offset} fails its checksum", offset=batch.base_offset)
        if batch.is_control_batch:
            continue
        for record in batch:
            if record.offset >= first_offset:
                yield record


def entries(batches: Sequence[Any], first_offset: int, prefix: bytes) -> list[Entry]:
    """The same as entries of a channel whose ids begin with `prefix`. Raises also `Unsupported` for a compression whose
    package is missing."""
    try:
        return [
            make_entry(
                (
                    prefix + record.offset.to_bytes(8, "big"),
                    from_native(record.timestamp, record.headers),
                    record.value or b"",
                )
            )
            for record in records(batches, first_offset)
        ]
    except kafka_errors.KafkaError as error:
        raise faults.mapped(error, f"read what is at {first_offset}") from error
