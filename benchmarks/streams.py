"""Keyed state and windows beside Bytewax: a word count and a windowed average.

    python -m benchmarks.streams [--rows 200000] [--rounds 5]

Both get the same Python objects from a list in memory, in batches of 1,000, on one worker (one thread of one process),
with recovery on: Bytewax writes its snapshots to a recovery store on disk at the end of each epoch, Tidewal its
changelog and its position to a RocksMQ on the same disk, synced, at each commit; epochs and commits are a second apart,
and one more is taken at the end, which is part of the time. Tidewal's list becomes entries of batches within the time,
as a member of a group delivers them. What both have made is compared.

`rows` handles each row by itself; `batches` lets C count a batch of words first (`Counter`, `merge`). Bytewax has its
documented operators, which are called per item (`count_final`, `fold_window`); beside them, for the word count,
`batches` has the same `Counter` per batch (`flat_map_batch`), whose partial counts are then added (`stateful_batch`).
`log` is the same program over a real group whose input is in the log, packed with msgpack.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import bytewax.operators as op
import msgpack
import uvloop
from bytewax.dataflow import Dataflow
from bytewax.operators.windowing import EventClock, TumblingWindower, fold_window
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSource, run_main

import tidewal
from benchmarks.report import Rounds, figure, interleaved, per_second
from tidewal.adapters.rocksmq import open_wal
from tidewal.runtime import Append, ChannelPolicy, Delivered, Entry, KeyedHandler

BATCH = 1_000
WORDS_A_LINE = 8
VOCABULARY = 20_000
SENSORS = 200
READINGS_MS = 3  # between two readings, about
WINDOW = timedelta(seconds=10)
DISORDER = timedelta(seconds=10)  # long enough that no stall of the machine makes rows late for Bytewax
EVERY_S = 1.0  # between two epochs, and two commits
START_MS = 1_767_225_600_000

Reading = tuple[str, int, float, datetime]


def make_lines(count: int) -> list[str]:
    """Lines of words, some of which are much more frequent than others."""
    source = random.Random(7)
    words = [f"word{number}" for number in range(VOCABULARY)]
    weights = [1 / (number + 1) for number in range(VOCABULARY)]
    drawn = source.choices(words, weights, k=count * WORDS_A_LINE)
    return [" ".join(drawn[at : at + WORDS_A_LINE]) for at in range(0, len(drawn), WORDS_A_LINE)]


def make_readings(count: int) -> list[Reading]:
    """Readings of sensors, out of order by less than a second; with their times in ms and, as Bytewax wants them,
    as datetimes."""
    source = random.Random(8)
    readings: list[Reading] = []
    for number in range(count):
        at = START_MS + number * READINGS_MS + source.randrange(900)
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)
        readings.append((f"sensor{source.randrange(SENSORS)}", at, source.random() * 30, moment))
    return readings


def empty() -> tuple[int, float]:
    """The count and the sum of no readings."""
    return 0, 0.0


# ---- Bytewax --------------------------------------------------------------------------------------------------------


class Sink(DynamicSink[Any]):
    """Gives each batch to a function."""

    def __init__(self, take: Callable[[list[Any]], object]) -> None:
        self._take = take

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSinkPartition[Any]:
        partition = _SinkPartition()
        partition.take = self._take
        return partition


class _SinkPartition(StatelessSinkPartition[Any]):
    take: Callable[[list[Any]], object]

    def write_batch(self, items: list[Any]) -> None:
        self.take(items)


def run_bytewax(flow: Dataflow) -> None:
    with tempfile.TemporaryDirectory() as directory:
        init_db_dir(Path(directory), 1)
        run_main(flow, epoch_interval=timedelta(seconds=EVERY_S), recovery_config=RecoveryConfig(directory))


def bytewax_words(lines: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    flow = Dataflow("words")
    stream = op.input("in", flow, TestingSource(lines, BATCH))
    words = op.flat_map("split", stream, str.split)
    op.output("out", op.count_final("count", words, lambda word: word), Sink(counts.update))
    run_bytewax(flow)
    return counts


class AddCounts(op.StatefulBatchLogic[int, int, int]):
    """Adds partial counts of one word."""

    def __init__(self, state: int | None) -> None:
        self.count = state or 0

    def on_batch(self, values: list[int]) -> tuple[Iterable[int], bool]:
        self.count += sum(values)
        return (), False

    def on_eof(self) -> tuple[Iterable[int], bool]:
        return (self.count,), True

    def snapshot(self) -> int:
        return self.count


def bytewax_words_batches(lines: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    flow = Dataflow("words")
    stream = op.input("in", flow, TestingSource(lines, BATCH))
    partial = op.flat_map_batch("split", stream, lambda batch: Counter(" ".join(batch).split()).items())
    op.output("out", op.stateful_batch("count", partial, AddCounts), Sink(counts.update))
    run_bytewax(flow)
    return counts


def bytewax_average(readings: list[Reading]) -> int:
    closed: list[Any] = []
    flow = Dataflow("average")
    stream = op.key_on("key", op.input("in", flow, TestingSource(readings, BATCH)), lambda reading: reading[0])
    clock = EventClock(ts_getter=operator.itemgetter(3), wait_for_system_duration=DISORDER)
    windower = TumblingWindower(length=WINDOW, align_to=datetime(2026, 1, 1, tzinfo=UTC))
    windows = fold_window(
        "average",
        stream,
        clock,
        windower,
        builder=empty,
        folder=lambda sum, reading: (sum[0] + 1, sum[1] + reading[2]),
        merger=lambda one, other: (one[0] + other[0], one[1] + other[1]),
        ordered=False,
    )
    op.output("out", windows.down, Sink(closed.extend))
    run_bytewax(flow)
    return sum(value[1][0] for _, value in closed)


# ---- Tidewal --------------------------------------------------------------------------------------------------------


class ListMember:
    """A member of a group whose channel is a list in memory. Commits go to the log. Stops the program behind the
    last item."""

    id = group = "list"

    def __init__(self, wal: tidewal.Wal, items: list[Any], stop: asyncio.Event) -> None:
        self._wal, self._items, self._stop = wal, items, stop
        self._at = 0
        self.channels = frozenset({"in"})

    def __aiter__(self) -> ListMember:
        return self

    async def __anext__(self) -> Delivered:
        items = self._items[self._at : self._at + BATCH]
        if not items:
            self._stop.set()
            await asyncio.Event().wait()
        self._at += BATCH
        return Delivered("in", [Entry(b"", 0, item) for item in items], 1)

    def metadata(self, channel: str) -> bytes:
        return b""

    def redeliver(self, delivered: Delivered) -> None: ...

    async def commit(
        self, delivered: Sequence[Delivered], outputs: Sequence[Append], *, metadata: dict[str, bytes]
    ) -> list[bytes]:
        position = msgpack.packb((self._at, metadata["in"]))
        return (await self._wal.append_many([*outputs, Append("positions", cast(bytes, position))]))[:-1]


def run_tidewal(items: list[Any], handle: KeyedHandler) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with await open_wal(f"rocksmq://{directory}/log") as wal:
                await wal.create_channel("positions", ChannelPolicy())
                stop = asyncio.Event()
                member = cast(Any, ListMember(wal, items, stop))
                await tidewal.process_keyed(wal, member, handle, "bench", commit_interval_s=EVERY_S, stop=stop)

    uvloop.run(run())


def tidewal_words(lines: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}

    async def count(delivered: Delivered, state: tidewal.KeyedState) -> list[Append]:
        nonlocal counts
        table: tidewal.KeyedTable[str, int] = state.table("counts")
        for entry in delivered.entries:
            for word in cast(str, entry.payload).split():
                table[word] = table.get(word, 0) + 1
        counts = table.data
        return []

    run_tidewal(lines, count)
    return counts


def tidewal_words_batches(lines: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}

    async def count(delivered: Delivered, state: tidewal.KeyedState) -> list[Append]:
        nonlocal counts
        table: tidewal.KeyedTable[str, int] = state.table("counts")
        table.merge(Counter(" ".join([cast(str, entry.payload) for entry in delivered.entries]).split()), operator.add)
        counts = table.data
        return []

    run_tidewal(lines, count)
    return counts


def averages() -> tidewal.Windowed[str, float, tuple[int, float]]:
    return tidewal.Windowed(
        "average",
        tidewal.tumbling(WINDOW),
        new=empty,
        add=lambda sum, value: (sum[0] + 1, sum[1] + value),
        disorder=DISORDER,
    )


def tidewal_average(readings: list[Reading]) -> int:
    average, found = averages(), 0
    last: tidewal.KeyedState | None = None

    async def close(delivered: Delivered, state: tidewal.KeyedState) -> list[Append]:
        nonlocal found, last
        rows = [cast(Any, entry.payload)[:3] for entry in delivered.entries]
        closed, late = average.update(state, rows)
        assert not late
        found += sum(result.value[0] for result in closed)
        last = state
        return []

    run_tidewal(readings, close)
    assert last is not None
    return found + sum(result.value[0] for result in average.update(last, [], 1 << 62).results)


async def _from_log(payloads: list[bytes], handle: KeyedHandler, stop: asyncio.Event) -> float:
    with tempfile.TemporaryDirectory() as directory:
        async with await open_wal(f"rocksmq://{directory}/log") as wal:
            await wal.create_channel("in", ChannelPolicy())
            for at in range(0, len(payloads), BATCH):
                await wal.append_many([Append("in", payload) for payload in payloads[at : at + BATCH]])
            began_s = asyncio.get_running_loop().time()
            member = await wal.join("bench", ["in"])
            await tidewal.process_keyed(wal, member, handle, "bench", commit_interval_s=EVERY_S, stop=stop)
            took_s = asyncio.get_running_loop().time() - began_s
            await member.aclose()
            return len(payloads) / took_s


def words_from_log(payloads: list[bytes]) -> float:
    """Lines per second of the word count, row by row, with a group whose input is in the log."""
    stop, seen = asyncio.Event(), 0

    async def count(delivered: Delivered, state: tidewal.KeyedState) -> list[Append]:
        nonlocal seen
        table: tidewal.KeyedTable[str, int] = state.table("counts")
        for entry in delivered.entries:
            for word in msgpack.unpackb(entry.payload).split():
                table[word] = table.get(word, 0) + 1
        seen += len(delivered.entries)
        if seen == len(payloads):
            stop.set()
        return []

    return uvloop.run(_from_log(payloads, count, stop))


def average_from_log(payloads: list[bytes]) -> float:
    """Readings per second of the windowed average, the same way."""
    average, stop, seen = averages(), asyncio.Event(), 0

    async def close(delivered: Delivered, state: tidewal.KeyedState) -> list[Append]:
        nonlocal seen
        average.update(state, [msgpack.unpackb(entry.payload) for entry in delivered.entries])
        seen += len(delivered.entries)
        if seen == len(payloads):
            stop.set()
        return []

    return uvloop.run(_from_log(payloads, close, stop))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="lines, and readings")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: int = arguments.rows
    lines, readings = make_lines(rows), make_readings(rows)
    packed_lines = [cast(bytes, msgpack.packb(line)) for line in lines]
    packed_readings = [cast(bytes, msgpack.packb(reading[:3])) for reading in readings]
    expected = dict(Counter(" ".join(lines).split()))

    cpu_us: dict[str, list[float]] = {}

    def rate(work: Callable[[list[Any]], object], items: list[Any], result: object) -> Callable[[], float]:
        def run() -> float:
            found: list[object] = []
            began_s = time.process_time()
            value = per_second(rows, lambda: found.append(work(items)))
            cpu_us.setdefault(work.__name__, []).append((time.process_time() - began_s) / rows * 1e6)
            assert found == [result], f"{work.__name__} is wrong"
            return value

        return run

    rates = interleaved(
        {
            "words": rate(tidewal_words, lines, expected),
            "words.bytewax": rate(bytewax_words, lines, expected),
            "words.batches": rate(tidewal_words_batches, lines, expected),
            "words.batches.bytewax": rate(bytewax_words_batches, lines, expected),
            "words.log": lambda: words_from_log(packed_lines),
            "average": rate(tidewal_average, readings, rows),
            "average.bytewax": rate(bytewax_average, readings, rows),
            "average.log": lambda: average_from_log(packed_readings),
        },
        rounds=arguments.rounds,
    )
    cpu = {name: statistics.median(values[1:]) for name, values in cpu_us.items()}  # the first one warms up
    report("streams.word_count.rows", "lines/s", rates["words"], rates["words.bytewax"], cpu, "words")
    report(
        "streams.word_count.batches",
        "lines/s",
        rates["words.batches"],
        rates["words.batches.bytewax"],
        cpu,
        "words_batches",
    )
    report("streams.word_count.log", "lines/s", rates["words.log"], rates["words.bytewax"])
    report("streams.windowed_average.rows", "readings/s", rates["average"], rates["average.bytewax"], cpu, "average")
    report("streams.windowed_average.log", "readings/s", rates["average.log"], rates["average.bytewax"])


def report(
    name: str, unit: str, ours: Rounds, bytewax: Rounds, cpu: Mapping[str, float] | None = None, work: str = ""
) -> None:
    """One figure beside Bytewax', and the CPU of both for each row, in microseconds."""
    ratios = [one / other for one, other in zip(ours.values, bytewax.values, strict=True)]
    beside: dict[str, float | str] = {"bytewax": bytewax.median, "ratio": statistics.median(ratios)}
    beside |= {"lowest_ratio": min(ratios), "highest_ratio": max(ratios)}
    if cpu is not None:
        beside |= {"cpu_us": cpu[f"tidewal_{work}"], "bytewax_cpu_us": cpu[f"bytewax_{work}"]}
    figure(name, ours.median, unit, ours.spread, beside)


if __name__ == "__main__":
    main()
