"""Tidewal where the calls of Linux are missing: no Mac runs these tests, so its lacks are forced on this machine, in a
process of their own and all that it starts (`forced/sitecustomize.py`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.turns import cases_in_turn

ROOT = Path(__file__).parents[2]
FORCED = Path(__file__).with_name("forced")
LACKS = ("os.eventfd", "os.fdatasync", "socket.SOCK_CLOEXEC", "time.CLOCK_BOOTTIME")
OF_LOG = tuple(f"tests/adapters/rocksmq/test_{name}.py" for name in ("socket", "owning", "turns", "handover"))
SUITES = (  # modules, and how many tests they have at least
    (("tests/adapters/conformance/test_suite.py", "-k", "rocksmq"), 200),
    (OF_LOG, 60),
    (("tests/actors/test_standalone.py", "tests/actors/test_connect.py"), 10),
)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**kept, "PYTHONPATH": str(FORCED), "CI": "true", **more}


@pytest.mark.slow
def test_the_lacks_are_forced_and_no_kernel_syncs() -> None:
    code = (
        "import fcntl, os, socket, time\n"
        f"there = [each for each in {LACKS} if hasattr(globals()[each.split('.')[0]], each.split('.')[1])]\n"
        "from tidewal.runtime.aio_fsync import KernelDisk\n"
        "print(there, fcntl.F_FULLFSYNC, KernelDisk().syncer())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[] 51 None\n", "")


@pytest.mark.long
@pytest.mark.parametrize("suite", cases_in_turn(SUITES), ids=["conformance", "log", "node"])
@pytest.mark.timeout(600)
def test_the_log_and_a_node_do_all_they_do_on_linux(suite: tuple[tuple[str, ...], int], tmp_path: Path) -> None:
    modules, at_least = suite
    counted = tmp_path / "full-syncs"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long and not broker",
        *modules,
    ]
    forced = environment(TIDEWAL_TEST_FULL_SYNCS=str(counted))
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'of-the-run'}"],
        cwd=ROOT,
        env=forced,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= at_least
    assert counted.stat().st_size > at_least  # what is durable went through the full sync
