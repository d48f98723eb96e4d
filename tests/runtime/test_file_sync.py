"""What makes files durable on each system: Linux, macOS, and one that has neither call."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewal.runtime.disk import Disk
from tidewal.runtime.file_sync import sync_data, sync_file, sync_path

FULL_SYNC = 51  # its number on macOS


class Calls:
    """The calls that reach the system instead of it, and what the full sync raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.refused = 0
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self.note(name), raising=False)

    def note(self, name: str) -> Callable[[int], None]:
        return lambda file: self.made.append(name)

    def fcntl(self, file: int, command: int) -> None:
        assert command == FULL_SYNC
        self.made.append("F_FULLFSYNC")
        if self.refused:
            raise OSError(self.refused, os.strerror(self.refused))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def mac(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", calls.fcntl)
    return calls


def sync_each(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    sync_data(file)
    sync_file(file)
    os.close(file)
    sync_path(path)


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="the system has no fdatasync")
def test_on_linux_data_and_files_have_calls_of_their_own(calls: Calls, tmp_path: Path) -> None:
    sync_each(tmp_path)
    assert calls.made == ["fdatasync", "fsync", "fsync"]


def test_without_fdatasync_everything_is_fsync(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync", raising=False)
    sync_each(tmp_path)
    assert calls.made == ["fsync"] * 3


def test_on_macos_the_cache_of_the_drive_is_emptied(mac: Calls, tmp_path: Path) -> None:
    sync_each(tmp_path)
    assert mac.made == ["F_FULLFSYNC"] * 3


def test_a_journal_syncs_so(mac: Calls, tmp_path: Path) -> None:
    disk = Disk()
    file = disk.open(str(tmp_path / "segment"), create=True)
    disk.sync(file)
    disk.sync_directory(str(tmp_path))
    disk.close(file)
    assert mac.made == ["F_FULLFSYNC"] * 2


def test_a_file_system_without_the_full_sync_gets_what_it_can(mac: Calls, tmp_path: Path) -> None:
    mac.refused = errno.ENOTSUP
    sync_path(tmp_path)
    assert mac.made == ["F_FULLFSYNC", "fsync"]


def test_a_full_sync_that_fails_is_a_failure(mac: Calls, tmp_path: Path) -> None:
    mac.refused = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync_path(tmp_path)
    assert mac.made == ["F_FULLFSYNC"]
