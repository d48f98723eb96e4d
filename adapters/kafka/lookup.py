"""Resolving the start of a reader to an offset."""

from __future__ import annotations

from aiokafka import errors as kafka_errors

from ...runtime.clock import LOGICAL_BITS
from ...runtime.errors import PositionLost
from ...runtime.log.wal import From, FromId, FromTime, Start
from .catalog import KafkaChannel
from .cluster import LATEST, Cluster
from .fetching import READ_COMMITTED, READ_UNCOMMITTED, WAIT_S, fetch, records
from .positions import before_all, from_native, offset_of
from .topics import largest_unpacked


async def first_offset(cluster: Cluster, channel: KafkaChannel, start: Start, connection: int) -> int:
    """The first offset to read for `start`. Raises `PositionLost`, and the library's errors."""
    match start:
        case From.LATEST:
            return await cluster.offset(channel.topic, LATEST, channel.number) or 0
        case From.EARLIEST:
            return (await cluster.bounds(*channel.place))[0]
        case FromTime(timestamp):
            _, end = await cluster.bounds(*channel.place)
            found = await at_time(cluster, channel, timestamp, end, connection)
            return end if found is None else found
        case FromId(id, inclusive):
            return await _behind_id(cluster, channel, id, inclusive=inclusive)


async def at_time(cluster: Cluster, channel: KafkaChannel, timestamp: int, end: int, connection: int) -> int | None:
    """The first offset before `end` whose timestamp is at least `timestamp`, None for none. Kafka finds the first
    record of the millisecond, or one that was stamped with the time of its append (see `positions.py`); from there on
    the records are scanned.

    Entries behind an open transaction cannot be read as committed yet, but they exist: from there on the scan reads
    uncommitted, and a record of the transaction counts although it may be aborted. The offset then lies before the
    entry, never after it.
    """
    at = await cluster.offset(channel.topic, timestamp >> LOGICAL_BITS, channel.number)
    isolation = READ_COMMITTED
    while at is not None and at < end:
        wait_s = WAIT_S if isolation == READ_UNCOMMITTED else 0.0  # the entries before the end exist
        fetched = await fetch(cluster, channel.topic, at, connection, wait_s, isolation, partition=channel.number)
        if not fetched.size:  # a transaction is open
            isolation = READ_UNCOMMITTED
            continue
        for record in records(fetched.batches, at, largest_unpacked(channel.policy), whole=channel.foreign):
            if record.offset >= end:
                return None
            if from_native(record.timestamp or 0, () if channel.foreign else record.headers) >= timestamp:
                return record.offset
        at = fetched.next_offset
    return None


def lost(channel: KafkaChannel, requested: bytes, first: int) -> PositionLost:
    """The error for a requested id that the channel, whose first offset is `first`, does not have."""
    first_id = channel.prefix + first.to_bytes(8, "big")
    return PositionLost(
        f"position {requested.hex()} is not in channel {channel.name}, whose first id is {first_id.hex()}",
        requested=requested,
        first_available=first_id,
        channel=channel.name,
    )


async def after_loss(cluster: Cluster, channel: KafkaChannel, offset: int) -> int:
    """The offset to read on from when the brokers do not have `offset`: in an ephemeral channel the first one. Raises
    `PositionLost`; the library's `StaleMetadata` where the leader does not know its end yet."""
    first, end = await cluster.bounds(*channel.place)
    if first <= offset <= end:
        return offset
    if offset > end:
        raise kafka_errors.StaleMetadata(f"{channel.topic} ends at {end} here, {offset} was read")
    if channel.policy.ephemeral:
        return first
    raise lost(channel, channel.prefix + offset.to_bytes(8, "big"), first)


async def _behind_id(cluster: Cluster, channel: KafkaChannel, id: bytes, *, inclusive: bool) -> int:
    first, end = await cluster.bounds(*channel.place)
    if id == before_all(channel.prefix):
        offset = -1
    else:
        offset = offset_of(id, channel.prefix)
    if offset is None:
        raise lost(channel, id, first)
    wanted = offset if inclusive else offset + 1
    if channel.policy.ephemeral:
        return min(max(wanted, first), end)
    if wanted < first or offset >= end:
        raise lost(channel, id, first)
    return wanted
