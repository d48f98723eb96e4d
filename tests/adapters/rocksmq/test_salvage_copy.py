"""The directory that a salvage writes: whole or refused, whatever stops the writing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.salvaging import SMALL, WALL_MS, Frames, check, fingerprint, replace, report
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.adapters.rocksmq.check.salvage import salvage
from tidewal.adapters.rocksmq.owner.directory import locked
from tidewal.runtime.disk import Disk
from tidewal.runtime.errors import (
    ConfigError,
    CorruptLog,
    DirectoryInUse,
    DirectoryUnwritable,
    DiskFull,
    IncompleteLog,
    JournalFailed,
    TidewalError,
)
from tidewal.runtime.testing.disk import FaultyDisk

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


@pytest.fixture
def frames(log: Path) -> Frames:
    """The frames of `log` before number 30 was damaged."""
    frames = Frames(log)
    flip(frames.places[30][0], frames.places[30][1] + 100)
    return frames


async def assert_refused(copy: Path) -> None:
    """The copy cannot be opened, and the error says what to do."""
    with pytest.raises(IncompleteLog, match="remove the directory and salvage"):
        await RocksMQ.open(str(copy), segment_bytes=SMALL, serve=False)
    with pytest.raises(IncompleteLog):
        salvage(str(copy), None, wall_ms=WALL_MS)
    with pytest.raises(IncompleteLog), locked(str(copy)):
        pass


async def test_a_copy_is_incomplete_before_it_has_any_other_file(log, frames, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    real = os.open

    def stopped(path, *arguments, **options):
        if str(path) == str(copy / "LOCK"):
            raise OSError(errno.EIO, "stopped")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", stopped)
    with pytest.raises(TidewalError):
        salvage(str(log), str(copy), wall_ms=WALL_MS)
    monkeypatch.undo()
    with pytest.raises(IncompleteLog):
        await RocksMQ.open(str(copy), segment_bytes=SMALL, serve=False)


class StoppedAt(Disk):
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

    def sync_directory(self, directory):
        self._count()
        super().sync_directory(directory)


async def test_a_salvage_stopped_at_any_step_leaves_what_no_process_opens(
    open_rocksmq, log, written, frames, tmp_path, rng
):
    before = fingerprint(log)
    calls = StoppedAt(1 << 30)
    salvage(str(log), str(tmp_path / "whole"), wall_ms=WALL_MS, disk=calls)
    steps = (1 << 30) - calls.left
    assert steps > 100
    for step in [0, 1, 2, *rng.sample(range(3, steps - 3), 20), steps - 3, steps - 2, steps - 1]:
        copy = tmp_path / f"copy-{step}"
        with pytest.raises(JournalFailed, match="salvage again"):
            salvage(str(log), str(copy), wall_ms=WALL_MS, disk=StoppedAt(step))
        await assert_refused(copy)
        with pytest.raises(ConfigError, match="not an empty directory"):
            salvage(str(log), str(copy), wall_ms=WALL_MS)
    assert fingerprint(log) == before
    replace(log)
    await check(open_rocksmq, written, frames, {30})


async def test_a_salvage_that_loses_power_leaves_what_no_process_opens(log, frames, tmp_path, seed):
    for operation in ("sync", "sync_directory"):
        for skip in range(2):
            copy = tmp_path / f"{operation}-{skip}"
            disk = FaultyDisk(seed)
            disk.fail(operation, skip=skip)
            with contextlib.suppress(TidewalError):
                salvage(str(log), str(copy), wall_ms=WALL_MS, disk=disk)
            disk.cut_power()
            disk.restore_power()
            await assert_refused(copy)


async def test_what_was_completed_outlasts_a_loss_of_power(open_rocksmq, log, written, frames, seed):
    disk = FaultyDisk(seed)
    copy = log.with_name("copy")
    salvage(str(log), str(copy), wall_ms=WALL_MS, disk=disk)
    disk.cut_power()
    disk.restore_power()
    log.rename(log.with_name("damaged"))
    copy.rename(log)
    await check(open_rocksmq, written, frames, {30})


SCRIPT = """
import sys, time
from tidewal.adapters.rocksmq.check.salvage import salvage
from tidewal.runtime.disk import Disk

class WaitingDisk(Disk):
    syncs = 0

    def sync(self, file):
        super().sync(file)
        self.syncs += 1
        if self.syncs == int(sys.argv[3]):
            print("now", flush=True)
            time.sleep(600)

salvage(sys.argv[1], sys.argv[2], wall_ms=1, disk=WaitingDisk())
"""


@pytest.mark.kills
@pytest.mark.parametrize("syncs", [1, 3])
async def test_a_salvage_that_is_killed_leaves_what_no_process_opens(
    open_rocksmq, log, written, frames, tmp_path, syncs
):
    before, copy = fingerprint(log), tmp_path / "copy"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(log), str(copy), str(syncs), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"now\n"
        with pytest.raises(DirectoryInUse):  # the log is still being read
            salvage(str(log), None, wall_ms=WALL_MS)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert fingerprint(log) == before
    await assert_refused(copy)
    copy.rename(tmp_path / "incomplete")
    replace(log)
    await check(open_rocksmq, written, frames, {30})


@pytest.mark.parametrize(("error", "kind"), [(errno.ENOSPC, DiskFull), (errno.EROFS, DirectoryUnwritable)])
async def test_a_disk_that_takes_no_more_is_said(log, frames, tmp_path, error, kind):
    before = fingerprint(log)
    disk = FaultyDisk()
    disk.fail("write", error, skip=40)
    with pytest.raises(kind, match="salvage again"):
        salvage(str(log), str(tmp_path / "copy"), wall_ms=WALL_MS, disk=disk)
    assert fingerprint(log) == before
    await assert_refused(tmp_path / "copy")


def test_only_a_new_place_is_written_to(log, tmp_path):
    before = fingerprint(log)
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(log)
    for place in (log, log / "inside", log / "journal", tmp_path / "link", tmp_path / "file", tmp_path / "full"):
        with pytest.raises(ConfigError):
            salvage(str(log), str(place), wall_ms=WALL_MS)
    assert fingerprint(log) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link", "log"]
    (tmp_path / "empty").mkdir()
    assert salvage(str(log), str(tmp_path / "empty"), wall_ms=WALL_MS).copied_bytes > 0


async def test_a_log_that_a_process_owns_is_refused(open_rocksmq, log, tmp_path):
    await open_rocksmq(segment_bytes=SMALL)
    with pytest.raises(DirectoryInUse):
        salvage(str(log), str(tmp_path / "copy"), wall_ms=WALL_MS)
    assert not (tmp_path / "copy").exists()


async def test_a_directory_that_cannot_be_written_is_salvaged(open_rocksmq, log, written, frames):
    """As on a mount for reading only."""
    folders = [log, *(path for path in log.rglob("*") if path.is_dir())]
    for path in log.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    log.chmod(0o500)
    (log / "LOCK").chmod(0o400)
    try:
        replace(log)
    finally:
        for path in folders:
            for place in (path, log.with_name("damaged") / path.relative_to(log)):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(place, 0o700)
    await check(open_rocksmq, written, frames, {30})


def test_a_damaged_format_is_said_and_copied_whole(log):
    (log / "FORMAT").write_bytes(b"")
    found = replace(log)
    assert [Path(damage.path).name for damage in found.damages] == ["FORMAT"]
    assert not report(log).damages


def test_what_is_torn_at_the_end_is_said(log):
    """As an opening would cut it off: it was never known to be durable."""
    frames = Frames(log)
    path, offset, _, _ = frames.places[-1]
    flip(path, offset + 60)
    for file in (log / "index").iterdir():
        file.unlink()
    (log / "index").rmdir()
    found = replace(log)
    assert [damage.what for damage in found.damages] == ["an unfinished frame, not known to be durable"]
    assert not any(state.losses for state in found.table.by_number.values())


def test_a_log_without_one_frame_makes_no_copy(log, tmp_path):
    for path in (log / "journal").glob("*.segment"):
        path.write_bytes(bytes(SMALL))
    with pytest.raises(CorruptLog):
        salvage(str(log), str(tmp_path / "copy"), wall_ms=WALL_MS)
    assert not (tmp_path / "copy").exists()
