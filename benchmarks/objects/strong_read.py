"""A strong read of a node on object storage, beside the time that the store takes to create an object."""

from __future__ import annotations

import statistics
import time

from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.runtime.rows.schema import CollectionSchema, Field

from ..report import figure
from ..wal.limits import KIB
from .stores import Bench

READS = 60


def measure(bench: Bench) -> None:
    bench.run(_measure(bench))


async def _measure(bench: Bench) -> None:
    bare, body = bench.bare(), bytes(4 * KIB)
    puts_ms: list[float] = []
    async with (
        bench.log(ObjectsSettings()) as (wal, _),
        Standalone(wal, str(bench.directory / "tables")) as node,
        node.client() as client,
    ):
        await client.create_collection(CollectionSchema("orders", (Field("id", "int64"),), "id"), shards=2)
        reads_ms = []
        for number in range(READS):
            reads_ms.append(await _read_ms(client, number))
            began = time.perf_counter()
            await bare.put_async(str(number), body, mode="create", use_multipart=False)
            puts_ms.append((time.perf_counter() - began) * 1000)
    p50, put_p50 = statistics.median(reads_ms), statistics.median(puts_ms)
    beside = {"p50_ms": p50, "worst_ms": max(reads_ms), "put_p50_ms": put_p50, "store": bench.name}
    figure("objects.strong_read.p50", p50 / put_p50, "ratio to a bare PUT", beside=beside)


async def _read_ms(client: Client, number: int) -> float:
    """Milliseconds from an acknowledged insert to the strong read that sees it."""
    await client.insert("orders", [{"id": number}])
    began = time.perf_counter()
    found = await client.get("orders", [number], consistency="strong")
    took_ms = (time.perf_counter() - began) * 1000
    assert found.table.num_rows == 1, "a strong read missed an acknowledged insert"
    return took_ms
