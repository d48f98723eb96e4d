"""What a flush to Delta Lake costs as the table grows, and what a compaction of a million row versions costs.

`delta.flush.500th_vs_20th`: the median of the flushes around the 500th over that around the 20th, each of 10,000 rows;
2 is the limit. `delta.compact.1m`: seconds to build the current table of 330,000 keys; 20 is the limit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import LogTable
from tidewal.benchmarks.report import figure
from tidewal.runtime.streams.messages import Position

VCHANNEL = "benchmark_v0"
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("tail", pa.string()),
        pa.field("delay", pa.float64()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("embedding", pa.list_(pa.float32(), 8)),
    ]
)
KEYS = 330_000
SEED = 20


def upserts(random: np.random.Generator, first_ts: int, count: int) -> pa.Table:
    """`count` versions of random keys, one in twenty a delete."""
    keys = random.integers(0, KEYS, count)
    stamps = np.arange(first_ts, first_ts + count)
    floats = pa.array(random.random(count * 8, dtype=np.float32))
    return pa.table(
        {
            "id": pa.array(keys),
            "tail": pa.array([f"N{key}" for key in keys % 5000]),
            "delay": pa.array(random.random(count)),
            "at": pa.array(stamps, pa.timestamp("us", tz="UTC")),
            "embedding": pa.FixedSizeListArray.from_arrays(floats, 8),
            "_ts": pa.array(stamps),
            "_op": pa.array(np.where(random.random(count) < 0.05, 2, 1), pa.int8()),
            "_vchannel": pa.array([VCHANNEL] * count),
            "_term": pa.array(np.ones(count, dtype=np.int64)),
            "_cseq": pa.array(stamps),
            "_row": pa.array(np.zeros(count, dtype=np.int32)),
        }
    )


def position_at(end: int) -> Position:
    """Where the channel stands after `end` rows."""
    return Position("benchmark", end.to_bytes(8, "big"), term=1, cseq=end, timestamp=end, wal="memory")


def flush_times_ms(log: LogTable, flushes: int, rows: int) -> list[float]:
    """Flush `flushes` times, and return what each one took."""
    random = np.random.default_rng(SEED)
    taken: list[float] = []
    for number in range(flushes):
        start, end = number * rows, (number + 1) * rows
        table = upserts(random, start + 1, rows)
        began_s = time.perf_counter()
        log.flush(table, start={VCHANNEL: start}, end={VCHANNEL: end}, positions={VCHANNEL: position_at(end)})
        taken.append((time.perf_counter() - began_s) * 1000)
    return taken


def measure_flushes(root: Path, rows: int, suffix: str) -> None:
    """Compare the 500th flush with the 20th; the 32 around each include one with a checkpoint."""
    taken = flush_times_ms(LogTable.open(root / f"log{suffix}", SCHEMA, "id"), 516, rows)
    early, late = taken[4:36], taken[484:516]
    figure(
        f"delta.flush.500th_vs_20th{suffix}",
        statistics.median(late) / statistics.median(early),
        "times",
        beside={
            "20th_ms": round(statistics.median(early), 2),
            "500th_ms": round(statistics.median(late), 2),
            "mean_ratio_with_checkpoint": round(statistics.mean(late) / statistics.mean(early), 2),
            "slowest_ms": round(max(late), 1),
            "rows": rows,
        },
    )


def measure_compaction(root: Path) -> None:
    """Build the current table of a million versions, and read the same rows from the log."""
    log = LogTable.open(root / "log_1m", SCHEMA, "id")
    flush_times_ms(log, 20, 50_000)
    current = CurrentTable.open(root / "current", SCHEMA, "id")
    began_s = time.perf_counter()
    result = compact(log, current, 1_000_000)
    compacted_s = time.perf_counter()
    found = read_current_at(log, 1_000_000).to_table()
    read_s = time.perf_counter()
    if found.num_rows != result.rows:
        raise SystemExit(f"the log has {found.num_rows} current rows, the table {result.rows}")
    beside = {"rows": result.rows, "read_current_at_s": round(read_s - compacted_s, 2)}
    figure("delta.compact.1m", compacted_s - began_s, "s", beside=beside)


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(prefix="tidewal-flush-") as directory:
        measure_flushes(Path(directory), 10_000, "")
        measure_flushes(Path(directory), 100, ".small")
        measure_compaction(Path(directory))


if __name__ == "__main__":
    main()
