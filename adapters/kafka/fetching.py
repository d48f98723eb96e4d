"""Reading records: fetch requests and their answers.

Reads are read-committed: up to the first open transaction, without aborted ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from aiokafka import errors as kafka_errors
from aiokafka.protocol.fetch import FetchRequest

from ...runtime.errors import CorruptLog, TidewalError
from ...runtime.log.wal import TOMBSTONE, Entry, Headers
from . import faults
from .cluster import EARLIEST, PARTITION, Cluster
from .positions import from_native
from .requests import NO_ID, FetchById
from .unpacking import Packed, plain, split

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
PREFERRED_REPLICA_SINCE, TAGS_SINCE = 11, 12  # the versions of answers that have one field more each
ONE_BATCH = 1  # bytes: the first batch comes whole, however large
BEHIND_OPEN_S = 0.02  # pause between fetches at an open transaction
WAIT_S = 2.0  # how long the broker waits for records

make_entry: Callable[[tuple[bytes, int, bytes, bytes | None, Headers]], Entry] = cast(
    "Any", partial(tuple.__new__, Entry)
)


class Fetched(NamedTuple):
    """Batches as received, unchecked; the requested offset and the one to fetch next, the size in bytes, and the end
    offset of the topic."""

    batches: Sequence[Any]
    offset: int
    next_offset: int
    size: int
    end: int


async def fetch(
    cluster: Cluster,
    topic: str,
    offset: int,
    connection: int,
    wait_s: float = WAIT_S,
    isolation: int = READ_COMMITTED,
    topic_id: bytes = NO_ID,
    partition: int = PARTITION,
) -> Fetched:
    """Fetch batches from an offset on, over a connection to the leader; none after `wait_s`. With a `topic_id` only
    the topic with this id is read, not another one of the name. Raises the library's errors."""
    wait_s = min(wait_s, cluster.options.request_timeout_s / 2)
    limit_bytes = cluster.options.fetch_bytes
    answer = await _ask(cluster, topic, offset, connection, isolation, wait_s, limit_bytes, topic_id, partition)
    if (
        offset > answer.stable and wait_s and isolation == READ_COMMITTED
    ):  # nothing can come, and the broker says so at once
        await asyncio.sleep(BEHIND_OPEN_S)
    batches = list(answer.batches)
    behind = max((batch.next_offset for batch in batches), default=offset)
    if any(batch.is_transactional for batch in batches):
        batches = list(_committed(batches, answer.aborted))
    return Fetched(batches, offset, max(behind, offset), answer.size, answer.end)


async def last_before(
    cluster: Cluster, topic: str, end: int, connection: int, partition: int = PARTITION
) -> int | None:
    """The offset of the last entry before `end` that readers may see: after it there are only control records, and
    aborted or uncommitted ones. None where there is none. Raises the library's errors; `StaleMetadata` where a new
    leader does not know yet that entries up to `end` are acknowledged: its empty answer does not mean that there is
    none."""
    at = end - 1
    while at >= 0:
        try:
            answer = await _ask(cluster, topic, at, connection, READ_UNCOMMITTED, 0, ONE_BATCH, NO_ID, partition)
        except kafka_errors.OffsetOutOfRangeError:
            if at < (await cluster.offset(topic, EARLIEST, partition) or 0):  # removed
                return None
            raise kafka_errors.StaleMetadata(f"{topic} does not reach to {at} here") from None
        batch = next(iter(answer.batches), None)
        if batch is None:
            raise kafka_errors.StaleMetadata(f"{topic} ends at {answer.end} here, before {at}, which is acknowledged")
        if batch.is_transactional and not batch.is_control_batch:
            committed = (await fetch(cluster, topic, at, connection, 0, partition=partition)).batches
            visible = any(each.base_offset == batch.base_offset for each in committed)
        else:
            visible = not batch.is_control_batch
        if visible:
            return min(at, batch.next_offset - 1)
        at = batch.base_offset - 1
    return None


class _Answer(NamedTuple):
    batches: Iterator[Any]
    aborted: Sequence[tuple[int, ...]]  # producer ids and first offsets of aborted transactions
    size: int
    end: int
    stable: int  # the last stable offset: before it no transaction is open


async def _ask(
    cluster: Cluster,
    topic: str,
    offset: int,
    connection: int,
    isolation: int,
    wait_s: float,
    limit_bytes: int,
    topic_id: bytes = NO_ID,
    partition: int = PARTITION,
) -> _Answer:
    wait_ms = int(wait_s * 1000)
    if topic_id == NO_ID:
        request: Any = FetchRequest(wait_ms, 1, limit_bytes, isolation, [(topic, [(partition, offset, limit_bytes)])])
    else:
        request = FetchById(wait_ms, limit_bytes, isolation, topic, topic_id, offset, partition)
    response = await cluster.ask_leader(topic, request, connection, partition)
    _, code, end, stable, *details = response.topics[0][1][0]
    if code:
        raise faults.for_code(code)
    if response.API_VERSION >= TAGS_SINCE:
        details.pop()
    data: bytes = details[-1] or b""
    aborted = details[-3 if response.API_VERSION >= PREFERRED_REPLICA_SINCE else -2]
    return _Answer(split(data), aborted or (), len(data), end, stable)


def _committed(batches: Sequence[Any], aborted: Sequence[tuple[int, ...]]) -> Iterator[Any]:
    """The batches without those of aborted transactions."""
    begins = sorted(aborted, key=lambda each: each[1], reverse=True)
    aborting: set[int] = set()
    for batch in batches:
        while begins and begins[-1][1] <= batch.base_offset:
            aborting.add(begins.pop()[0])
        if not batch.is_transactional or batch.producer_id not in aborting:
            yield batch
        elif batch.is_control_batch:
            aborting.discard(batch.producer_id)


def records(batches: Sequence[Any], first_offset: int, limit_bytes: int, *, whole: bool = False) -> Iterator[Any]:
    """The records from an offset on: a fetched batch is whole and may begin before it. A batch of more than
    `limit_bytes` unpacked becomes one record without a value, or `CorruptLog` with `whole`. Raises `CorruptLog`."""
    for batch in batches:
        if not batch.validate_crc():
            raise CorruptLog(f"a batch at offset {batch.base_offset} fails its checksum", offset=batch.base_offset)
        if batch.is_control_batch:
            continue
        unpacked = batch.unpacked(limit_bytes, whole=whole) if isinstance(batch, Packed) else plain(batch, whole=whole)
        for record in unpacked:
            if record.offset >= first_offset:
                yield record


def readable(
    decode: Callable[[Sequence[Any], int, bytes, int], list[Entry]],
    batches: Sequence[Any],
    first_offset: int,
    prefix: bytes,
    limit_bytes: int,
) -> tuple[list[Entry], TidewalError | None]:
    """What `decode`, which is `entries` or `foreign_entries`, makes of the batches up to the first that it raises an
    error for, and that error."""
    found: list[Entry] = []
    for batch in batches:
        try:
            found += decode((batch,), first_offset, prefix, limit_bytes)
        except TidewalError as error:
            return found, error
    return found, None


def entries(batches: Sequence[Any], first_offset: int, prefix: bytes, limit_bytes: int) -> list[Entry]:
    """`records` as entries of a channel whose ids begin with `prefix`. Raises `CorruptLog`, and `Unsupported` for a
    compression whose package is missing."""
    try:
        return [
            make_entry(
                (
                    prefix + record.offset.to_bytes(8, "big"),
                    from_native(record.timestamp, record.headers),
                    record.value or b"",
                    None,
                    (),
                )
            )
            for record in records(batches, first_offset, limit_bytes)
        ]
    except kafka_errors.KafkaError as error:
        raise faults.mapped(error, f"read the records at {first_offset}") from error


def foreign_entries(batches: Sequence[Any], first_offset: int, prefix: bytes, limit_bytes: int) -> list[Entry]:
    """As `entries`, of a partition of a foreign topic: with keys and headers, a `TOMBSTONE` where there is no value.
    No header is taken for Tidewal's. Raises `CorruptLog` also for a batch that cannot be unpacked."""
    try:
        return [
            make_entry(
                (
                    prefix + record.offset.to_bytes(8, "big"),
                    from_native(record.timestamp or 0, ()),
                    TOMBSTONE if record.value is None else record.value,
                    record.key,
                    tuple(record.headers),
                )
            )
            for record in records(batches, first_offset, limit_bytes, whole=True)
        ]
    except kafka_errors.KafkaError as error:
        raise faults.mapped(error, f"read the records at {first_offset}") from error
