"""Sequential reads of what memory has forgotten, beside bare `pread`s of as many bytes from the page cache."""

from __future__ import annotations

import os

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.adapters.rocksmq.client.blocking_client import BlockingClient
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

from ..report import interleaved, per_second, ratio
from .limits import KIB, MIB, SEGMENT_BYTES, Bench

SIZE = 128 * MIB
CASES = (("64KiB", 64 * KIB, 16), ("64KiB.single", 64 * KIB, 1), ("1KiB", KIB, 64))  # bytes each, messages of a commit
TO_PREAD = "ratio to bare preads"


def measure(bench: Bench) -> None:
    for name, size, together in CASES:
        path = bench.path(f"history.{name}")
        store = bench.run(_written(path, size, together))
        try:
            _case(bench, store, name, size)
        finally:
            bench.run(store.close())


async def _written(path: str, size: int, together: int) -> RocksMQ:
    store = await RocksMQ.open(path, segment_bytes=SEGMENT_BYTES, free_space_bytes=0, tail_bytes=0)
    await store.create_channel("bench", ChannelPolicy())
    entries = [Append("bench", os.urandom(size)) for _ in range(together)]
    for _ in range(SIZE // size // together):
        await store.append_many(entries)
    return store


def _case(bench: Bench, store: RocksMQ, name: str, size: int) -> None:
    count = SIZE // size

    async def by_owner() -> None:
        reader, seen = store.read("bench", From.EARLIEST), 0
        while seen < count:
            seen += len(await anext(reader))

    def by_socket() -> None:
        with BlockingClient(store.directory) as client:
            assert sum(len(batch) for batch in client.read("bench", None)) >= count

    measured = interleaved(
        {
            "owner": lambda: per_second(count, lambda: bench.run(by_owner())),
            "socket": lambda: per_second(count, by_socket),
            "pread": lambda: per_second(count, lambda: bench.raw.read(SIZE)),
        }
    )
    for key, prefix in (("owner", "wal.read"), ("socket", "wal.read.socket")):
        each = measured[key].median
        ratio(f"{prefix}.{name}", measured[key], measured["pread"], TO_PREAD, messages_per_s=each,
              mb_per_s=each * size / 1e6, pread_mb_per_s=measured["pread"].median * size / 1e6)  # fmt: skip
