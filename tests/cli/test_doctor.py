"""The command line's frame, and `tidewal doctor`."""

from __future__ import annotations

import json
import stat
from importlib import metadata
from pathlib import Path

import pytest
import typer

from tidewal.adapters.rocksmq import machine_checks
from tidewal.cli import doctor as doctor_module
from tidewal.cli.doctor import examine
from tidewal.cli.main import main
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.backend import Check
from tidewal.spark_bridge.helpers.jdk import Java, find_java


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def fake_java(folder: Path, version: str, *, status: int = 0) -> Path:
    """A program that answers like `java -version`."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '    java.home = {folder}' >&2\necho '{version}' >&2\nexit {status}\n")
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return folder


def test_everything_that_the_package_requires_is_looked_at():
    names = {check.name for check in examine()}
    assert {"Python", "pyarrow", "rocksdict", "uvloop", "aiokafka", "pyspark", "Java", "free disk"} <= names
    assert "tidewal[node,kafka,pulsar,spark]" not in names


def test_this_machine_has_what_the_tests_run_with():
    found = {check.name: check for check in examine()}
    for name in ("Python", "tidewal", "pyarrow", "rocksdict", "deltalake", "uvloop", "Unix sockets"):
        assert found[name].status == "ok", found[name]
    assert found["pyarrow"].found == metadata.version("pyarrow")


@pytest.mark.slow
def test_json_says_the_same_and_the_status_is_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert run("doctor", "--json", "--path", str(tmp_path)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {check.name for check in examine()}
    assert set(rows[0]) == {"name", "status", "found", "advice"}


def test_table_shows_each_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    checks = [Check("Python", "ok", "3.11"), Check("Java", "optional", "", "pip install a[b]")]
    monkeypatch.setattr(doctor_module, "examine", lambda path: checks)
    assert run("doctor") == 0
    shown = capsys.readouterr().out
    assert "Python" in shown
    assert "pip install a[b]" in shown


def test_something_missing_makes_the_status_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(machine_checks, "MINIMAL_FREE_BYTES", 1 << 62)
    assert run("doctor", "--json") == 1
    disk = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "free disk")
    assert disk["status"] == "missing"
    assert "rocksmq.path" in disk["advice"]


def test_an_absent_directory_is_judged_by_its_disk(tmp_path: Path):
    disk = next(check for check in examine(tmp_path / "not" / "there") if check.name == "free disk")
    assert str(tmp_path) in disk.found


def test_a_compiled_library_that_does_not_load_is_missing(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> None:
        raise ImportError(f"{name}: wrong ELF class")

    monkeypatch.setattr(doctor_module.importlib, "import_module", refuse)
    check = next(check for check in examine() if check.name == "rocksdict")
    assert check.status == "missing"
    assert "wrong ELF class" in check.found


@pytest.mark.parametrize(
    ("version", "major", "suffices"),
    [("17.0.15", 17, True), ("21", 21, True), ("11.0.2", 11, False), ("1.8.0_402", 8, False)],
)
def test_java_versions(version: str, major: int, suffices: bool):
    java = Java(Path("java"), Path(), version)
    assert (java.major, java.suffices) == (major, suffices)


def test_java_home_comes_before_path(tmp_path: Path):
    home = fake_java(tmp_path / "home", 'openjdk version "21.0.1" 2023-10-17')
    other = fake_java(tmp_path / "other", 'openjdk version "17.0.15" 2025-04-15')
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert found == Java(home / "bin" / "java", home, "21.0.1")


def test_an_old_java_home_yields_to_a_newer_java_on_path(tmp_path: Path):
    old = fake_java(tmp_path / "old", 'java version "1.8.0_402"')
    new = fake_java(tmp_path / "new", 'openjdk version "17.0.15" 2025-04-15')
    both = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert both is not None
    assert both.major == 17
    only_old = find_java({"JAVA_HOME": str(old), "PATH": ""})
    assert only_old is not None
    assert not only_old.suffices


@pytest.mark.parametrize("answer", ["no such thing", 'version ""'])
def test_what_does_not_answer_like_java_is_none(tmp_path: Path, answer: str):
    broken = fake_java(tmp_path / "broken", answer)
    failing = fake_java(tmp_path / "failing", 'openjdk version "17"', status=1)
    assert find_java({"JAVA_HOME": str(broken), "PATH": str(failing / "bin")}) is None
    assert find_java({"JAVA_HOME": str(tmp_path / "absent"), "PATH": ""}) is None


def test_our_own_errors_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str]):
    application = typer.Typer()

    @application.command()
    def tail() -> None:
        raise PositionLost("retention removed\nthe position", requested=3)

    with pytest.raises(SystemExit) as caught:
        main([], application)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "tidewal: PositionLost: retention removed the position\n"
    assert captured.out == ""


def test_a_defect_keeps_its_traceback():
    application = typer.Typer(pretty_exceptions_enable=False)

    @application.command()
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main([], application)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert run("frobnicate") == 2
    assert "frobnicate" in capsys.readouterr().err
