"""Many collections on a few pchannels: the node's dispatchers beside a reader for each collection and role.

    python -m benchmarks.dispatch [--records 4000] [--rounds 3] [--collections 1,25,200]

Each collection has two vchannels on 16 pchannels, and two streams, as DataNode and QueryNode have. The records, each of
`ROWS` rows, are spread over all collections, and appended to a log in memory while the streams read. A round ends when
each stream has handed out all of its collection. Rows count once, whoever reads them; the CPU time is the process'.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping

import uvloop

from benchmarks.report import figure, interleaved
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, Wal
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.streams.dispatched_stream import DispatchedStream
from tidewal.runtime.streams.dispatcher import Dispatchers
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.memory import MemoryWal

PCHANNELS = 16
SHARDS = 2
ROLES = ("datanode", "querynode")
ROWS = 50  # of a record
BODY = bytes(ROWS * 24)
BATCH = 64
BUFFER_BYTES = 64 * 1024 * 1024

NewStream = Callable[[Wal, Dispatchers, list[str]], TtMsgStream]


def vchannels_of(collection: int) -> list[str]:
    """The vchannels of a collection, on pchannels in turn."""
    return [f"p{(collection * SHARDS + shard) % PCHANNELS}_{collection}v{shard}" for shard in range(SHARDS)]


def dispatched(wal: Wal, dispatchers: Dispatchers, vchannels: list[str]) -> TtMsgStream:
    return DispatchedStream(wal, dispatchers, vchannels)


def alone(wal: Wal, _: Dispatchers, vchannels: list[str]) -> TtMsgStream:
    return TtMsgStream(wal, vchannels=vchannels)


class Log:
    """The records of all collections, in the order in which they are appended; the last ones are ticks."""

    def __init__(self, records: int, collections: int) -> None:
        self.entries: list[Append] = []
        self.end = records + PCHANNELS
        cseqs = dict.fromkeys((f"p{number}" for number in range(PCHANNELS)), 0)
        for ts in range(1, records + 1):
            vchannel = vchannels_of(ts % collections)[ts // collections % SHARDS]
            self._add(cseqs, vchannel.partition("_")[0], Record(RecordType.ROWS, ts, vchannel=vchannel, body=BODY))
        for channel in cseqs:
            self._add(cseqs, channel, Record(RecordType.TIME_TICK, self.end))

    def _add(self, cseqs: dict[str, int], channel: str, record: Record) -> None:
        cseqs[channel] += 1
        numbered = Record(
            record.type, record.ts, 1, cseqs[channel], vchannel=record.vchannel, tags={"rows": ROWS}, body=record.body
        )
        self.entries.append(Append(channel, encode(numbered), record.ts))


async def read_all(log: Log, collections: int, new_stream: NewStream) -> int:
    """Append the log and read it with all streams. Returns how many records they have handed out."""
    wal = MemoryWal()
    for number in range(PCHANNELS):
        await wal.create_channel(f"p{number}", ChannelPolicy())
    dispatchers = Dispatchers(wal, BUFFER_BYTES, Metrics())

    async def consume(vchannels: list[str]) -> int:
        stream = new_stream(wal, dispatchers, vchannels)
        stream.as_consumer(sorted({vchannel.partition("_")[0] for vchannel in vchannels}))
        found = 0
        async for pack in stream:
            found += len(pack)
            if pack.end_ts >= log.end:
                break
        await stream.close()
        return found

    readers = [
        asyncio.create_task(consume(vchannels_of(collection))) for collection in range(collections) for _ in ROLES
    ]
    for at in range(0, len(log.entries), BATCH):
        await wal.append_many(log.entries[at : at + BATCH])
        await asyncio.sleep(0)
    found = sum(await asyncio.gather(*readers))
    await wal.close()
    return found


def measure(records: int, collections: int, rounds: int) -> None:
    log = Log(records, collections)
    cpu_us: dict[str, list[float]] = {"dispatched": [], "alone": []}

    def candidate(name: str, new_stream: NewStream) -> float:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = uvloop.run(read_all(log, collections, new_stream))
        assert found == records * len(ROLES), "a stream missed a record, or had one twice"
        cpu_us[name].append((time.process_time() - began_cpu_s) * 1e6 / (records * ROWS))
        return records * ROWS / (time.perf_counter() - began_s)

    candidates: Mapping[str, Callable[[], float]] = {
        "dispatched": lambda: candidate("dispatched", dispatched),
        "alone": lambda: candidate("alone", alone),
    }
    rates = interleaved(candidates, rounds)
    ratios = sorted(one / other for one, other in zip(rates["dispatched"].values, rates["alone"].values, strict=True))
    figure(
        f"dispatch.rows.{collections}",
        rates["dispatched"].median,
        "rows/s",
        spread=rates["dispatched"].spread,
        beside={
            "alone_rows_per_s": rates["alone"].median,
            "ratio_lowest": ratios[0],
            "ratio_highest": ratios[-1],
            "cpu_us_per_row": sorted(cpu_us["dispatched"])[len(cpu_us["dispatched"]) // 2],
            "alone_cpu_us_per_row": sorted(cpu_us["alone"])[len(cpu_us["alone"]) // 2],
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--collections", default="1,25,200")
    options = parser.parse_args()
    for count in options.collections.split(","):
        measure(options.records, int(count), options.rounds)
