"""Topics on real logs, read as Spark's processes read them: over a socket, or from the brokers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tidewal.runtime.clock import HybridClock, add_ms, compose
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.blocking_reader import BlockingReader
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.offsets import StoredOffset
from tidewal.spark_bridge.plan.open_plan import open_plan
from tidewal.spark_bridge.plan.read_plan import ReadPlan
from tidewal.spark_bridge.scan.scanner import scan_channel
from tidewal.spark_bridge.scan.topic_rows import TOPIC_COLUMNS

pytestmark = pytest.mark.parametrize(
    "backend",
    [
        "rocksmq-socket",
        pytest.param("kafka", marks=pytest.mark.broker),
        pytest.param("pulsar", marks=pytest.mark.broker),
    ],
    indirect=True,
)

NOON = compose(1_700_000_000_000)
Rows = list[dict[str, Any]]


def read(url: str, plan: ReadPlan, start: StoredOffset, end: StoredOffset) -> Rows:
    log = open_log(url)
    try:
        return rows_of(log, plan.tasks(start, end))
    finally:
        log.close()


def drained(url: str, plan: ReadPlan, at: StoredOffset, limits: MicroBatchLimits) -> tuple[list[Rows], StoredOffset]:
    """The batches up to what there is now, and where the last one ends."""
    upto, found = plan.newest(), list[Rows]()
    while upto is not None and (end := plan.next(at, upto, limits)) is not None:
        found.append(read(url, plan, at, end))
        at = end
    return found, at


async def test_plain_entries_are_read_once_and_by_time(backend: Any) -> None:
    wal: Wal = await backend.wal()
    for channel in ("orders", "clicks", "by-dev-own"):
        await wal.create_channel(channel, ChannelPolicy())
    written: dict[str, list[bytes]] = {"orders": [], "clicks": []}

    async def write(numbers: range) -> None:
        for number in numbers:
            channel, value, ts = ("orders", "clicks")[number % 2], b"%d" % number, NOON + (number << 18)
            record = encode(Record(RecordType.QUERY, ts, key=b"k", body=value))
            await wal.append(channel, record if number % 3 else value, ts)
            written[channel].append(value)

    await write(range(20))
    await wal.append("by-dev-own", b"", NOON)
    plan = open_plan(ReadOptions(backend.url, pattern="[a-z-]+", min_partitions=5))
    try:
        begin = await asyncio.to_thread(plan.begin)
        batches, at = await asyncio.to_thread(drained, backend.url, plan, begin, MicroBatchLimits(entries=6))
        assert [len(batch) for batch in batches] == [6, 6, 6, 2]
        await write(range(20, 30))
        more, at = await asyncio.to_thread(drained, backend.url, plan, at, MicroBatchLimits())
        assert values([*batches, *more]) == written
        assert values([await asyncio.to_thread(read, backend.url, plan, begin, at)]) == written
    finally:
        await asyncio.to_thread(plan.close)
    times = ReadOptions(backend.url, topics=("orders",), starting_time=NOON + (4 << 18), ending_time=NOON + (9 << 18))
    found = await asyncio.to_thread(all_rows, backend.url, times)
    assert [row["value"] for row in found] == [b"4", b"6", b"8"]
    assert [row["_ts"] for row in found] == [NOON + (number << 18) for number in (4, 6, 8)]


def all_rows(url: str, options: ReadOptions) -> Rows:
    plan, log = open_plan(options), open_log(url)
    try:
        return rows_of(log, plan.all_tasks())
    finally:
        plan.close()
        log.close()


def rows_of(log: BlockingReader, tasks: Iterable[Any]) -> Rows:
    batches = [batch for task in tasks for batch in scan_channel(log, task, tuple(TOPIC_COLUMNS))]
    return [row for batch in batches for row in batch.to_pylist()]


async def test_what_retention_has_removed_is_told_and_not_waited_for(backend: Any) -> None:
    """All entries of a topic go, and none comes: a read that was planned before tells so, one that is planned
    afterwards has nothing to read."""
    wal: Wal = await backend.wal()
    await wal.create_channel("orders", ChannelPolicy())
    for number in range(4):
        await wal.append("orders", b"%d" % number, NOON + number)
    strict, lax = (ReadOptions(backend.url, topics=("orders",), fail_on_data_loss=strict) for strict in (True, False))
    plans = [open_plan(options) for options in (strict, lax)]
    log = open_log(backend.url)
    try:
        before = [await asyncio.to_thread(plan.all_tasks) for plan in plans]
        await backend.remove_all(wal, "orders")
        [strictly, laxly] = before
        with pytest.raises(PositionLost, match="removed rows of orders that were not read yet"):
            await asyncio.to_thread(rows_of, log, strictly)
        assert await asyncio.to_thread(rows_of, log, laxly) == []
        for plan in plans:
            assert await asyncio.to_thread(rows_of, log, await asyncio.to_thread(plan.all_tasks)) == []
    finally:
        for each in (*plans, log):
            await asyncio.to_thread(each.close)


def values(batches: list[Rows]) -> Mapping[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for batch in batches:
        for row in batch:
            found.setdefault(row["_channel"], []).append(row["value"])
    return found


async def test_lines_across_what_an_owner_writes(backend: Any, rng: random.Random) -> None:
    wal: Wal = await backend.wal()
    names, clock = Names(), HybridClock()
    await wal.create_channel(names.heartbeats, ChannelPolicy(ephemeral=True))
    for channel in ("a", "b"):
        await wal.create_channel(channel, ChannelPolicy())
    limit = add_ms(clock.now(), 3_600_000)
    owner = ChannelOwner(wal, clock, heartbeat_channel=names.heartbeats)
    await owner.acquire_all([ChannelGrant(channel, 1, 0, limit) for channel in ("a", "b")])
    for channel in ("a", "b"):
        owner.activate(channel, 1)
    written: list[tuple[int, str, bytes]] = []

    async def write(channel: str, count: int) -> None:
        bodies = [b"%d" % rng.randrange(10**9) for _ in range(count)]
        appended = await owner.append([(channel, Record(RecordType.QUERY, body=body)) for body in bodies])
        written.extend((appended.ts, channel, body) for body in bodies)

    options = ReadOptions(backend.url, topics=("a", "b"), consistency="tick", min_partitions=4)
    plan = open_plan(options)
    try:
        at = await asyncio.to_thread(plan.begin)
        found: Rows = []
        for busy in ("a", "b", "ab"):
            for _ in range(6):
                await write(rng.choice(busy), rng.randrange(1, 4))
            await owner.tick_now()  # stored in the busy channels, announced for the idle one
            await heard(wal, names.heartbeats, written[-1][0])
            batches, at = await asyncio.to_thread(drained, backend.url, plan, at, MicroBatchLimits(entries=7))
            found += [row for batch in batches for row in batch]
            assert at["t"] >= written[-1][0]
            assert sorted((row["_ts"], row["_channel"], row["value"]) for row in found) == sorted(written)
        # all of one goes, and a driver that begins anew goes on by what the owner announces
        await backend.remove_all(wal, "a")
        await asyncio.to_thread(plan.close)
        plan = open_plan(options)
        await write("b", 3)
        await owner.tick_now()
        await heard(wal, names.heartbeats, written[-1][0])
        batches, at = await asyncio.to_thread(drained, backend.url, plan, at, MicroBatchLimits())
        assert [row["value"] for batch in batches for row in batch] == [body for _, _, body in written[-3:]]
    finally:
        await asyncio.to_thread(plan.close)
        await owner.close()


async def heard(wal: Wal, channel: str, time: int) -> None:
    """Wait until a heartbeat of that time or later is in the log."""
    async with asyncio.timeout(20):
        while await wal.id_at(channel, time) is None:  # noqa: ASYNC110 -- no event tells it
            await asyncio.sleep(0.01)
