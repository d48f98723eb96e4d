"""`python -m tests.wheels`: fill `.wheels/` with what a new user's `pip install 'tidewal[all]'` would fetch.

The tests of the first hour install from there, without network. It holds, in the locked versions and checked by their
hashes, what the package, its extras and `BESIDE` need on this machine. PySpark is a source archive on the index; its
wheel is built once. Quick where all is there. Where something cannot be had it says so in one line and succeeds: those
tests are skipped then, and fail with CI=true.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".wheels"
STAMP = "filled"
# What the users of the tests have beside Tidewal: a reader of tables, and what `make quick` needs of the group `dev`.
BESIDE = ("duckdb", "httpx", "hypothesis", "import-linter", "mmh3", "pytest", "pytest-asyncio", "pytest-timeout")
BESIDE += ("pytest-xdist", "ruff", "setuptools")


class Missing(Exception):
    """There are no wheels, and why."""


def find() -> Path:
    """The folder of wheels; raises Missing where it is not there or not of this lock."""
    if not _filled():
        raise Missing("the folder of wheels is not there, or of another lock: run `make setup`")
    return WHEELS


def fill() -> Path:
    """Return `find()`, or fetch and build the wheels; raises Missing where that fails."""
    if _filled():
        return WHEELS
    WHEELS.mkdir(exist_ok=True)
    locked = _locked()
    for wheel in WHEELS.glob("*.whl"):
        if _stem(wheel) not in locked:
            wheel.unlink()
    # What was built has no hash in the lock; it is not built again.
    built = {_stem(wheel) for wheel in WHEELS.glob("*-none-any.whl")}
    fetched = [entry for stem, entry in locked.items() if stem not in built]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("\n".join(fetched) + "\n")
        # With pip, as users do. No isolation: PySpark is built with the setuptools that is locked and installed.
        command = ["-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--require-hashes"]
        command += ["--find-links", str(WHEELS), "--wheel-dir", str(WHEELS), "--requirement", str(wanted)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"pip failed: {(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    (WHEELS / STAMP).write_text(_state())
    return WHEELS


def _locked() -> dict[str, str]:
    """The entries of requirements.lock that the package with all extras needs here, and what `BESIDE` needs: by name
    and version, as `_stem` has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    roots = [*project["dependencies"], *(each for extra in extras.values() for each in extra), *BESIDE]
    names = set(closure(Requirement(each) for each in roots if not each.startswith("tidewal[")))
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.finditer(r"^([a-z0-9-]+)==(\S+).*(?:\n    --hash=.*)+", lock, re.MULTILINE)
    chosen = {f"{entry[1]}-{entry[2]}": entry[0] for entry in entries if entry[1] in names}
    return {stem: entry for stem, entry in chosen.items() if _applies(Requirement(_head(entry)), "")}


def _head(entry: str) -> str:
    """The requirement of an entry, without its hashes."""
    return entry.partition("\n")[0].rstrip("\\ ")


def _stem(wheel: Path) -> str:
    """Name and version of a wheel."""
    name, version, *_ = wheel.name.split("-")
    return f"{canonicalize_name(name)}-{version}"


def closure(requirements: Iterable[Requirement]) -> Iterator[str]:
    """The distributions that these need on this machine, by what is installed in `.venv`."""
    waiting, seen = [each for each in requirements if _applies(each, "")], set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            yield name
            needs = [Requirement(each) for each in metadata.requires(name) or ()]
            waiting += [each for each in needs if _applies(each, extra)]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _filled() -> bool:
    stamp = WHEELS / STAMP
    return stamp.exists() and stamp.read_text() == _state()


def _state() -> str:
    """What the folder was filled for: the wheels of another lock, Python or machine are not these."""
    of_the_lock = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    machine = f"{platform.machine()} {platform.python_version()}"
    return f"{of_the_lock} {machine} {' '.join(BESIDE)}\n"


def main() -> None:
    try:
        fill()
    except Missing as error:
        print(f"no wheels for the tests of the first hour: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
