"""Reading a log from its beginning, nothing of it in memory, beside bare GETs of its blocks."""

from __future__ import annotations

import asyncio
import os

from obstore.store import S3Store

from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.log.wal import Append, From

from ..report import interleaved, per_second, ratio
from ..wal.limits import KIB, MIB
from .appends import AT_ONCE
from .stores import Bench, put_all

SIZE = 64 * MIB
CASES = (("64KiB", 64 * KIB), ("1KiB", KIB))
FORGETTING = ObjectsSettings(cache_bytes=1)
GETS_AT_ONCE = 16  # as a reader has them


def measure(bench: Bench) -> None:
    for name, size in CASES:
        _case(bench, name, size)


def _case(bench: Bench, name: str, size: int) -> None:
    count, prefix = SIZE // size, f"read-{name}"
    bodies = bench.run(_write(bench, prefix, size))
    bare = bench.bare()
    bench.run(put_all(bare, bodies))

    async def read_s() -> float:
        async with bench.log(FORGETTING, prefix, new=False) as (log, _):
            began = asyncio.get_running_loop().time()
            await _read(log, count)
            return asyncio.get_running_loop().time() - began

    measured = interleaved(
        {
            "log": lambda: count / bench.run(read_s()),
            "gets": lambda: per_second(count, lambda: bench.run(_get_all(bare, len(bodies)))),
        }
    )
    each = measured["log"].median
    ratio(f"objects.read.{name}", measured["log"], measured["gets"], "ratio to bare GETs of the blocks",
          messages_per_s=each, mb_per_s=each * size / 1e6, blocks=len(bodies))  # fmt: skip


async def _write(bench: Bench, prefix: str, size: int) -> list[bytes]:
    """Write a log; the bodies of its blocks."""
    entries = [Append("bench", os.urandom(size)) for _ in range(MIB // size)]
    async with bench.log(AT_ONCE, prefix) as (log, store):
        await asyncio.gather(*(log.append_many(entries) for _ in range(SIZE // MIB)))
        return store.bodies


async def _read(log: ObjectWal, count: int) -> None:
    seen = 0
    async for entries in log.read("bench", From.EARLIEST):
        seen += len(entries)
        if seen >= count:
            return


async def _get_all(store: S3Store, count: int) -> None:
    waiting = iter(range(count))

    async def one_after_another() -> None:
        for number in waiting:
            found = await store.get_async(str(number))
            await found.bytes_async()

    await asyncio.gather(*(one_after_another() for _ in range(GETS_AT_ONCE)))
