"""Salvage of a journal with damaged frames: every other entry is saved, with its id, and no reader passes in silence
what is lost."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.salvaging import (
    NUMBERS,
    SMALL,
    Frames,
    check,
    damage,
    fingerprint,
    read_all,
    read_over_losses,
    replace,
    report,
    zero,
)
from tidewal.adapters.rocksmq.journal.segments import HEADER_BYTES
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.wal import ChannelPolicy, FromId

pytestmark = pytest.mark.slow


async def test_whatever_single_frame_is_damaged_the_rest_is_saved(
    open_rocksmq, log, written, tmp_path, rng: random.Random
):
    frames = Frames(log)
    shutil.copytree(log, tmp_path / "kept")
    for place in sorted(rng.sample(range(len(frames.places) - 1), 25)):
        shutil.rmtree(log)
        shutil.copytree(tmp_path / "kept", log)
        path, offset, end, _ = frames.places[place]
        how = rng.choice(["flip", "zero", "header"])
        print(place, path.name, offset, how)
        if how == "flip":
            flip(path, rng.randrange(offset + 32, end - 8), rng.randrange(8))
        elif how == "header":
            flip(path, offset + rng.randrange(24), rng.randrange(8))
        else:
            zero(path, offset, end)
        replace(log)
        await check(open_rocksmq, written, frames, {place})


def test_a_report_tells_each_loss_and_nothing_else(log, rng: random.Random):
    frames = Frames(log)
    kept = {path: path.read_bytes() for path, *_ in frames.places}
    everything = {key for *_, entries in frames.places for key in entries}
    for place in range(len(frames.places) - 1):
        path, offset, end, entries = frames.places[place]
        print(place, path.name, offset, damage(path, offset, end, max(len(entries), 1), rng))
        losses = {number: state.losses for number, state in report(log).table.by_number.items()}
        reported = {key for key in everything if any(loss.first <= key[1] <= loss.last for loss in losses[key[0]])}
        assert reported == set(entries)
        path.write_bytes(kept[path])


@pytest.mark.parametrize("segment", [0, 2, -2])
async def test_a_torn_middle(open_rocksmq, log, written, segments, segment):
    frames = Frames(log)
    places = frames.of(segments[segment])
    hit = places[len(places) // 3 : len(places) // 2]
    zero(segments[segment], frames.places[hit[0]][1] + 100, frames.places[hit[-1]][2] - 50)
    replace(log)
    await check(open_rocksmq, written, frames, set(hit))


@pytest.mark.parametrize("where", ["anywhere", "in a row", "around a segment's end", "the first two snapshots"])
@pytest.mark.parametrize("index", ["with index", "without"])
async def test_damage_in_many_places(open_rocksmq, log, written, segments, rng: random.Random, where, index):
    frames = Frames(log)
    count = len(frames.places) - 1  # damage of the last frame alone looks like a torn write
    begins = [frames.of(segment)[0] for segment in segments if frames.of(segment)]
    first = rng.randrange(count - 12) if where == "in a row" else rng.choice(begins[1:]) - rng.randrange(1, 12)
    hit = {
        "anywhere": set(rng.sample(range(count), 12)),
        "in a row": set(range(first, first + 12)),
        "around a segment's end": set(range(first, first + 12)),
        "the first two snapshots": set(begins[:2]),
    }[where]
    for place in sorted(hit):
        path, offset, end, entries = frames.places[place]
        print(place, path.name, offset, damage(path, offset, end, max(len(entries), 1), rng))
    if where == "anywhere":
        flip(segments[1], 20)
    if index == "without":
        shutil.rmtree(log / "index")
    replace(log)
    await check(open_rocksmq, written, frames, hit)


def test_a_report_changes_nothing_and_says_what_is_lost(log):
    frames = Frames(log)
    path, offset, end, entries = frames.places[40]
    flip(path, offset + 100)
    before = fingerprint(log)
    found = report(log)
    assert fingerprint(log) == before
    (damage,) = found.damages
    assert (damage.path, damage.offset, damage.end, damage.frames) == (str(path), offset, end, 1)
    losses = {(number, loss[:2]) for number, state in found.table.by_number.items() for loss in state.losses}
    assert losses == {(channel, (id, id)) for channel, id in entries}
    assert not any(loss.unknown for state in found.table.by_number.values() for loss in state.losses)
    assert found.frames == len(frames.places) - 1
    assert found.entries == sum(len(entries) for *_, entries in frames.places) - len(entries)


async def test_a_sound_journal_is_copied_whole(open_rocksmq, log, written):
    frames = Frames(log)
    found = replace(log)
    assert not found.damages
    assert not any(state.losses for state in found.table.by_number.values())
    assert [entries for *_, entries in Frames(log).places] == [*(entries for *_, entries in frames.places), {}]
    await check(open_rocksmq, written, frames, set())


async def test_bytes_damaged_anywhere_lose_what_lies_there_or_nothing(open_rocksmq, log, written, tmp_path, rng):
    """In any file of the directory; each entry is there as it was, or its position is refused."""
    frames = Frames(log)
    shutil.copytree(log, tmp_path / "kept")
    files = sorted(path for path in log.rglob("*") if path.is_file() and path.stat().st_size)
    for _ in range(12):
        shutil.rmtree(log)
        shutil.copytree(tmp_path / "kept", log)
        whole = set(range(len(frames.places)))
        for path in rng.sample(files, 6):
            start = rng.randrange(path.stat().st_size)
            end = min(start + rng.choice([1, 8, 500, 5000]), path.stat().st_size)
            print(path.name, start, end)
            with path.open("r+b") as file:
                file.seek(start)
                file.write(rng.randbytes(end - start))
            whole -= {
                place
                for place in frames.of(path)
                if (frames.places[place][1] < end and start < frames.places[place][2]) or start < HEADER_BYTES
            }
        version = (log / "FORMAT").read_bytes().split()[-1:]
        if version and version[0].isdigit():  # a digit by chance may say a newer format, which is refused
            shutil.copy(tmp_path / "kept" / "FORMAT", log)
        replace(log)
        store = await open_rocksmq(segment_bytes=SMALL)
        content, stopped = await read_all(store)
        there = {key for place in whole for key in frames.places[place][3]}
        # Behind the last whole frame damage looks like a torn write: nothing says how much there was.
        torn = {key for place in range(max(whole) + 1, len(frames.places)) for key in frames.places[place][3]}
        for name, entries in written.items():
            assert content[name].items() <= entries.items()
            for id in entries.keys() - content[name].keys():
                last = (NUMBERS[name], int.from_bytes(id, "big")) in torn
                assert last or any(first <= id < behind for first, behind in stopped[name]), (name, id)
                assert (NUMBERS[name], int.from_bytes(id, "big")) not in there
                if not last:
                    with pytest.raises(PositionLost):
                        await anext(store.read(name, FromId(id, inclusive=True)))
        await store.close()


async def test_a_channel_that_may_have_gone_on_in_lost_frames_is_unknown(open_rocksmq, tmp_path):
    """No later entry, and no snapshot, says how far it went: neither its ids nor a lost channel's are given again."""
    log = tmp_path / "log"
    store = await open_rocksmq()
    for name in "ab":
        await store.create_channel(name, ChannelPolicy())
    first = [await store.append("a", b"whole"), await store.append("b", b"whole")]
    await store.append("a", b"lost")
    await store.create_channel("c", ChannelPolicy())
    lost = await store.append("c", b"lost")
    await store.append("b", b"the end")
    await store.close()
    for path, offset, end, _ in Frames(log).places[-4:-1]:
        zero(path, offset, end)
    losses = {state.name: state.losses for state in replace(log).table.by_number.values()}
    assert [loss.unknown for loss in losses["a"]] == [True]
    assert losses["b"] == ()
    store = await open_rocksmq()
    assert (await read_over_losses(store, "a"))[0] == {first[0]: b"whole"}
    with pytest.raises(PositionLost):
        await anext(store.read("a", FromId(first[0])))
    assert await store.channels() == ["a", "b"]
    await store.create_channel("c", ChannelPolicy())
    assert await store.append("c", b"another") > lost
    assert store._registry.names["c"].number > 3


async def test_a_channel_whose_drop_is_lost_makes_way_for_its_namesake(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    old = [await store.append("a", b"old") for _ in range(3)]
    await store.drop_channel("a")
    await store.create_channel("a", ChannelPolicy())
    new = [await store.append("a", b"new") for _ in range(3)]
    await store.close()
    frames = Frames(tmp_path / "log")
    (first,) = (
        place for place, (*_, entries) in enumerate(frames.places) if (2, int.from_bytes(new[0], "big")) in entries
    )
    path, offset, end, entries = frames.places[first - 2]  # before the second creation
    assert not entries
    zero(path, offset, end)
    replace(tmp_path / "log")
    store = await open_rocksmq(segment_bytes=SMALL)
    assert await read_over_losses(store, "a") == (dict.fromkeys(new, b"new"), [])
    assert [channel.name for channel in store._registry.by_number.values()] == ["a"]
    await store.drop_channel("a")
    await store.create_channel("a", ChannelPolicy())
    assert await store.append("a", b"newest") > max(old + new)
