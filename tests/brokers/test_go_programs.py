"""How programs in Go are built and found, with a Go that is a script of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from . import go_programs, jars
from .go_programs import Built, build_program, find_program
from .woodpecker_fixtures import require_program


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of two programs, an empty cache, and no Go."""
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "go.mod").write_text("module one")
    built = Built(folder, {"sidecar": ".", "etcd": "other/package"})
    monkeypatch.setattr(go_programs, "MODULES", {"sidecar": built, "etcd": built})
    monkeypatch.setattr(go_programs, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(jars, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(go_programs, "GO_PLACES", ())
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CI", raising=False)
    return folder


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a program called go on the PATH, which has all modules; `$5` is the file that it is to write, `$6` the
    package."""

    def put(script: str, *, unfetched: int = 0) -> None:
        program = tmp_path / "bin" / "go"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n[ "$1" = mod ] && exit {unfetched}\n{script}')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return put


def test_what_go_builds_is_kept_and_go_is_not_asked_again(go: Callable[..., None]) -> None:
    go('echo "$6" > "$5"')
    assert build_program("etcd").read_text() == "other/package\n"
    assert build_program("sidecar").parent == build_program("etcd").parent
    go("exit 1")
    assert find_program("etcd") == build_program("etcd")


def test_a_changed_module_is_built_anew_and_the_old_folder_goes(module: Path, go: Callable[..., None]) -> None:
    go('echo "$6" > "$5"')
    old = build_program("sidecar")
    (module / "go.mod").write_text("module two")
    (module / "README.md").write_text("says nothing to Go")
    new = build_program("sidecar")
    assert new != old
    assert not old.exists()
    (module / "README.md").write_text("says it better")
    assert find_program("sidecar") == new


def test_a_build_that_fails_leaves_nothing_and_says_why(go: Callable[..., None]) -> None:
    go('echo half > "$5"; echo "main.go:1: what is this" >&2; exit 1')
    with pytest.raises(jars.Missing, match="what is this"):
        build_program("sidecar")
    with pytest.raises(jars.Missing, match="make setup"):
        find_program("sidecar")


def test_without_go_tests_are_skipped_and_with_it_ci_needs_the_program(
    go: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.skip.Exception, match="Woodpecker is not tested: there is no Go"):
        require_program("sidecar")
    go("exit 1")
    with pytest.raises(pytest.fail.Exception, match="CI needs sidecar"):
        require_program("sidecar")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="make setup"):
        require_program("sidecar")


def test_without_a_network_tests_are_skipped_in_ci_too(
    go: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    go('echo "$6" > "$5"', unfetched=1)
    with pytest.raises(go_programs.Unfetched, match="could not be fetched"):
        build_program("sidecar")
    with pytest.raises(pytest.skip.Exception, match="Woodpecker is not tested: the modules of sidecar"):
        require_program("sidecar")
    go('echo "$6" > "$5"')
    build_program("sidecar")
    assert require_program("sidecar").exists()
