"""The index is a cache: whatever becomes of it, readers get every entry once, in order, and appends go on."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.adapters.rocksmq.damage import flip
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.adapters.rocksmq.check.verify import verify
from tidewal.adapters.rocksmq.index import index as module
from tidewal.adapters.rocksmq.index.index import Index
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.log.wal import Append, ChannelPolicy, Durability, Entry, From, FromTime
from tidewal.runtime.metrics.metrics import Metrics

SMALL = 64 * 1024
CHANNELS = {
    "dense": ChannelPolicy(),
    "rare": ChannelPolicy(),
    "with-holes": ChannelPolicy(acks=Durability.ONE),  # each incarnation begins above all ids of the one before
}
INCARNATIONS = 4
BOUND_S = 10.0

Written = dict[str, list[tuple[bytes, int, bytes]]]  # channel → (id, timestamp, payload)


async def write(directory: Path, rng: random.Random) -> Written:
    """Several incarnations, so that the index has several files of every kind."""
    written: Written = {channel: [] for channel in CHANNELS}
    timestamp = 1  # an append without one is stamped with the present time
    for incarnation in range(INCARNATIONS):
        store = await open_store(directory)
        for channel, policy in CHANNELS.items():
            if incarnation == 0:
                await store.create_channel(channel, policy)
        for _ in range(60):
            names = rng.choices(list(CHANNELS), [20, 1, 5], k=rng.randint(1, 4))
            timestamp += rng.randint(0, 3)
            entries = [Append(name, rng.randbytes(rng.randint(0, 1500)), timestamp) for name in names]
            for id, (name, payload, at, *_) in zip(await store.append_many(entries), entries, strict=True):
                written[name].append((id, at, bytes(payload)))
        await store.close()
    return written


async def open_store(directory: Path, metrics: Metrics | None = None) -> RocksMQ:
    """With so little memory that all is read from the files."""
    return await RocksMQ.open(
        str(directory), segment_bytes=SMALL, free_space_bytes=0, tail_bytes=1, serve=False, metrics=metrics
    )


async def read_all(store: RocksMQ) -> Written:
    """Every channel to its end."""
    found: Written = {channel: [] for channel in CHANNELS}
    for channel, entries in found.items():
        last = await store.latest_id(channel)
        async with asyncio.timeout(BOUND_S):
            async for batch in store.read(channel, From.EARLIEST):
                entries += [(entry.id, entry.timestamp, bytes(entry.payload)) for entry in batch]
                if last is not None and entries[-1][0] >= last:
                    break
    return found


async def check(store: RocksMQ, written: Written) -> None:
    """All is there, by id and by time."""
    assert await read_all(store) == written
    for channel, entries in written.items():
        for _, timestamp, *_ in entries[:: len(entries) // 3 + 1]:
            first = next(id for id, at, *_ in entries if at >= timestamp)
            assert await store.id_at(channel, timestamp) == first
            async with asyncio.timeout(BOUND_S):
                batch = await anext(store.read(channel, FromTime(timestamp)))
            assert batch[0].id == first


class Made:
    """A closed log and what was written to it."""

    def __init__(self, directory: Path, written: Written) -> None:
        self.directory, self.written = directory, written

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.directory, to)
        return to


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Made:
    directory = tmp_path_factory.mktemp("made") / "log"
    return Made(directory, asyncio.run(write(directory, random.Random(seed))))


def files(directory: Path) -> list[Path]:
    """What RocksDB has there, but for what it never reads."""
    skipped = ("LOCK", "LOG")
    return sorted(path for path in (directory / "index").iterdir() if not path.name.startswith(skipped))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    which=st.integers(0, 1 << 16),
    where=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from(["bit", "bit", "bit", "short", "gone", "garbage"]),
    bit=st.integers(0, 7),
)
def test_whatever_becomes_of_an_index_file_every_entry_is_read_once(made, tmp_path_factory, which, where, how, bit):
    directory, written = made.copy(tmp_path_factory.mktemp("damaged") / "log"), made.written
    path = files(directory)[which % len(files(directory))]
    size = path.stat().st_size
    at = int(where * size)
    note(f"{how} at {at} of {path.name}")
    if how == "gone":
        path.unlink()
    elif how == "short" or size == 0:
        with path.open("r+b") as file:
            file.truncate(at)
    elif how == "garbage":
        path.write_bytes(random.Random(at).randbytes(size))
    else:
        flip(path, at, bit)

    async def run() -> None:
        list(verify(str(directory), owned=False))  # never raises
        expected = written
        for _ in range(2):  # the second time with what the first left
            store = await open_store(directory)
            await check(store, expected)
            id = await store.append("rare", b"on", 10_000)
            expected = expected | {"rare": [*expected["rare"], (id, 10_000, b"on")]}
            await store.close()

    asyncio.run(run())
    shutil.rmtree(directory.parent)


@pytest.mark.slow
def test_an_index_that_lacks_entries_is_found_out(made, tmp_path, caplog):
    """Its checksums are right, as when RocksDB opens with an older list of its files."""
    directory, written = made.copy(tmp_path / "log"), made.written
    index = Index(str(directory / "index"))
    numbers, dropped = range(1, len(CHANNELS) + 1), 0
    for channel in numbers:
        place = index.after(channel, 0)
        while place is not None:
            if dropped % 2:
                batch = module.rocksdict.WriteBatch(raw_mode=True)
                batch.delete(module.ENTRY_KEY.pack(b"I", channel, place.id))
                batch.delete(module.TIME_KEY.pack(b"T", channel, place.earlier_timestamp, place.id))
                index._db.write(batch)
            dropped += 1
            place = index.after(channel, place.id)
    index.close()
    assert dropped > 10

    async def run() -> None:
        metrics = Metrics()
        store = await open_store(directory, metrics)
        assert not store.recovery.index_rebuilt
        await check(store, written)
        assert metrics.value("rocksmq_index_failures_total") == 1
        await store.close()
        store = await open_store(directory)
        assert store.recovery.index_rebuilt
        await check(store, written)
        await store.close()

    with caplog.at_level(logging.ERROR, logger=module.__name__):
        asyncio.run(run())
    assert [record.message for record in caplog.records if "does not lead to" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["_entry_at", "_write"])
async def test_an_index_that_fails_in_operation_stops_neither_readers_nor_appends(
    made, tmp_path, monkeypatch, caplog, broken
):
    directory, written = made.copy(tmp_path / "log"), made.written
    metrics = Metrics()
    store = await open_store(directory, metrics)

    def fails(*_: object) -> object:
        raise Exception("IO error: No space left on device: While appending to file: index/000017.sst")

    with caplog.at_level(logging.ERROR), monkeypatch.context() as broken_index:
        broken_index.setattr(module if broken == "_entry_at" else Index, broken, fails)
        more = [(await store.append("dense", bytes([n]) * 3000, 10_000 + n), 10_000 + n) for n in range(100)]
        expected = written | {
            "dense": written["dense"] + [(id, at, bytes([n]) * 3000) for n, (id, at) in enumerate(more)]
        }
        await check(store, expected)
    assert metrics.value("rocksmq_index_failures_total") == 1
    assert metrics.value("rocksmq_journal_failed") == 0
    assert len(caplog.records) == 1
    await check(store, expected)  # it is used no more by this incarnation
    await store.close()
    store = await open_store(directory)
    assert store.recovery.index_rebuilt
    await check(store, expected)
    await store.close()


@pytest.mark.slow
async def test_a_log_opens_where_no_index_can_be_made(made, tmp_path, monkeypatch, caplog):
    """As on a full disk on which the index of the incarnation before was lost."""
    directory, written = made.copy(tmp_path / "log"), made.written
    metrics = Metrics()
    shutil.rmtree(directory / "index")

    def fails(*_: object) -> object:
        raise Exception("No space left on device (os error 28)")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as full:
        full.setattr(Index, "_open", fails)
        store = await open_store(directory, metrics)
        await check(store, written)
    assert store.recovery.index_rebuilt
    assert "finds no space" in caplog.text
    assert "damaged" not in caplog.text
    assert "it cannot be made: No space left" in caplog.text
    ids = [await store.append("dense", bytes([n]) * 3000, 10_000 + n) for n in range(100)]
    more = [(id, 10_000 + n, bytes([n]) * 3000) for n, id in enumerate(ids)]
    for _ in range(2):
        await check(store, written | {"dense": written["dense"] + more})
        await store.close()
        store = await open_store(directory)
    assert not store.recovery.index_rebuilt
    await store.close()


@pytest.mark.slow
async def test_readers_get_what_lies_before_damage(made, tmp_path, helpers):
    """Also where the damage is met in the middle of a piece."""
    directory, written = made.copy(tmp_path / "log"), made.written
    hit = next(place for place, (_, _, payload) in enumerate(written["dense"]) if place > 5 and len(payload) > 500)
    first = min((directory / "journal").glob("*.segment"))
    flip(first, first.read_bytes().index(written["dense"][hit][2]) + 100)
    store = await open_store(directory)
    found: list[Entry] = []
    with pytest.raises(CorruptLog):
        await helpers.drain(store.read("dense", From.EARLIEST), found)
    entries = [(entry.id, entry.timestamp, bytes(entry.payload)) for entry in found]
    assert hit - 4 < len(entries) <= hit  # all before the frame, which has four entries at most
    assert entries == written["dense"][: len(entries)]
    assert store.recovery.index_rebuilt is False
    await store.close()
