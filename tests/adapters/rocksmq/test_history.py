"""Reading what memory has forgotten: every channel exactly, from every start, however the index came about."""

from __future__ import annotations

import pytest

from tidewal.adapters.rocksmq.journal import recovery
from tidewal.runtime.disk import Disk
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId, FromTime

pytestmark = pytest.mark.slow

SEGMENT = 256 * 1024
CHANNELS = ["dense", "now-and-then", "rare"]


class CountingDisk(Disk):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, file: int, size: int, offset: int) -> bytes:
        data = super().read(file, size, offset)
        self.bytes_read += len(data)
        return data


async def write(store, rng, written, commits=400):
    """Append commits of a few entries, none at 0, that is now; `written` gets (id, timestamp, payload) per channel."""
    for _ in range(commits):
        names = rng.choices(CHANNELS, [100, 10, 1], k=rng.randint(1, 6))
        entries = [Append(name, rng.randbytes(rng.randint(0, 1500)), rng.randint(1, 10_000)) for name in names]
        ids = await store.append_many(entries)
        for id, (name, payload, timestamp, *_) in zip(ids, entries, strict=True):
            written[name].append((id, timestamp, payload))


async def read(store, channel, start, last_id):
    found = []
    async for batch in store.read(channel, start):
        found += [(entry.id, entry.timestamp, bytes(entry.payload)) for entry in batch]
        if batch[-1].id >= last_id:
            return found
    return found


@pytest.mark.parametrize("spans", [(4096, 4096), (4096, 1 << 20), (1 << 20, 4096), (1 << 20, 1 << 20)])
async def test_each_channel_reads_exactly_from_every_start_whatever_spans_were_indexed(
    open_rocksmq, rng, monkeypatch, spans
):
    """The second incarnation indexes with other spans than the first, as after an update."""
    written = {channel: [] for channel in CHANNELS}
    for incarnation, span_bytes in enumerate(spans):
        monkeypatch.setattr(recovery, "SPAN_BYTES", span_bytes)
        store = await open_rocksmq(segment_bytes=SEGMENT, tail_bytes=0)
        if incarnation == 0:
            for channel in CHANNELS:
                await store.create_channel(channel, ChannelPolicy())
        await write(store, rng, written)
        if incarnation == 0:
            await store.close()
    for channel, entries in written.items():
        assert await read(store, channel, From.EARLIEST, entries[-1][0]) == entries
        for at in rng.sample(range(len(entries)), min(20, len(entries))):
            id, timestamp, _ = entries[at]
            assert await read(store, channel, FromId(id, inclusive=True), entries[-1][0]) == entries[at:]
            first = next(place for place, entry in enumerate(entries) if entry[1] >= timestamp)
            assert await store.id_at(channel, timestamp) == entries[first][0]
            assert await read(store, channel, FromTime(timestamp), entries[-1][0]) == entries[first:]


async def test_a_channel_with_an_entry_now_and_then_does_not_cost_the_journal_between(open_rocksmq):
    disk = CountingDisk()
    store = await open_rocksmq(disk=disk, segment_bytes=32 * 1024 * 1024, tail_bytes=0)
    for channel in ("busy", "rare"):
        await store.create_channel(channel, ChannelPolicy())
    rare, other = [], [Append("busy", bytes(16 * 1024))] * 16
    for _ in range(10):
        rare.append(await store.append("rare", b"here"))
        for _ in range(16):  # 4 MiB
            await store.append_many(other)
    disk.bytes_read = 0
    found = await read(store, "rare", From.EARLIEST, rare[-1])
    assert [id for id, *_ in found] == rare
    assert disk.bytes_read < 10 * 1024 * 1024  # of 40


async def test_big_frames_are_read_once(open_rocksmq):
    disk = CountingDisk()
    store = await open_rocksmq(disk=disk, segment_bytes=32 * 1024 * 1024, tail_bytes=0)
    await store.create_channel("a", ChannelPolicy())
    batch = [Append("a", bytes(64 * 1024))] * 16
    for _ in range(20):
        ids = await store.append_many(batch)
    disk.bytes_read = 0
    assert len(await read(store, "a", From.EARLIEST, ids[-1])) == 20 * 16
    assert disk.bytes_read < 21.5 * 1024 * 1024
