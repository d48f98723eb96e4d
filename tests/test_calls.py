"""A call in tests that does not fit what it calls is found before the test is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calls import faults, main

FITTING = """
import tidewal
from tidewal import Message
from tidewal.runtime.clock import HybridClock
from tidewal.runtime.config.settings import ClusterSettings
from tidewal.runtime.testing import MemoryLog as Log, MemoryWal
from elsewhere import whatever

def test_it(Message):
    Message(1, 2, 3, 4, 5, 6, 7)
    whatever(1, 2)
    MemoryWal(*(Log(),), **{})
    MemoryWal(Log()).append(1, 2, 3, 4, 5, 6)
    tidewal.errors.Unavailable("x", y=1).whatever
    ClusterSettings(lease_ms=1)
    HybridClock.now(HybridClock())
"""


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("from tidewal.runtime.testing import MemoryWall", "tidewal.runtime.testing has no MemoryWall"),
        ("MemoryWal(1, 2, 3, 4, 5)", "MemoryWal(...): too many positional arguments"),
        ("MemoryWal(Log(), fault=1)", "MemoryWal(...): got an unexpected keyword argument 'fault'"),
        ("MemoryWal(*(), fault=1)", "MemoryWal(...): got an unexpected keyword argument 'fault'"),
        ("tidewal.runtime.testing.simulate_cluster()", "tidewal.runtime.testing.simulate_cluster(...): missing a req"),
        ("tidewal.runtime.errors.Unavailble", "tidewal.runtime.errors has no Unavailble"),
        ("HybridClock.uppdate", "HybridClock has no uppdate"),
        ("ClusterSettings(leas_ms=1)", "ClusterSettings(...): got an unexpected keyword argument 'leas_ms'"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(FITTING)
    assert faults(path) == []
    path.write_text(FITTING + line)
    found = faults(path)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:{len(FITTING.splitlines()) + 1}: {fault}")


def test_the_exit_status_says_whether_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(FITTING)
    assert main([str(path)]) == 0
    path.write_text("from tidewal import nothing")
    assert main([str(path)]) == 1
    assert "tidewal has no nothing" in capsys.readouterr().out
