"""Strong reads of a node whose log is on brokers: from an acknowledged insert to a read that sees it.

Every question and answer travels through the log, as does the QueryNode's own question to the owner of the channels:
four appends, each of which a reader waits for.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.proxy import BATCH_ROWS, READS, narrow_batches, narrow_schema, strong_reads
from benchmarks.report import figure
from tidewal.actors.standalone import Standalone
from tidewal.runtime.log.opening import open_wal

LOAD_ROWS_PER_S = 50 * BATCH_ROWS


async def _measure(name: str, url: str, directory: Path) -> None:
    wal = await open_wal(url)
    async with Standalone(wal, directory) as node, node.client() as client:
        await client.create_collection(narrow_schema(), shards=2)
        batches = narrow_batches()
        await strong_reads(client, "narrow", batches, 0)  # warms up
        before = resource.getrusage(resource.RUSAGE_SELF)
        quiet_ms = sorted(await strong_reads(client, "narrow", batches, 0))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        loaded_ms = sorted(await strong_reads(client, "narrow", batches, LOAD_ROWS_PER_S))
        beside = {"p99_ms": _at(quiet_ms, 0.99), "cpu_us_with_its_insert": spent_s / READS * 1e6}
        figure(f"{name}.strong_read.p50_ms", _at(quiet_ms, 0.5), "ms", (quiet_ms[0], quiet_ms[-1]), beside)
        beside = {"p99_ms": _at(loaded_ms, 0.99), "load_rows_per_s": LOAD_ROWS_PER_S}
        spread = loaded_ms[0], loaded_ms[-1]
        figure(f"{name}.strong_read.loaded.p50_ms", _at(loaded_ms, 0.5), "ms", spread, beside)
    await wal.close()


def _at(sorted_ms: Sequence[float], share: float) -> float:
    return sorted_ms[int(len(sorted_ms) * share)]


def main(name: str, url: str) -> None:
    """Run a node on the log at `url`; `name` begins the names of the figures."""
    with tempfile.TemporaryDirectory() as directory:
        uvloop.run(_measure(name, url, Path(directory)))
