"""`python -m tests.promtool`: fetch promtool, Prometheus' checker of rules, where it is not installed.

It comes from the system's `prometheus` package, which is unpacked and not installed, and is kept in `.brokers/` (git
ignores it). Where that cannot be had it says so in one line and succeeds: the tests of the alerts are skipped then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".brokers"
PROGRAM = "usr/bin/promtool"  # in the package
FETCHED_WITHIN_S = 120.0


class Missing(Exception):
    """There is no promtool, and why."""


def find() -> Path:
    """Return the promtool of the PATH, or the one that was fetched; raises Missing."""
    installed = shutil.which("promtool")
    found = CACHE / "promtool" if installed is None else Path(installed)
    if not found.exists():
        raise Missing("promtool is not there: run `make setup`, or install Prometheus")
    return found


def fetch() -> Path:
    """Return `find()`, or have apt download the package; raises Missing where there is no apt, or no package."""
    try:
        return find()
    except Missing:
        pass
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as a user of its own
        _run("apt-get", "download", "--quiet", "prometheus", cwd=scratch)
        (package,) = Path(scratch).glob("prometheus_*.deb")
        _run("dpkg-deb", "--extract", package.name, ".", cwd=scratch)
        os.replace(Path(scratch) / PROGRAM, CACHE / "promtool")
    return find()


def _run(*command: str, cwd: str) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=FETCHED_WITHIN_S)
    except subprocess.CalledProcessError as error:
        raise Missing(f"{command[0]} failed: {error.stderr.strip().splitlines()[-1:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(str(error)) from error


def main() -> None:
    try:
        fetch()
    except Missing as error:
        print(f"no promtool for tests: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
