"""How jars are found and resolved, with a Maven that is a script of ours; no broker needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewal.spark_bridge.helpers.jdk import Java

from . import jars
from .fixtures import require


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a Java that nobody asks for anything."""
    monkeypatch.setattr(jars, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(jars, "find_java", lambda: Java(Path("java"), tmp_path, "17.0.1"))
    return tmp_path / "cache"


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program called mvn on the PATH; `$output` is the file that it is to write the class path into."""

    def put(script: str) -> None:
        program = tmp_path / "bin" / "mvn"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            "#!/bin/sh\nfor each; do case $each in -Dmdep.outputFile=*) output=${each#*=};; esac; done\n" + script
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return put


def test_what_maven_resolves_is_kept_sorted_and_maven_is_not_asked_again(tmp_path: Path, maven: Callable[[str], None]):
    first, second = tmp_path / "a.jar", tmp_path / "b.jar"
    for jar in (first, second):
        jar.touch()
    maven(f'printf %s "{second}:{first}" > "$output"')
    resolved = jars.resolve("kafka")
    assert resolved.command("Main")[1:] == ["-cp", f"{first}:{second}", "Main"]
    maven("exit 1")
    assert jars.resolve("kafka") == resolved
    assert jars.find("kafka") == resolved


def test_a_changed_pom_is_resolved_anew_and_the_old_folder_goes(
    tmp_path: Path, cache: Path, maven: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    maven(f'printf %s "{tmp_path}" > "$output"')
    old = jars.resolve("kafka").folder
    old_pulsar = jars.resolve("pulsar").folder
    jars.resolve("kafka").make("made", lambda path: path.mkdir())
    monkeypatch.setattr(jars, "POMS", tmp_path)
    (tmp_path / "kafka.xml").write_text("<project/>")
    with pytest.raises(jars.Missing):
        jars.find("kafka")
    new = jars.resolve("kafka").folder
    assert new != old
    assert {path for path in cache.iterdir() if path.is_dir()} == {new, old_pulsar}


def test_a_failure_of_maven_is_said_and_may_be_tried_again(tmp_path: Path, maven: Callable[[str], None]):
    maven("echo '[INFO] hm'; echo '[ERROR] cannot reach anything'; exit 1")
    with pytest.raises(jars.Missing, match=r"Maven cannot resolve the jars of pulsar: \[ERROR\] cannot reach anything"):
        jars.resolve("pulsar")
    maven(f'printf %s "{tmp_path}" > "$output"')
    jars.resolve("pulsar")


def test_what_is_made_is_made_once_and_whole(tmp_path: Path, maven: Callable[[str], None]):
    maven(f'printf %s "{tmp_path}" > "$output"')
    found = jars.resolve("kafka")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        found.make("made", fail)
    assert [path.name for path in found.folder.iterdir()] == ["classpath"]
    assert found.make("made", lambda path: path.write_text("whole")).read_text() == "whole"
    assert found.make("made", fail).read_text() == "whole"


def test_the_archive_of_another_java_is_another(tmp_path: Path):
    archives = {
        jars.Jars(Java(Path("java"), home, version), tmp_path).archive
        for home in (tmp_path, tmp_path / "other")
        for version in ("17.0.1", "21.0.1")
    }
    assert len(archives) == 4


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(jars.Missing, match="the jars of kafka are not there: run `make setup`"):
        jars.find("kafka")
    monkeypatch.setattr(jars.shutil, "which", lambda _: None)
    with pytest.raises(jars.Missing, match="no Maven"):
        jars.resolve("kafka")
    monkeypatch.setattr(jars, "find_java", lambda: None)
    with pytest.raises(jars.Missing, match="no Java 17"):
        jars.resolve("kafka")


def test_a_jar_that_is_gone_is_noticed(tmp_path: Path):
    folder = jars._folder("pulsar")
    folder.mkdir(parents=True)
    (folder / "classpath").write_text(str(tmp_path / "lost.jar"))
    with pytest.raises(jars.Missing, match=r"1 jars of pulsar are gone, .*lost\.jar"):
        jars.find("pulsar")


def test_a_missing_broker_skips_and_fails_in_ci_where_there_is_an_adapter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr("tests.brokers.fixtures.entry_points", lambda **_: [])
    with pytest.raises(pytest.skip.Exception, match="make setup"):
        require("kafka")
    monkeypatch.setattr("tests.brokers.fixtures.entry_points", lambda **_: ["an adapter"])
    with pytest.raises(pytest.fail.Exception, match="CI needs kafka"):
        require("kafka")
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception):
        require("kafka")
