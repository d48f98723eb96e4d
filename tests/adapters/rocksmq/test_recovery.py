"""Damage of every kind: it is reported, nothing before it is lost, nothing behind it vanishes in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tidewal.adapters.rocksmq.frame import Scanner
from tidewal.adapters.rocksmq.history import History
from tidewal.adapters.rocksmq.index import Index
from tidewal.adapters.rocksmq.recovery import Recovered, Recovery
from tidewal.adapters.rocksmq.segments import HEADER_BYTES, Segments
from tidewal.runtime.disk import RealDisk
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.wal import Append, ChannelPolicy, From

SMALL = 64 * 1024
COMMITS = 12


class Journal:
    """A closed journal, to be copied, damaged and recovered."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments = sorted((directory / "journal").glob("*.segment"))

    def copy(self, to: Path, *, with_index: bool = False) -> Journal:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.directory, to)
        if not with_index:
            shutil.rmtree(to / "index")
        return Journal(to)

    def frames(self, segment: int = 0) -> list[tuple[int, int, int]]:
        """(offset, end without padding, end) of each frame."""
        disk = RealDisk()
        segments = Segments(disk, str(self.directory / "journal"), SMALL, 1)
        found = segments.load()[segment]
        scanner = Scanner(disk, found.file, found.epoch, found.salt, HEADER_BYTES, found.size)
        frames = []
        while (frame := scanner.next()) is not None:
            frames.append((frame.offset, frame.offset + 32 + len(frame.table) + len(frame.bodies), frame.end))
        segments.close()
        return frames

    def recover(self) -> tuple[Recovered, list[bytes]]:
        """What recovery says, and every payload of the first channel."""
        disk = RealDisk()
        index = Index(str(self.directory / "index"))
        segments = Segments(disk, str(self.directory / "journal"), SMALL, 1)
        try:
            recovered = Recovery(disk, segments, index).run()
            history, payloads, next_id = History(segments, index), [], 1
            last_id = recovered.table.by_number[1].last_id if 1 in recovered.table.by_number else 0
            while next_id <= last_id:
                entries, _ = history.read(1, next_id, last_id)
                payloads += [bytes(entry.payload) for entry in entries]
                next_id = int.from_bytes(entries[-1].id, "big") + 1
            return recovered, payloads
        finally:
            segments.close()
            index.close()

    def try_to_recover(self) -> tuple[Recovered, list[bytes]] | CorruptLog:
        try:
            return self.recover()
        except CorruptLog as error:
            return error


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def payload(commit: int) -> bytes:
    return f"commit {commit} ".encode() * 3


@pytest.fixture
async def journal(open_rocksmq, tmp_path) -> Journal:
    """Frame 0 is the snapshot, 1 the life, 2 the channel, then one frame per commit."""
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    for commit in range(COMMITS):
        await store.append("a", payload(commit), commit)
    await store.close()
    return Journal(tmp_path / "log")


ALL = [payload(commit) for commit in range(COMMITS)]


def test_undamaged_without_index_everything_is_found_again(journal, tmp_path):
    recovered, payloads = journal.copy(tmp_path / "copy").recover()
    assert payloads == ALL
    assert recovered.report.index_rebuilt
    assert recovered.report.cut_offset is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zeros", "short"])
def test_a_last_frame_torn_at_any_byte_is_cut_and_reported(journal, tmp_path, how):
    offset, used, _ = journal.frames()[-1]
    for written in range(used - offset):
        copy = journal.copy(tmp_path / "copy")
        with copy.segments[0].open("r+b") as file:
            file.truncate(offset + written)
            if how == "zeros":
                file.truncate(SMALL)
        recovered, payloads = copy.recover()
        assert payloads == ALL[:-1], written
        if how == "short" or written >= 16:  # below, nothing tells the remains of a frame from an unused place
            assert recovered.report.cut_offset == offset, written


def test_a_torn_frame_that_the_index_knew_to_be_durable_is_corruption(journal, tmp_path):
    offset, used, _ = journal.frames()[-1]
    for written in range(0, used - offset, 7):
        copy = journal.copy(tmp_path / "copy", with_index=True)
        with copy.segments[0].open("r+b") as file:
            file.truncate(offset + written)
        with pytest.raises(CorruptLog) as caught:
            copy.recover()
        assert (caught.value.path, caught.value.offset) == (str(copy.segments[0]), offset)


def flips(journal: Journal, rng) -> list[tuple[int, int]]:
    """Every byte of one middle frame and of the last one, and a sample of all others."""
    frames = journal.frames()
    end = frames[-1][2]
    positions = [*range(*frames[5][::2]), *range(*frames[-1][::2]), *(rng.randrange(end) for _ in range(60))]
    return [(position, rng.randrange(8)) for position in positions]


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_reported_where_it_is(journal, tmp_path, rng):
    frames = journal.frames()
    copy = journal.copy(tmp_path / "copy")
    for position, bit in flips(journal, rng):
        flip(copy.segments[0], position, bit)
        shutil.rmtree(copy.directory / "index", ignore_errors=True)
        hit = next((i for i, (start, _, end) in enumerate(frames) if start <= position < end), None)
        unused = position >= 48 if hit is None else position >= frames[hit][1]
        outcome = copy.try_to_recover()
        if isinstance(outcome, CorruptLog):
            start = 0 if hit is None else frames[hit][0]
            assert (outcome.path, outcome.offset, unused) == (str(copy.segments[0]), start, False), (position, bit)
        else:
            recovered, payloads = outcome
            assert payloads == (ALL if unused else ALL[:-1]), (position, bit)
            assert recovered.report.cut_offset == (None if unused else frames[-1][0]), (position, bit)
        flip(copy.segments[0], position, bit)
        # A cut must not have been made good by anything that recovery wrote.
    assert copy.recover()[1] == ALL


async def test_a_flipped_bit_in_a_segment_that_the_index_vouches_for_stops_the_reader_there(
    open_rocksmq, tmp_path, helpers
):
    store = await open_rocksmq(segment_bytes=SMALL, tail_bytes=1)
    await store.create_channel("a", ChannelPolicy())
    for commit in range(60):
        await store.append("a", payload(commit) * 100, commit)
    await store.close()
    journal = Journal(tmp_path / "log")
    assert len(journal.segments) >= 3
    offset, used, _ = journal.frames()[10]
    flip(journal.segments[0], used - 5, 3)
    store = await open_rocksmq(segment_bytes=SMALL, tail_bytes=1)
    reader, read = store.read("a", From.EARLIEST), []
    with pytest.raises(CorruptLog) as caught:
        await helpers.drain(reader, read)
    assert caught.value.offset == offset
    assert helpers.payloads(read) == [payload(commit) * 100 for commit in range(len(read))]


async def test_a_missing_segment_is_corruption(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    for _ in range(60):
        await store.append("a", bytes(5000))
    await store.close()
    Journal(tmp_path / "log").segments[1].unlink()
    with pytest.raises(CorruptLog):
        await open_rocksmq()


@pytest.mark.parametrize("damage", ["gone", "garbage", "a file"])
async def test_the_index_is_only_a_cache(open_rocksmq, tmp_path, helpers, damage):
    store = await open_rocksmq(segment_bytes=SMALL)
    for name in "ab":
        await store.create_channel(name, ChannelPolicy())
    for commit in range(80):
        await store.append_many([Append("ab"[commit % 2], bytes([commit]) * 3000, commit)])
    await store.close()
    index = tmp_path / "log" / "index"
    if damage != "garbage":
        shutil.rmtree(index)
        if damage == "a file":
            index.write_bytes(b"garbage")
    else:
        for path in index.iterdir():
            path.write_bytes(b"garbage")
    store = await open_rocksmq(segment_bytes=SMALL, tail_bytes=1)
    assert store.recovery.index_rebuilt
    expected = [bytes([commit]) * 3000 for commit in range(1, 80, 2)]
    assert helpers.payloads(await helpers.take(store, "b", From.EARLIEST, 40)) == expected
    assert await store.id_at("b", 33) == (17).to_bytes(8, "big")
