"""The command line's frame: what the help says and loads, the version, and names that are misspelt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tidewal.cli import connect
from tidewal.cli.main import COMMANDS, load

HELP = """
import sys
from tidewal.cli.main import main
try:
    main(["--help"])
finally:
    print(*sys.modules, file=sys.stderr)
"""
OWN = {
    "tidewal",
    "tidewal.cli",
    "tidewal.cli.main",
    "tidewal.cli.one_line",
    "tidewal.runtime",
    "tidewal.runtime.errors",
    "tidewal.runtime.extras",
    "tidewal.runtime.lazy",
}
HEAVY = {
    *("aiokafka", "anyio", "asyncio", "deltalake", "importlib.metadata", "lark", "msgpack", "numpy", "pandas"),
    *("prometheus_client", "pulsar", "pyarrow", "pydantic", "pyspark", "rocksdict", "uvloop", "xxhash", "yaml"),
}
PRINTS_NO_RESULT = {"groups drop", "catalog export"}  # the one is silent, the other prints nothing but JSON


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_the_help_loads_no_command_and_nothing_heavy():
    ended = python("-c", HELP)
    assert all(f" {name} " in ended.stdout for name in COMMANDS)
    loaded = set(ended.stderr.split())
    assert {name for name in loaded if name.partition(".")[0] == "tidewal"} == OWN
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str):
    first = load(name).help.partition("\n\n")[0]
    assert COMMANDS[name] == " ".join(first.split())


def test_the_package_is_the_command_too():
    assert python("-m", "tidewal", "--version").stdout == f"tidewal {metadata.version('tidewal')}\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["verfy"], "'verify'"),
        (["groups", "lst"], "'list'"),
        (["run", "--metric-port", "0"], "--metrics-port"),
        (["inspect", "--no-cuont", "x"], "--no-count"),
        (["inspect", "cluster", "--jsn", "x"], "--json"),
        (["groups", "list", "--jsn", "x"], "--json"),
        (["query", "x", "c", "--consistency", "strnog"], "'strong'"),
        (["search", "x", "c", "v", "[1]", "--metric", "cosin"], "'cosine'"),
        (["insert", "x", "c", "-", "--format", "parqet"], "'parquet'"),
        (["tail", "x", "c", "--from", "lates"], "'latest'"),
        (["tail", "x", "c", "--log-level", "wran"], "'warn'"),
        (["run", "--log-format", "jsn"], "'json'"),
        (["spark", "export", "x", "c", "d", "--format", "ocr"], "'orc'"),
        (["config", "explain", "log.levl"], "'log.level'"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(command: Command, arguments: list[str], meant: str):
    ended = command(*arguments)
    assert ended.status == 2
    assert meant in " ".join(ended.err.replace("│", " ").split())


def leaves() -> Iterator[tuple[str, Any]]:
    """All commands, those of groups by both names."""
    for name in COMMANDS:
        command = load(name)
        if not hasattr(command, "commands"):
            yield name, command
        else:
            yield from ((f"{name} {each}", leaf) for each, leaf in command.commands.items())


def test_every_command_that_prints_a_result_prints_it_as_json_too():
    without = {name for name, leaf in leaves() if not any("--json" in param.opts for param in leaf.params)}
    assert without == PRINTS_NO_RESULT


# What each command needs behind the log to get as far as opening it.
BEHIND_THE_LOG = {
    "create": ["c", "--field", "id:int64", "--primary-key", "id"],
    "list": [],
    "describe": ["c"],
    "load": ["c"],
    "release": ["c"],
    "drop": ["c", "--yes"],
    "insert": ["c", "-"],
    "apply": ["c", "-"],
    "delete": ["c", "--key", "1"],
    "query": ["c"],
    "search": ["c", "v", "[1]"],
    "compact": ["c"],
    "send": ["c", "message"],
    "status": [],
    "tail": ["c"],
    "inspect content": [],
    "inspect cluster": [],
    "evict": ["n"],
    "drain": ["n"],
    "cordon": ["n"],
    "uncordon": ["n"],
    "move": ["c", "n"],
    "pin": ["c", "n"],
    "balance": [],
    "level": [],
    "catalog export": [],
    "catalog import": [Path(__file__).parent / "catalog_export.json"],
    "topics create": ["t"],
    "topics list": [],
    "topics describe": ["t"],
    "topics alter": ["t", "--partitions", "4"],
    "topics cancel": ["t", "00"],
    "topics drop": ["t", "--yes"],
    "topics send": ["t", "message"],
    "topics tail": ["t"],
    "groups list": [],
    "groups seek": ["g", "c", "latest"],
    "groups drop": ["g"],
    "dlq list": [],
    "dlq replay": ["--all"],
    "dlq drop": ["--all"],
    "dlq show": ["00"],
    "verify journal": [],
    "verify tables": [],
    "verify objects": [],
    "salvage": [],
    "migrate": ["--status"],
    "promote": ["--force"],
    "spark tail": ["c"],
    "spark count": ["c"],
    "spark export": ["c", "d"],
    "spark copy": ["c", "--checkpoint", "x", "--to-collection", "d"],
}


def test_the_commands_that_take_a_log_are_all_named_here():
    taking = {name for name, leaf in leaves() if leaf.params[0].name in ("url", "where", "directory")}
    assert taking == set(BEHIND_THE_LOG)


@pytest.mark.parametrize("name", BEHIND_THE_LOG)
def test_a_path_is_taken_wherever_a_url_is(
    command: Command, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """There is no log at it, which each command says of the path, or of the URL that it means."""
    monkeypatch.setattr(connect, "NODE_S", 0.1)
    missing = tmp_path / "missing"
    ended = command(*name.split(), missing, *BEHIND_THE_LOG[name])
    assert ended.status == 2, ended.out
    assert str(missing) in ended.err
    assert "no adapter" not in ended.err
    assert ended.err.count("\n") == 1
