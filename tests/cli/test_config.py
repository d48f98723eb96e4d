"""`tidewal config`: what a node would run with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Command
from tidewal.runtime.config.loading import known_keys


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of settings, beside a variable of the environment."""
    path = tmp_path / "node.yaml"
    path.write_text("mq: {mqBufSize: 32, pursuitLag: 10}")
    monkeypatch.setenv("TIDEWAL__KAFKA__SASLPASSWORD", "hunter2")
    return path


def test_show_lists_what_is_not_at_its_default(command: Command, file: Path):
    shown = json.loads(command("config", "show", "--config", file, "--metrics-port", 9091, "--json").out)
    assert [(each["key"], each["value"], each["source"]) for each in shown] == [
        ("mq.mqBufSize", 32, str(file)),
        ("kafka.saslPassword", "***", "environment variable TIDEWAL__KAFKA__SASLPASSWORD"),
        ("metrics.port", 9091, "arguments"),
    ]
    everything = json.loads(command("config", "show", "--all", "--json").out)
    assert [each["key"] for each in everything] == list(known_keys())


def test_show_for_people(command: Command, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = command("config", "show", "--config", file, "--wal", "kafka://me:hunter2@broker:1").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["wal", "kafka://***@broker:1"],
        ["mq.mqBufSize", "32"],
        ["kafka.saslPassword", "***"],
    ]
    monkeypatch.delenv("TIDEWAL__KAFKA__SASLPASSWORD")
    assert command("config", "show").out == "all settings are at their defaults\n"


def test_explain_says_all_of_one(command: Command, file: Path):
    told = json.loads(command("config", "explain", "MQ.mqbufsize", "--config", file, "--json").out)
    assert told == {
        "key": "mq.mqBufSize",
        "value": 32,
        "source": str(file),
        "default": 16,
        "type": "integer > 0",
        "meaning": "packs of 4 MiB that a stream buffers, and all collections of a node together",
    }
    text = command("config", "explain", "mq.mqBufSize", "--config", file).out
    assert text.startswith("mq.mqBufSize = 32\n")
    assert f"from     {file}\n" in text


def test_where_log_settings_come_from_is_told_as_it_is(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def sources(*options: str) -> dict[str, str]:
        shown = json.loads(command("config", "show", "--config", path, *options, "--json").out)
        return {each["key"]: each["source"] for each in shown}

    path = tmp_path / "node.yaml"
    path.write_text("log: {level: debug}")
    monkeypatch.setenv("TIDEWAL__LOG__FORMAT", "JSON")
    variable = "environment variable TIDEWAL__LOG__FORMAT"
    assert sources() == {"log.level": str(path), "log.format": variable}
    assert sources("--log-level", "warn") == {"log.level": "arguments", "log.format": variable}
    monkeypatch.setenv("TIDEWAL__LOG__LEVEL", "error")
    assert sources()["log.level"] == "environment variable TIDEWAL__LOG__LEVEL"


def test_a_path_is_taken_as_the_log(command: Command, tmp_path: Path):
    [wal] = json.loads(command("config", "show", "--wal", tmp_path, "--json").out)
    assert wal["value"] == f"rocksmq://{tmp_path}"


def test_a_misspelt_setting_is_answered_with_the_nearest(command: Command):
    ended = command("config", "explain", "mq.mqBufSiz")
    assert (ended.status, ended.err) == (
        2,
        "tidewal: ConfigError: unknown setting 'mq.mqBufSiz'; the nearest known one is 'mq.mqBufSize'\n",
    )
