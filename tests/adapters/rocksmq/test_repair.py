"""Repair: a journal that damage keeps closed opens again, with every entry that can be read, and no reader passes in
silence what cannot."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import shutil
from pathlib import Path

import pytest

from tests.adapters.rocksmq.damage import flip
from tidewal.adapters.rocksmq.check.journal_survey import JournalSurvey, ReadOnlyDisk
from tidewal.adapters.rocksmq.check.rebuild import apply
from tidewal.adapters.rocksmq.check.repair import plan
from tidewal.adapters.rocksmq.check.repair_plan import RepairPlan
from tidewal.adapters.rocksmq.check.verify import verify
from tidewal.adapters.rocksmq.journal.retention import STEP_LASTS_S
from tidewal.adapters.rocksmq.journal.segments import HEADER_BYTES
from tidewal.runtime.clock import SystemClock
from tidewal.runtime.disk import RealDisk
from tidewal.runtime.errors import CorruptLog, DiskFull, PositionLost, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.disk import FaultyDisk

pytestmark = pytest.mark.slow

SMALL = 64 * 1024
COMMITS = 150
WALL_MS = SystemClock().wall_ms()
PLAIN = ChannelPolicy()
Content = dict[str, dict[bytes, bytes]]


class Frames:
    """Where the frames of a closed journal lie, and which entries are in each."""

    def __init__(self, log: Path) -> None:
        self.places: list[tuple[Path, int, int, dict[tuple[int, int], None]]] = []
        survey = JournalSurvey(ReadOnlyDisk(), str(log / "journal"))
        for segment in survey.segments:
            for frame in survey.walk(segment, None):
                entries = {(row.channel, row.id): None for row in frame.rows() if row.channel}
                self.places.append((Path(segment.path), frame.offset, frame.end, entries))
        survey.close()

    def of(self, path: Path) -> list[int]:
        return [place for place, (found, *_) in enumerate(self.places) if found == path]


def make_plan(log: Path, **options) -> RepairPlan:
    survey = JournalSurvey(ReadOnlyDisk(), str(log / "journal"))
    try:
        return plan(str(log), survey, wall_ms=WALL_MS, **options)
    finally:
        survey.close()


def repair(log: Path, disk=None, wall_ms: int = WALL_MS, **options) -> RepairPlan:
    survey = JournalSurvey(ReadOnlyDisk(), str(log / "journal"))
    try:
        found = plan(str(log), survey, wall_ms=wall_ms, **options)
        apply(str(log), found, survey, disk or RealDisk(), wall_ms)
        return found
    finally:
        survey.close()


def zero(path: Path, start: int, end: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(end - start))


async def read_over_losses(store, channel: str) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """Everything in a channel, and the ranges (first lost, first behind) at which a reader was stopped."""
    latest, start = await store.latest_id(channel), From.EARLIEST
    found: dict[bytes, bytes] = {}
    stopped: list[tuple[bytes, bytes]] = []
    while latest is not None and max(found, default=b"") < latest and all(behind <= latest for _, behind in stopped):
        reader = store.read(channel, start)
        try:
            while max(found, default=b"") < latest:
                found.update((entry.id, bytes(entry.payload)) for entry in await anext(reader))
        except PositionLost as error:
            stopped.append((error.requested, error.first_available))
            start = FromId(error.first_available, inclusive=True)
        await reader.aclose()
    return found, stopped


async def read_all(store) -> tuple[Content, dict[str, list[tuple[bytes, bytes]]]]:
    content, stopped = {}, {}
    for channel in await store.channels():
        content[channel], stopped[channel] = await read_over_losses(store, channel)
    return content, stopped


@pytest.fixture
async def written() -> Content:
    return {}


@pytest.fixture
async def log(open_rocksmq, tmp_path, written) -> Path:
    """A closed log of four channels over several segments; channel "d" comes late."""
    for incarnation in range(2):
        store = await open_rocksmq(segment_bytes=SMALL)
        for name in "abc" if incarnation == 0 else "abcd":
            await store.create_channel(name, PLAIN)
        for commit in range(COMMITS):
            names = ("abc" if incarnation == 0 else "abcd")[: commit % 4 + 1]
            batch = [Append(name, f"{incarnation}:{commit}:{name} ".encode() * 40, commit + 1) for name in names]
            for id, append in zip(await store.append_many(batch), batch, strict=True):
                written.setdefault(append.channel, {})[id] = append.payload
        await asyncio.to_thread(store._maintenance.need_spare)  # so that the last segment is always the spare
        await store.close()
    return tmp_path / "log"


@pytest.fixture
def segments(log: Path) -> list[Path]:
    found = sorted((log / "journal").glob("*.segment"))
    assert len(found) > 4
    return found


NUMBERS = {"a": 1, "b": 2, "c": 3, "d": 4}


async def check(open_rocksmq, written: Content, frames: Frames, hit: set[int]) -> None:
    """What was not in the frames `hit` is there; what was is lost, and readers are stopped in front of it."""
    lost = {key for place in hit for key in frames.places[place][3]}
    store = await open_rocksmq(segment_bytes=SMALL)
    content, stopped = await read_all(store)
    for name, entries in written.items():
        gone = {id for id in entries if (NUMBERS[name], int.from_bytes(id, "big")) in lost}
        assert content[name] == {id: payload for id, payload in entries.items() if id not in gone}, name
        for id in gone:
            assert any(first <= id < behind for first, behind in stopped[name]), (name, id)
        for id in sorted(gone)[:1] + sorted(gone)[-1:]:
            with pytest.raises(PositionLost):
                await anext(store.read(name, FromId(id, inclusive=True)))
        for first, behind in stopped[name]:
            assert not any(first <= id < behind for id in content[name]), name
        new = await store.append(name, b"on it goes")
        assert new > max(entries)
    await store.close()


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
        repair(log)
        assert {report.state for report in verify(str(log), owned=False)} <= {"ok", "spare"}
        await check(open_rocksmq, written, frames, {place})


def damage(path: Path, offset: int, end: int, rows: int, rng: random.Random) -> str:
    """Damage a frame in one of the ways that look different; say how."""
    how = rng.choice(["body", "header", "row", "channel", "zeros"])
    if how == "zeros":
        zero(path, offset, end)
        return how
    position = {
        "body": offset + 32 + 24 * rows,
        "header": offset + rng.randrange(32),
        "row": offset + 32 + rng.randrange(24 * rows),
        "channel": offset + 32 + 24 * rng.randrange(rows),
    }[how]
    bit = rng.randrange(8)
    flip(path, position, bit)
    return f"{how}, bit {bit} at {position}"


def test_a_plan_tells_each_loss_and_nothing_else(log, rng: random.Random):
    frames = Frames(log)
    kept = {path: path.read_bytes() for path, *_ in frames.places}
    everything = {key for *_, entries in frames.places for key in entries}
    for place in range(len(frames.places) - 1):
        path, offset, end, entries = frames.places[place]
        print(place, path.name, offset, damage(path, offset, end, max(len(entries), 1), rng))
        losses = make_plan(log).losses
        reported = {key for key in everything if any(first <= key[1] <= last for first, last in losses.get(key[0], ()))}
        assert reported == set(entries)
        path.write_bytes(kept[path])


@pytest.mark.parametrize("segment", [0, 2, -2])
async def test_a_torn_middle(open_rocksmq, log, written, segments, segment):
    frames = Frames(log)
    places = frames.of(segments[segment])
    hit = places[len(places) // 3 : len(places) // 2]
    zero(segments[segment], frames.places[hit[0]][1] + 100, frames.places[hit[-1]][2] - 50)
    repair(log)
    await check(open_rocksmq, written, frames, set(hit))


@pytest.mark.parametrize("segment", [0, 2, -2])
async def test_a_damaged_snapshot(open_rocksmq, log, written, segments, segment):
    frames = Frames(log)
    flip(segments[segment], HEADER_BYTES + 80)
    assert len(repair(log).damages) == 1
    await check(open_rocksmq, written, frames, {frames.of(segments[segment])[0]})


@pytest.mark.parametrize("segment", [0, 2, -2])
@pytest.mark.parametrize("position", [2, 9, 18, 26, 34, 44])
async def test_a_damaged_header_loses_nothing(open_rocksmq, log, written, segments, segment, position):
    frames = Frames(log)
    flip(segments[segment], position)
    with pytest.raises(CorruptLog):
        await open_rocksmq(segment_bytes=SMALL)
    assert not repair(log).losses
    await check(open_rocksmq, written, frames, set())


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
    repair(log)
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
    assert repair(log).losses
    await check(open_rocksmq, written, frames, hit)


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
    repair(log)
    assert {report.state for report in verify(str(log), owned=False)} <= {"ok", "spare"}
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
    repair(log)
    store = await open_rocksmq(segment_bytes=SMALL)
    for name, entries in written.items():
        left = {id: payload for id, payload in entries.items() if (NUMBERS[name], int.from_bytes(id, "big")) in there}
        assert (await read_over_losses(store, name))[0] == left
        for id in (id for id in entries if (NUMBERS[name], int.from_bytes(id, "big")) in lost):
            with pytest.raises(PositionLost):
                await anext(store.read(name, FromId(id, inclusive=True)))


def test_a_header_is_mended_though_the_first_frames_are_damaged_too(log, segments):
    frames = Frames(log)
    flip(segments[1], 26)
    for place in frames.of(segments[1])[:10]:
        flip(segments[1], frames.places[place][2] - 9)
    found = make_plan(log)
    assert {damage.frames for damage in found.damages} == {0, 10}


async def test_a_channel_whose_drop_is_lost_makes_way_for_its_namesake(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", PLAIN)
    old = [await store.append("a", b"old") for _ in range(3)]
    await store.drop_channel("a")
    await store.create_channel("a", PLAIN)
    new = [await store.append("a", b"new") for _ in range(3)]
    await store.close()
    frames = Frames(tmp_path / "log")
    (first,) = (
        place for place, (*_, entries) in enumerate(frames.places) if (2, int.from_bytes(new[0], "big")) in entries
    )
    path, offset, end, entries = frames.places[first - 2]  # before the second creation
    assert not entries
    zero(path, offset, end)
    repair(tmp_path / "log")
    store = await open_rocksmq(segment_bytes=SMALL)
    assert await read_over_losses(store, "a") == (dict.fromkeys(new, b"new"), [])
    assert [channel.name for channel in store._registry.by_number.values()] == ["a"]
    await store.drop_channel("a")
    await store.create_channel("a", PLAIN)
    assert await store.append("a", b"newest") > max(old + new)


async def test_a_snapshot_that_was_made_up_lets_retention_take_nothing_too_soon(open_rocksmq, clock, tmp_path):
    """Retention goes by the time of the snapshot that follows a segment. Where the snapshot is lost, the entries before
    it must not seem older than they are."""
    log, day_s = tmp_path / "log", 24 * 3600
    store = await open_rocksmq(segment_bytes=SMALL, clock=clock)
    await store.create_channel("a", ChannelPolicy(retention_s=14 * day_s))
    for days in (10, 5):
        for _ in range(20):
            await store.append("a", bytes(4000))
        clock.advance(days * day_s)
    await store.close()
    segments = sorted((log / "journal").glob("*.segment"))
    flip(segments[2], HEADER_BYTES + 60)  # begun 5 days ago, as the second became full; the first did 15 days ago
    repair(log, wall_ms=clock.wall_ms())
    store = await open_rocksmq(segment_bytes=SMALL, clock=clock)
    store.retain_now()
    clock.advance(STEP_LASTS_S)  # the wall clock is ahead of the journal's time, and is believed once that has lasted
    store.retain_now()
    assert store._segments.first_epoch == 2


def test_a_plan_changes_nothing_and_says_what_is_lost(log, segments):
    frames = Frames(log)
    path, offset, end, entries = frames.places[40]
    flip(path, offset + 100)
    before = {each: each.read_bytes() for each in (log / "journal").iterdir()}
    found = make_plan(log)
    assert {each: each.read_bytes() for each in (log / "journal").iterdir()} == before
    (damage,) = found.damages
    assert (damage.path, damage.offset, damage.end, damage.frames) == (str(path), offset, end, 1)
    assert damage.channels == {channel: (id, id) for channel, id in entries}


def test_a_sound_journal_needs_no_repair(log):
    found = make_plan(log)
    assert not found.needed
    assert not found.segments


async def test_an_index_that_disagrees_is_set_aside(open_rocksmq, log, written):
    frames = Frames(log)
    for path in (log / "index").iterdir():
        path.write_bytes(b"garbage")
    found = repair(log)
    assert found.index_aside
    assert not found.damages
    await check(open_rocksmq, written, frames, set())


def test_old_files_are_kept_aside(log, segments):
    frames = Frames(log)
    path, offset, _, _ = frames.places[40]
    flip(path, offset + 100)
    damaged = path.read_bytes()
    repair(log)
    (aside,) = (log / "journal").glob("damaged-*")
    assert (aside / path.name).read_bytes() == damaged
    assert path.read_bytes() != damaged


async def test_losses_last_until_they_are_accepted(open_rocksmq, log, written):
    frames = Frames(log)
    path, offset, _, _ = frames.places[40]
    flip(path, offset + 100)
    repair(log)
    for _ in range(2):  # the second time from a later snapshot
        store = await open_rocksmq(segment_bytes=SMALL)
        assert (await read_over_losses(store, "a"))[1]
        for _ in range(20):
            written["a"][await store.append("a", bytes(8000))] = bytes(8000)
        await store.close()
    repair(log, accept=True)
    store = await open_rocksmq(segment_bytes=SMALL)
    found, stopped = await read_over_losses(store, "a")
    assert not stopped
    assert len(found) == len(written["a"]) - 1


@pytest.mark.parametrize("reset_to", list(From))
@pytest.mark.parametrize("hit", [0, 40, -2])
async def test_a_group_passes_a_loss_once(open_rocksmq, log, written, helpers, hit, reset_to):
    """With `reset_to` a member goes on behind a loss, and what lies before it is not delivered again."""
    frames = Frames(log)
    path, offset, _, entries = [place for place in frames.places if any(number == 1 for number, _ in place[3])][hit]
    flip(path, offset + 100)
    repair(log)
    (lost,) = (id.to_bytes(8, "big") for number, id in entries if number == 1)
    before, behind = ([id for id in written["a"] if id < lost], [id for id in written["a"] if id > lost])
    metrics = Metrics()
    store = await open_rocksmq(segment_bytes=SMALL, metrics=metrics)
    member = await store.join("g", ["a"], reset_to=reset_to)
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < len(before):
            found += [entry.id for entry in (await anext(member)).entries]
        following = asyncio.ensure_future(anext(member))
        await helpers.until(lambda: metrics.value("wal_group_reset_total") == 1)
        new = await store.append("a", b"new")
        found += [entry.id for entry in (await following).entries]
        while found[-1] != new:
            found += [entry.id for entry in (await anext(member)).entries]
    assert found == [*before, *(behind if reset_to is From.EARLIEST else []), new]
    assert metrics.value("wal_group_reset_total") == 1


def test_a_journal_of_which_nothing_can_be_read_is_refused(log, segments):
    for path in segments:
        zero(path, 0, SMALL)
    with pytest.raises(CorruptLog):
        repair(log)


class StoppedAt(RealDisk):
    """Fails the call with that number and all after it, as a killed process does."""

    def __init__(self, call: int) -> None:
        self.left = call

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "stopped")

    def open(self, path, *, create=False):
        self._count()
        return super().open(path, create=create)

    def write(self, file, buffers, offset):
        self._count()
        return super().write(file, buffers, offset)

    def sync(self, file):
        self._count()
        super().sync(file)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, path):
        self._count()
        super().remove(path)

    def sync_directory(self, directory):
        self._count()
        super().sync_directory(directory)


async def test_a_repair_stopped_at_any_step_can_be_done_again(open_rocksmq, log, written, segments, tmp_path):
    frames = Frames(log)
    inner = [place for place in frames.of(segments[3]) if place > 60]
    hit = {30, inner[len(inner) // 2]}
    for place in hit:
        flip(frames.places[place][0], frames.places[place][1] + 100)
    shutil.copytree(log, tmp_path / "kept")
    steps = 0
    while True:
        shutil.rmtree(log)
        shutil.copytree(tmp_path / "kept", log)
        try:
            repair(log, StoppedAt(steps))
            break
        except TidewalError:
            pass
        steps += 1
        if not make_plan(log).needed:
            continue
        repair(log)
        assert not make_plan(log).needed, steps
        if steps % 12 == 0 or steps > 3000:
            await check(open_rocksmq, written, frames, hit)
    assert steps > 20


async def test_a_repair_that_loses_power_at_any_step_can_be_done_again(open_rocksmq, log, written, tmp_path, seed):
    frames = Frames(log)
    flip(frames.places[30][0], frames.places[30][1] + 100)
    shutil.copytree(log, tmp_path / "kept")
    for operation in ("sync", "sync_directory", "rename"):
        for skip in range(3):
            shutil.rmtree(log)
            shutil.copytree(tmp_path / "kept", log)
            disk = FaultyDisk(seed)
            disk.fail(operation, skip=skip)
            with contextlib.suppress(TidewalError):
                repair(log, disk)
            disk.cut_power()
            disk.restore_power()
            if make_plan(log).needed:
                repair(log)
            await check(open_rocksmq, written, frames, {30})


def test_no_space_leaves_the_journal_as_it_was(log):
    frames = Frames(log)
    flip(frames.places[30][0], frames.places[30][1] + 100)
    before = {each.name: each.read_bytes() for each in (log / "journal").iterdir()}
    disk = FaultyDisk()
    disk.fail("write", errno.ENOSPC, skip=2)
    with pytest.raises(DiskFull):
        repair(log, disk)
    after = {each.name: each.read_bytes() for each in (log / "journal").iterdir() if "preparing" not in each.name}
    assert after == before
