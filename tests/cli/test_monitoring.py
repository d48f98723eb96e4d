"""`monitoring`: the files that the package brings for Prometheus and Grafana."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import Command
from tidewal.cli.monitoring import SHIPPED

COMPOSE = Path(__file__).parents[2] / "compose"


def test_the_files_of_compose_are_written_and_replaced(command: Command, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "monitoring"
    for _ in range(2):
        ended = command("monitoring", directory, "--force", "--json")
        assert ended.status == 0, ended.err
        written = [Path(path) for path in json.loads(ended.out)]
        assert [path.read_text() for path in written] == [(COMPOSE / name).read_text() for name in SHIPPED]
        assert sorted(path.name for path in directory.iterdir()) == ["alerts.yml", "tidewal.json"]
        written[0].write_text("old")


def test_a_file_that_was_edited_is_replaced_by_force_only(command: Command, tmp_path: Path) -> None:
    for _ in range(2):  # what is the same is no loss
        assert str(tmp_path / "alerts.yml") in command("monitoring", tmp_path).out
    (tmp_path / "alerts.yml").write_text("edited")
    (tmp_path / "tidewal.json").unlink()
    ended = command("monitoring", tmp_path)
    assert ended.status == 2
    assert f"InvalidRequest: {tmp_path}/alerts.yml would be replaced" in ended.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["edited"]


def test_a_directory_that_cannot_be_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = command("monitoring", tmp_path / "file")
    assert ended.status == 2
    assert f"DirectoryUnwritable: {tmp_path}/file cannot be written" in ended.err
