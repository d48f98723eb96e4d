"""What a collection costs, with few and with many of them on one standalone node.

    python -m benchmarks.collections [--counts 1,100,1000] [--seconds 10] [--rows 100000]

`tidewal run` on an embedded log gets collections of 2 shards up to each of the counts, one after another. With each
count `collections.create.p50_ms` is the time of the last creations that led to it. `collections.idle_cpu_percent` is
what the node uses of a core while nothing is asked of it, `collections.idle_entries` what it stores meanwhile in
channels that are not ephemeral, `collections.memory_kib` what its memory has grown by for each collection beyond the
first count. `collections.row_us` is the CPU of the node for a row that is written to one collection beside the others
and stored in its table, `collections.start_s` the time from the start of the process until the last collection answers
a strong read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from benchmarks.cluster import running
from benchmarks.report import figure
from tidewal import connect
from tidewal.actors.client import Client
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import FromId, Wal
from tidewal.runtime.rows.schema import CollectionSchema, Field

SHARDS = 2
WRITTEN = "written"  # the collection that gets rows
BATCH_ROWS = 1_000
TIMED = 50  # creations
ROUNDS = 3
QUIET_S = 8.0  # until what a start or the last creations have left to do is done
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def name_of(number: int) -> str:
    return f"collection_{number}"


def schema_of(number: int) -> CollectionSchema:
    return CollectionSchema(name_of(number), (Field("id", "int64"), Field("value", "double")), "id")


def cpu_s(process: int) -> float:
    """The CPU that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_kib(process: int) -> int:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def ends(wal: Wal) -> dict[str, bytes]:
    """The last entry of each channel that is stored."""
    found: dict[str, bytes] = {}
    for channel in await wal.channels():
        described = await wal.describe(channel)
        if not described.policy.ephemeral:
            found[channel] = described.latest_id or b""
    return found


async def entries_since(wal: Wal, before: dict[str, bytes]) -> dict[str, int]:
    """How many entries each channel has got since it ended at `before`; only those that have got any."""
    counts: dict[str, int] = {}
    for channel, end in (await ends(wal)).items():
        seen = before.get(channel, b"")
        if end != seen:
            counts[channel] = 0
            async for entries in wal.read(channel, FromId(seen)):
                counts[channel] += sum(entry.id <= end for entry in entries)
                if entries[-1].id >= end:
                    break
    return counts


async def create(client: Client, numbers: Sequence[int]) -> list[float]:
    """Create collections one after another; the ms that each took."""
    times: list[float] = []
    for number in numbers:
        began = time.perf_counter()
        await client.create_collection(schema_of(number), shards=SHARDS)
        times.append((time.perf_counter() - began) * 1000)
    return times


async def row_us(client: Client, process: int, rows: int) -> float:
    """The CPU of the node in µs for each of `rows` rows in a new collection, flushed. It is dropped behind that, for
    the next count is compared by memory."""
    await client.create_collection(replace(schema_of(0), name=WRITTEN), shards=SHARDS)
    began = cpu_s(process)
    for start in range(0, rows, BATCH_ROWS):
        keys = pa.array(range(start, start + BATCH_ROWS), pa.int64())
        ops = pa.array(["insert"] * BATCH_ROWS)
        batch = pa.record_batch({"id": keys, "value": keys.cast(pa.float64()), "_op": ops})
        await client.apply(WRITTEN, batch)
    await client.flush(WRITTEN)
    spent = cpu_s(process) - began
    await client.drop_collection(WRITTEN)
    return spent / rows * 1e6


async def idle(directory: Path, process: int, seconds: float, count: int) -> None:
    """What the node does while nothing is asked of it."""
    async with await open_wal(f"rocksmq://{directory}/log") as wal:
        await asyncio.sleep(QUIET_S)
        before, percents = await ends(wal), []
        for _ in range(ROUNDS):
            began, spent = time.perf_counter(), cpu_s(process)
            await asyncio.sleep(seconds)
            percents.append((cpu_s(process) - spent) / (time.perf_counter() - began) * 100)
        stored = await entries_since(wal, before)
    figure(
        f"collections.idle_cpu_percent.{count}",
        statistics.median(percents),
        "% of a core",
        spread=(min(percents), max(percents)),
    )
    beside = {channel: float(entries) for channel, entries in stored.items()}
    figure(f"collections.idle_entries.{count}", sum(stored.values()), f"in {ROUNDS * seconds:g} s", beside=beside)


async def start(directory: Path, count: int) -> None:
    """How long a start with `count` collections takes."""
    began = time.perf_counter()
    with running(directory) as node:
        ready_s = time.perf_counter() - began
        async with connect(directory, deadline_s=600) as client:
            await client.count(name_of(count - 1), consistency="strong", deadline_s=600)
            answered_s = time.perf_counter() - began
        process = int(node["pid"])
        beside = {"ready_s": ready_s, "cpu_s": cpu_s(process), "memory_kib": float(memory_kib(process))}
    figure(f"collections.start_s.{count}", answered_s, "s", beside=beside)


async def measure(directory: Path, counts: Sequence[int], seconds: float, rows: int) -> None:
    created = 0
    base: tuple[int, int] | None = None  # the first count, and the memory with it
    for count in counts:
        with running(directory) as node:
            process = int(node["pid"])
            async with connect(directory, deadline_s=600) as client:
                times = await create(client, range(created, count))
                created = count
                last = sorted(times[-TIMED:])
                figure(f"collections.create.p50_ms.{count}", statistics.median(last), "ms", spread=(last[0], last[-1]))
            await idle(directory, process, seconds, count)
            memory = memory_kib(process)
            base = base or (count, memory)
            beside = {"process_kib": float(memory)}
            if count > base[0]:
                figure(f"collections.memory_kib.{count}", (memory - base[1]) / (count - base[0]), "KiB", beside=beside)
            async with connect(directory, deadline_s=600) as client:
                costs = [await row_us(client, process, rows) for _ in range(ROUNDS)]
                figure(f"collections.row_us.{count}", statistics.median(costs), "µs", spread=(min(costs), max(costs)))
        await start(directory, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="1,100,1000", help="numbers of collections, rising")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one idle round")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of one round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as scratch:
        counts = [int(each) for each in arguments.counts.split(",")]
        asyncio.run(measure(Path(scratch) / "node", counts, arguments.seconds, arguments.rows))
