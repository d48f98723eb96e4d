"""Salvage of a journal whose segments, headers or snapshots are damaged, or whose beginning or end is lost."""

from __future__ import annotations

import shutil

import pytest

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.salvaging import NUMBERS, SMALL, Frames, check, read_over_losses, replace, report, zero
from tidewal.adapters.rocksmq.journal.segments import HEADER_BYTES
from tidewal.runtime.errors import CorruptLog, PositionLost
from tidewal.runtime.log.wal import FromId

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("segment", [0, 2, -2])
async def test_a_damaged_snapshot(open_rocksmq, log, written, segments, segment):
    frames = Frames(log)
    flip(segments[segment], HEADER_BYTES + 80)
    assert len(replace(log).damages) == 1
    await check(open_rocksmq, written, frames, {frames.of(segments[segment])[0]})


@pytest.mark.parametrize("segment", [0, 2, -2])
@pytest.mark.parametrize("position", [2, 9, 18, 26, 34, 44])
async def test_a_damaged_header_loses_nothing(open_rocksmq, log, written, segments, segment, position):
    frames = Frames(log)
    flip(segments[segment], position)
    with pytest.raises(CorruptLog):
        await open_rocksmq(segment_bytes=SMALL)
    assert not any(state.losses for state in replace(log).table.by_number.values())
    await check(open_rocksmq, written, frames, set())


def test_a_header_is_mended_though_the_first_frames_are_damaged_too(log, segments):
    frames = Frames(log)
    flip(segments[1], 26)
    for place in frames.of(segments[1])[:10]:
        flip(segments[1], frames.places[place][2] - 9)
    found = report(log)
    assert {damage.frames for damage in found.damages} == {0, 10}


@pytest.mark.parametrize(
    ("how", "segment"),
    [
        ("missing", 2),
        ("header of zeros", 2),
        ("zeros", 2),
        ("cut short", 2),
        ("header of zeros", 0),
        ("zeros", 0),
        ("cut short", 0),
    ],
)
async def test_a_whole_segment(open_rocksmq, log, written, segments, how, segment):
    frames = Frames(log)
    path = segments[segment]
    hit = set(frames.of(path))
    if how == "missing":
        path.unlink()
    elif how == "zeros":
        zero(path, HEADER_BYTES, SMALL)
    elif how == "cut short":
        with path.open("r+b") as file:
            file.truncate(SMALL // 2)
        hit = {place for place in hit if frames.places[place][2] > SMALL // 2}
    else:
        zero(path, 0, HEADER_BYTES)
    shutil.rmtree(log / "index")
    with pytest.raises(CorruptLog):
        await open_rocksmq(segment_bytes=SMALL)
    replace(log)
    await check(open_rocksmq, written, frames, hit)


@pytest.mark.parametrize("how", ["last frame", "last segment"])
async def test_an_end_that_the_index_knew_to_be_durable(open_rocksmq, log, written, segments, how):
    frames = Frames(log)
    last = [path for path in segments if frames.of(path)][-1]
    hit = set(frames.of(last))
    if how == "last segment":
        for path in segments[segments.index(last) :]:
            path.unlink()
    else:
        hit = {frames.of(last)[-1]}
        flip(last, frames.places[-1][1] + 60)
    with pytest.raises(CorruptLog):
        await open_rocksmq(segment_bytes=SMALL)
    assert any(state.losses for state in replace(log).table.by_number.values())
    await check(open_rocksmq, written, frames, hit)


@pytest.mark.parametrize("damaged", ["the header", "all frames", "the first frames"])
async def test_the_beginning_behind_what_retention_took(open_rocksmq, log, written, segments, damaged):
    """An entry that was lost there looks like one that retention removed; a position among them is refused."""
    for path in segments[:2]:
        path.unlink()
    shutil.rmtree(log / "index")
    frames = Frames(log)
    hit = set(frames.of(segments[2])) if damaged != "the first frames" else set(range(40))
    if damaged == "the header":
        zero(segments[2], 0, HEADER_BYTES)
    else:
        zero(segments[2], HEADER_BYTES, max(frames.places[place][2] for place in hit))
    lost = {key for place in hit for key in frames.places[place][3]}
    there = {key for *_, entries in frames.places for key in entries} - lost
    replace(log)
    store = await open_rocksmq(segment_bytes=SMALL)
    for name, entries in written.items():
        left = {id: payload for id, payload in entries.items() if (NUMBERS[name], int.from_bytes(id, "big")) in there}
        assert (await read_over_losses(store, name))[0] == left
        for id in (id for id in entries if (NUMBERS[name], int.from_bytes(id, "big")) in lost):
            with pytest.raises(PositionLost):
                await anext(store.read(name, FromId(id, inclusive=True)))


async def test_an_index_that_cannot_be_read_is_left_behind(open_rocksmq, log, written):
    frames = Frames(log)
    for path in (log / "index").iterdir():
        path.write_bytes(b"garbage")
    (found,) = replace(log).damages
    assert found.path == str(log / "index")
    await check(open_rocksmq, written, frames, set())


def test_a_journal_of_which_nothing_can_be_read_is_refused(log, segments):
    for path in segments:
        zero(path, 0, SMALL)
    with pytest.raises(CorruptLog):
        replace(log)
    assert not log.with_name("copy").exists()
