"""The door: rows per second through the public client, and how soon a strong read sees a write.

    python -m benchmarks.proxy [--seconds 3]

Rows go through `Client.apply` into a collection with 2 shards on the embedded log, 1,000 a batch, 8 batches in flight,
each acknowledged when it is durable; all roles run in the same process, as in a standalone node. `beside` has the
same rows as Python dicts, and a bare `write` + `fdatasync` of the same bytes, batch by batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import uvloop

from benchmarks.report import figure
from examples.flights import flights
from tidewal.actors.client import Client
from tidewal.actors.rows import Rows
from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.rows.schema import CollectionSchema, Field

BATCH_ROWS = 1_000
IN_FLIGHT = 8
ROUNDS = 5
READS = 400

Batches = Callable[[], Iterator[object]]


def narrow_batches() -> list[pa.RecordBatch]:
    """Flight rows, as the demo writes them."""
    return list(flights.batches(flights.events(flights.load(), 200_000), BATCH_ROWS))


def narrow_schema() -> CollectionSchema:
    fields = tuple(Field(name, kind, nullable) for name, kind, nullable in flights.SCHEMA)
    return CollectionSchema("narrow", fields, flights.PRIMARY_KEY)


def vector_batches() -> list[pa.RecordBatch]:
    """A key and 128 floats."""
    random = np.random.default_rng(7)
    keys = count()
    batches: list[pa.RecordBatch] = []
    for _ in range(100):
        values = pa.array(random.random(BATCH_ROWS * 128, dtype=np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(values, 128)
        ids = pa.array([next(keys) for _ in range(BATCH_ROWS)], pa.int64())
        ops = pa.array(["insert"] * BATCH_ROWS)
        batches.append(pa.record_batch({"id": ids, "vector": vectors, "_op": ops}))
    return batches


def vector_schema() -> CollectionSchema:
    return CollectionSchema("vec128", (Field("id", "int64"), Field("vector", "float_vector", dim=128)), "id")


async def write(client: Client, collection: str, batches: Sequence[Rows], seconds: float) -> float:
    """Write batches round and round for a time, `IN_FLIGHT` at once; rows per second."""
    source = count()
    rows = 0
    started = time.perf_counter()

    async def one_after_another() -> None:
        nonlocal rows
        while time.perf_counter() - started < seconds:
            batch = batches[next(source) % len(batches)]
            try:
                written = await client.apply(collection, batch)
            except Overloaded:
                await asyncio.sleep(0.005)
            else:
                rows += written.rows

    await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
    return rows / (time.perf_counter() - started)


def raw(directory: str, batch: pa.RecordBatch, seconds: float) -> float:
    """Rows per second of a bare write and sync of each batch's bytes, into blocks already written."""
    data = bytes(batch.serialize())
    path = Path(directory) / "raw"
    path.write_bytes(bytes(len(data) * 64))
    file = os.open(path, os.O_WRONLY)
    os.fsync(file)
    started, batches = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        os.pwrite(file, data, batches % 64 * len(data))
        os.fdatasync(file)
        batches += 1
    os.close(file)
    return batches * batch.num_rows / (time.perf_counter() - started)


async def strong_reads(client: Client, collection: str, batches: list[pa.RecordBatch], rate: float) -> list[float]:
    """Milliseconds from an acknowledged insert to a strong read that sees it, under a load of `rate` rows/s."""
    stop = False

    async def load() -> None:
        source = count()
        started, sent = time.perf_counter(), 0
        running: set[asyncio.Task[object]] = set()
        while not stop:
            due = int((time.perf_counter() - started) * rate / BATCH_ROWS)
            while sent < due and len(running) < IN_FLIGHT:
                task = asyncio.create_task(client.apply(collection, batches[next(source) % len(batches)]))
                running.add(task)
                task.add_done_callback(running.discard)
                sent += 1
            await asyncio.sleep(0.001)
        await asyncio.gather(*running, return_exceptions=True)

    loader = asyncio.create_task(load())
    latencies_ms: list[float] = []
    row = batches[0].slice(0, 1).to_pylist()[0]
    for number in range(READS):
        key = f"probe-{number}"
        await client.apply(collection, [{**row, "id": key, "_op": "insert"}])
        acknowledged = time.perf_counter()
        found = await client.get(collection, [key], columns=["id"], consistency="strong")
        latencies_ms.append((time.perf_counter() - acknowledged) * 1000)
        assert found.table.num_rows == 1, "a strong read missed an acknowledged insert"
        await asyncio.sleep(0.003)
    stop = True
    await loader
    return latencies_ms


async def rounds(client: Client, collection: str, batches: list[Rows], seconds: float) -> list[float]:
    await write(client, collection, batches, 0.5)
    rates: list[float] = []
    for _ in range(ROUNDS):
        rates.append(await write(client, collection, batches, seconds))
        await client.flush(collection)
    return rates


async def main(seconds: float) -> None:
    narrow, wide = narrow_batches(), vector_batches()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIDEWAL_BENCH_DIR")) as directory:
        wal = await open_wal(f"rocksmq://{directory}/log", own=True)
        async with Standalone(wal, f"{directory}/tables") as node, node.client() as client:
            await client.create_collection(narrow_schema(), shards=2)
            await client.create_collection(vector_schema(), shards=2)
            rates = await rounds(client, "narrow", list(narrow), seconds)
            capacity = statistics.median(rates)
            dicts: list[Rows] = [batch.to_pylist() for batch in narrow[:20]]
            beside = {
                "dicts_rows_per_s": round(await write(client, "narrow", dicts, seconds)),
                "raw_write_fdatasync_rows_per_s": round(await asyncio.to_thread(raw, directory, narrow[0], 1.0)),
            }
            figure("proxy.insert.narrow", capacity, "rows/s", spread=(min(rates), max(rates)), beside=beside)
            await client.flush("narrow")
            latencies_ms = sorted(await strong_reads(client, "narrow", narrow, capacity / 2))
            p50, p99 = latencies_ms[len(latencies_ms) // 2], latencies_ms[int(len(latencies_ms) * 0.99)]
            spread = (latencies_ms[0], latencies_ms[-1])
            figure(
                "proxy.strong_read.p50_ms",
                p50,
                "ms",
                spread=spread,
                beside={"p99_ms": p99, "load_rows_per_s": capacity / 2},
            )
            rates = await rounds(client, "vec128", list(wide), seconds)
            beside = {"raw_write_fdatasync_rows_per_s": round(await asyncio.to_thread(raw, directory, wide[0], 1.0))}
            figure(
                "proxy.insert.vec128",
                statistics.median(rates),
                "rows/s",
                spread=(min(rates), max(rates)),
                beside=beside,
            )
        await wal.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round")
    uvloop.run(main(parser.parse_args().seconds))
