"""Programs that Go builds: for tests the sidecar of Woodpecker, etcd, and an object store; for benchmarks another one.

What Go downloads and compiles stays in its own caches. What we keep is a folder per module in `.brokers/` (git ignores
it), named by a hash of the module's files: a changed module gets a new folder, and the old one is removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .jars import CACHE, Missing, locked

ROOT = Path(__file__).parents[2]
FETCHED_WITHIN_S = 600.0
BUILT_WITHIN_S = 1800.0
GO_PLACES = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go", "/opt/homebrew/bin/go")

Program = Literal["sidecar", "etcd", "versitygw", "minio"]
FOR_TESTS: tuple[Program, ...] = ("sidecar", "etcd", "versitygw")


class Unfetched(Missing):
    """Go is there, and cannot fetch the modules."""


@dataclass(frozen=True, slots=True)
class Built:
    """What is built of a module: its folder, and the packages by the names of the programs."""

    module: Path
    packages: dict[str, str]


STORES = Built(
    Path(__file__).with_name("stores"),
    {"etcd": "go.etcd.io/etcd/server/v3", "versitygw": "github.com/versity/versitygw/cmd/versitygw"},
)
MODULES: dict[Program, Built] = {
    "sidecar": Built(ROOT / "sidecars" / "woodpecker", {"sidecar": "."}),
    "etcd": STORES,
    "versitygw": STORES,
    "minio": Built(ROOT / "benchmarks" / "objects" / "minio", {"minio": "github.com/minio/minio"}),
}


def find_program(program: Program) -> Path:
    """The program; raises `Missing` where it was not built, `Unfetched` where that is for lack of a network."""
    path = _folder(MODULES[program]) / program
    if not path.exists():
        _go()
        if _unfetched(path).exists():
            raise Unfetched(f"the modules of {program} could not be fetched")
        raise Missing(f"{program} is not built: run `make setup`")
    return path


def build_program(program: Program) -> Path:
    """Build the program where it is not there; raises `Missing` where there is no Go, or the build fails."""
    built = MODULES[program]
    path = _folder(built) / program
    with locked(f"go-{built.module.name}"):
        if not path.exists():
            for stale in CACHE.glob(f"go-{built.module.name}-*"):
                if stale != path.parent:
                    shutil.rmtree(stale)
            path.parent.mkdir(exist_ok=True)
            _make(_go(), built.module, path, built.packages[program])
    return path


def own_tests(program: Program) -> subprocess.CompletedProcess[str]:
    """What `go test` says of the program's module; raises `Missing` where there is no Go."""
    command = [_go(), "test", "./..."]
    module = MODULES[program].module
    return subprocess.run(command, cwd=module, capture_output=True, text=True, timeout=BUILT_WITHIN_S, check=False)


def build_tests(program: Program, path: Path) -> Path:
    """Build the tests and benchmarks of the program's module as a program at `path`; raises `Missing` where there is no
    Go, or the build fails."""
    _run_go([_go(), "test", "-c", "-o", str(path)], MODULES[program].module, BUILT_WITHIN_S)
    return path


def has_go() -> bool:
    """Whether there is a Go that could build them."""
    return _found_go() is not None


def _found_go() -> str | None:
    return shutil.which("go") or next(filter(os.path.exists, GO_PLACES), None)


def _go() -> str:
    found = _found_go()
    if found is None:
        raise Missing("there is no Go (go) on the PATH")
    return found


def _folder(built: Built) -> Path:
    digest = hashlib.sha256()
    for file in sorted(built.module.iterdir()):
        if file.is_file() and file.suffix != ".md" and not file.name.endswith("_test.go"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return CACHE / f"go-{built.module.name}-{digest.hexdigest()[:12]}"


def _unfetched(path: Path) -> Path:
    """The mark that the modules of the program at `path` could not be fetched."""
    return path.with_suffix(".unfetched")


def _make(go: str, module: Path, path: Path, package: str) -> None:
    try:
        _run_go([go, "mod", "download"], module, FETCHED_WITHIN_S)
    except Missing as missing:
        _unfetched(path).touch()
        raise Unfetched(f"the modules of {path.name} could not be fetched: {missing}") from None
    _unfetched(path).unlink(missing_ok=True)
    unfinished = path.with_suffix(".new")
    options = ["-trimpath", "-ldflags=-s -w", "-o", str(unfinished)]
    _run_go([go, "build", *options, package], module, BUILT_WITHIN_S)
    os.replace(unfinished, path)


def _run_go(command: list[str], module: Path, within_s: float) -> None:
    try:
        result = subprocess.run(command, cwd=module, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"go {command[1]} did not end within {within_s:g} s") from None
    if result.returncode:
        raise Missing(f"go {command[1]} failed: {' '.join(result.stderr.split()[-40:])}")
