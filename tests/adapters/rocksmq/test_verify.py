"""Scrubbing: damage of any kind is found where it is, health is no damage, and nothing is changed by looking."""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.rocksmq.damage import flip
from tidewal.adapters.rocksmq.check.findings import SegmentReport
from tidewal.adapters.rocksmq.check.index_check import IndexCheck
from tidewal.adapters.rocksmq.check.journal_survey import ReadOnlyDisk
from tidewal.adapters.rocksmq.check.verify import verify
from tidewal.adapters.rocksmq.index.index import Index, IndexEntry
from tidewal.adapters.rocksmq.journal.segments import HEADER_BYTES
from tidewal.adapters.rocksmq.owner.directory import locked
from tidewal.runtime.errors import ConfigError
from tidewal.runtime.log.wal import Append, ChannelPolicy

SMALL = 64 * 1024
COMMITS = 120
PLAIN = ChannelPolicy()


def scrub(directory: Path, **options) -> list[SegmentReport]:
    return list(verify(str(directory), **{"owned": False} | options))


def fingerprint(directory: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (directory / "journal").iterdir()}


@pytest.fixture
async def log(open_rocksmq, tmp_path) -> Path:
    """A closed log of four channels over several segments, one channel dropped on the way."""
    for incarnation in range(2):
        store = await open_rocksmq(segment_bytes=SMALL)
        for name in "abcd":
            await store.create_channel(name, PLAIN)
        for commit in range(COMMITS):
            batch = [Append(name, bytes([commit]) * 500, commit + 1) for name in "abcd"[: commit % 4 + 1]]
            await store.append_many(batch)
        if incarnation == 0:
            await store.drop_channel("d")
        await store.close()
    return tmp_path / "log"


@pytest.fixture
def segments(log: Path) -> list[Path]:
    found = sorted((log / "journal").glob("*.segment"))
    assert len(found) > 4
    return found


@pytest.mark.slow
def test_a_healthy_log_is_intact_and_unchanged(log):
    before = fingerprint(log)
    reports = scrub(log)
    assert [report.state for report in reports][-1] == "spare"
    assert {report.state for report in reports[:-1]} == {"ok"}
    assert sum(report.entries for report in reports) == 2 * sum(commit % 4 + 1 for commit in range(COMMITS))
    assert fingerprint(log) == before


def test_without_an_index_there_is_nothing_to_compare(log):
    shutil.rmtree(log / "index")
    assert {report.state for report in scrub(log)} == {"ok", "spare"}


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found_in_its_place(log, segments, rng: random.Random):
    ends = {report.path: report.end for report in scrub(log)}
    for _ in range(60):
        path = segments[rng.randrange(len(segments) - 1)]
        position, bit = rng.randrange(ends[str(path)]), rng.randrange(8)
        if 48 <= position < HEADER_BYTES:
            continue  # nothing is written there
        flip(path, position, bit)
        damaged = [report for report in scrub(log) if report.state == "damaged"]
        padding = not damaged  # up to 7 zeros behind a frame are not part of it
        if not padding:
            assert [report.path for report in damaged] == [str(path)], (path, position, bit)
            first = damaged[0].findings[0]
            assert first.offset <= position <= (first.end or position), (path, position, bit)
            assert damaged[0].frames > 10  # what lies behind is read, too
        else:
            assert path.read_bytes()[position] == 1 << bit, (path, position, bit)
        flip(path, position, bit)


@pytest.mark.slow
def test_lost_frames_are_counted(log, segments):
    report = scrub(log)[1]
    flip(segments[1], report.end // 2)
    damaged = scrub(log)[1]
    (finding,) = [each for each in damaged.findings if each.lost_frames is not None]
    assert finding.lost_frames == 1
    assert damaged.frames == report.frames - 1


@pytest.mark.slow
def test_a_missing_segment_is_reported(log, segments):
    segments[2].unlink()
    findings = [finding.what for report in scrub(log) for finding in report.findings]
    assert any("missing before it" in what for what in findings)


@pytest.mark.slow
@pytest.mark.parametrize("position", [3, 9, 17, 25, 33, 41])
def test_a_damaged_header_is_reported_and_its_frames_are_read(log, segments, position):
    before = scrub(log)[1]
    flip(segments[1], position)
    report = scrub(log)[1]
    assert (report.state, report.frames, report.findings[0].offset) == ("damaged", before.frames, 0)


@pytest.mark.slow
def test_a_header_of_zeros_leaves_nothing_to_check(log, segments):
    with segments[1].open("r+b") as file:
        file.write(bytes(HEADER_BYTES))
    report = scrub(log)[1]
    assert (report.state, report.frames) == ("damaged", 0)
    assert "salt" in report.findings[1].what


def test_a_file_cut_short_is_damage(log, segments):
    with segments[1].open("r+b") as file:
        file.truncate(SMALL // 2)
    assert scrub(log)[1].state == "damaged"


@pytest.mark.slow
def test_a_torn_last_frame_is_no_damage_unless_the_index_knew_it_durable(log, segments):
    report = scrub(log)[-2]
    flip(segments[-2], report.end - 100)
    assert scrub(log)[-2].state == "damaged"
    shutil.rmtree(log / "index")
    assert scrub(log)[-2].state == "torn"


@pytest.mark.slow
async def test_the_index_of_a_process_that_was_killed_is_behind_and_that_is_no_damage(open_rocksmq, tmp_path):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", PLAIN)
    for commit in range(COMMITS):
        await store.append("a", bytes(1000), commit + 1)
    shutil.copytree(tmp_path / "log", tmp_path / "left", ignore=shutil.ignore_patterns("socket", "preparing"))
    await store.close()
    reports = scrub(tmp_path / "left")
    assert [report.findings for report in reports] == [[]] * len(reports)
    assert sum(report.entries for report in reports) == COMMITS
    index = IndexCheck.open(str(tmp_path / "left" / "index"))
    assert index is not None
    in_use = reports[-2] if reports[-1].state == "spare" else reports[-1]
    assert index.durable_to() < (in_use.epoch, in_use.end)
    index.close()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["elsewhere", "lost", "astray", "summary"])
def test_an_index_that_disagrees_is_damage(log, wrong):
    index = Index(str(log / "index"))
    place = index.after(1, 0)
    assert place is not None
    if wrong == "elsewhere":
        index.add([(1, place._replace(offset=place.offset + 8))], index.durable_to())
    elif wrong == "astray":
        index.add([(1, IndexEntry(place.id + 10**6, place.epoch, place.offset, 0))], index.durable_to())
    elif wrong == "lost":
        index.forget(place.epoch, [1])
    else:
        summary = index.summary(place.epoch)
        assert summary is not None
        index.seal(place.epoch + 1, summary)
    index.close()
    assert "damaged" in {report.state for report in scrub(log)}


@pytest.mark.slow
def test_a_damaged_file_of_the_index_options_ends_no_process(log):
    for path in (log / "index").glob("OPTIONS-*"):
        path.write_bytes(path.read_bytes().replace(b"BlockBasedTable", b"Bl\xd7ckBasedTable"))
    code = (
        "import sys; from tidewal.adapters.rocksmq.check.verify import verify; list(verify(sys.argv[1], owned=False))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(log)], check=False).returncode == 0


def test_an_index_that_cannot_be_opened_is_damage_and_the_journal_is_read(log):
    intact = scrub(log)
    for path in (log / "index").iterdir():
        path.write_bytes(b"garbage")
    damaged = scrub(log)
    assert [report.frames for report in damaged] == [report.frames for report in intact]
    (finding,) = [finding for report in damaged for finding in report.findings]
    assert str(log / "index") in finding.what


def test_what_the_device_cannot_read_is_damage_and_the_rest_is_read(log):
    class Scratched(ReadOnlyDisk):
        def read(self, file, size, offset):
            if offset < 30_000 < offset + size:
                raise OSError(errno.EIO, "scratched")
            return super().read(file, size, offset)

    before, reports = scrub(log), scrub(log, disk=Scratched())
    for report, healthy in zip(reports, before, strict=True):
        if healthy.end > 30_000:
            assert report.state == "damaged"
            assert 0 < report.frames < healthy.frames
            assert any("scratched" in finding.what for finding in report.findings)


async def test_an_owned_log_is_read_while_it_is_written(open_rocksmq, tmp_path, helpers):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy(retention_s=0))
    with locked(store.directory) as unowned:
        assert not unowned
        for _ in range(6):
            reports = verify(store.directory, owned=True)
            states = []
            for report in reports:
                states.append(report.state)
                assert not report.findings
                await store.append_many([Append("a", bytes(3000))] * 8)  # it goes on, and retention recycles
                store.retain_now()
            assert "damaged" not in states
    await store.append("a", b"undisturbed")


@pytest.mark.slow
async def test_no_process_opens_a_log_that_is_being_verified(open_rocksmq, log):
    with locked(str(log)) as unowned:
        assert unowned
        with locked(str(log)) as again:
            assert not again
    await open_rocksmq()


def test_where_there_is_no_log_none_is_made(tmp_path):
    with pytest.raises(ConfigError), locked(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []
