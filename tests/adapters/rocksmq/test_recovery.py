"""Damage of every kind: it is reported, nothing before it is lost, nothing behind it vanishes in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.open_files import open_files
from tidewal.adapters.rocksmq.index.history import History
from tidewal.adapters.rocksmq.index.index import Index
from tidewal.adapters.rocksmq.journal import channels as records
from tidewal.adapters.rocksmq.journal.channels import ChannelTable, JournalledChannel
from tidewal.adapters.rocksmq.journal.frame import CONTROL, Scanner, encode, pack_row
from tidewal.adapters.rocksmq.journal.recovery import Extents, Recovered, Recovery
from tidewal.adapters.rocksmq.journal.segment_stats import SegmentStats
from tidewal.adapters.rocksmq.journal.segments import (
    HEADER_BYTES,
    VERSION,
    Header,
    Segments,
    encode_header,
    segment_name,
)
from tidewal.runtime.disk import Disk
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

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
        disk = Disk()
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
        disk = Disk()
        index = Index(str(self.directory / "index"))
        segments = Segments(disk, str(self.directory / "journal"), SMALL, 1)
        try:
            recovered = Recovery(disk, segments, index).run()
            history, payloads, next_id = History(segments, index, recovered.sealed), [], 1
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


def payload(commit: int) -> bytes:
    return f"commit {commit} ".encode() * 3


@pytest.fixture
async def journal(open_rocksmq, tmp_path) -> Journal:
    """Frame 0 is the snapshot, 1 the incarnation, 2 the channel, then one frame per commit."""
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
        if how == "short" or written >= 16:  # below, the remains of a frame look like unused space
            assert recovered.report.cut_offset == offset, written


@pytest.mark.slow
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
    assert not [path for path in open_files() if path.startswith(str(tmp_path))]


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


# ---- the order of rows in a frame ------------------------------------------------------------------------------------


def write_segment(journal: Path, epoch: int, sequence: int, frames) -> None:
    """A segment with frames of (channel number, id, timestamp, body) rows."""
    content = encode_header(Header(VERSION, epoch, 7, SMALL))
    for number, rows in enumerate(frames, sequence):
        table = [pack_row(channel, len(body), id, timestamp) for channel, id, timestamp, body in rows]
        bodies = [body for _, _, _, body in rows]
        content += b"".join(encode(epoch, 7, number, table, bodies, sum(map(len, bodies))))
    journal.mkdir(parents=True, exist_ok=True)
    (journal / segment_name(epoch)).write_bytes(content.ljust(SMALL, b"\0"))


def record(body: bytes):
    return CONTROL, 0, 0, body


def state(number: int, floor: int = 0) -> JournalledChannel:
    return JournalledChannel(number, f"c{number}", ChannelPolicy(), floor, last_id=floor)


FIRST = [record(ChannelTable().snapshot(0)), *(record(records.create(state(number))) for number in (1, 2))]


def facts(table: ChannelTable, extents: Extents):
    return table.by_number, table.floor, table.boot, table.next_number, extents.channels


row = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.binary(max_size=3)),
    st.builds(lambda number: record(records.drop(number)), st.integers(1, 3)),
    st.builds(lambda floor: record(records.create(state(3, floor))), st.integers(0, 9)),
    st.builds(lambda number: record(records.boot(number)), st.integers(1, 9)),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.lists(row, min_size=1, max_size=8), max_size=3))
def test_recovery_counts_what_the_writer_counted(tmp_path_factory, frames):
    """Rows take effect in their order in the frame: what comes before a drop is part of what the channel gave out."""
    directory = tmp_path_factory.mktemp("log")
    write_segment(directory / "journal", 1, 1, [FIRST, *frames])
    recovered, _ = Journal(directory).recover()
    table = ChannelTable()
    stats = SegmentStats(table, None, Extents())  # counting does not ask the index
    for rows in [FIRST, *frames]:
        columns = tuple(zip(*rows, strict=True))
        stats.note(0, columns, sum(map(len, columns[3])))
        stats.count(recovered.current)
    shutil.rmtree(directory)
    assert facts(recovered.table, recovered.extents) == facts(table, stats.extents)


def test_a_channel_made_again_in_the_frame_that_dropped_it_begins_above_it(tmp_path):
    rows = [(1, 5, 0, b"x"), record(records.drop(1)), record(records.create(state(3, 5)))]
    write_segment(tmp_path / "journal", 1, 1, [FIRST, rows])
    recovered, _ = Journal(tmp_path).recover()
    assert recovered.table.floor == 5
    assert set(recovered.table.by_number) == {2, 3}


@pytest.mark.parametrize("vouched_for", [False, True])
def test_all_records_of_the_first_frame_count(tmp_path, vouched_for):
    """More than the snapshot may be there; each record is read from its own place."""
    write_segment(tmp_path / "journal", 1, 1, [[*FIRST, (1, 4, 0, b"x"), record(records.boot(3))], [(2, 6, 0, b"y")]])
    second = ChannelTable()
    for _, _, _, body in FIRST:
        second.apply(body)
    second.advance(1, 4, 0)
    rows = [record(second.snapshot(0)), record(records.truncate(1, 4)), record(records.boot(5))]
    write_segment(tmp_path / "journal", 2, 3, [rows, [(2, 7, 0, b"z")]])
    write_segment(tmp_path / "journal", 3, 5, [[record(records.drop(2)), record(records.boot(6))]])
    for _ in range(1 + vouched_for):  # the second time the index knows the first two segments
        recovered, _ = Journal(tmp_path).recover()
    assert recovered.table.by_number[1].truncated_to == 4
    assert set(recovered.table.by_number) == {1}
    assert recovered.table.boot == 6
    assert recovered.removed_to == {1: 0, 2: 0}
