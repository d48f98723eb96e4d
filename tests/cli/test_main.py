"""The command line's frame: what the help says and loads, the version, and names that are misspelt."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from tests.commands import Command
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
    "tidewal.runtime",
    "tidewal.runtime.errors",
    "tidewal.runtime.extras",
    "tidewal.runtime.lazy",
}
HEAVY = {"anyio", "asyncio", "deltalake", "importlib.metadata", "numpy", "pandas", "pyarrow", "pydantic", "yaml"}


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
        (["groups", "list", "--jsn", "x"], "--json"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(command: Command, arguments: list[str], meant: str):
    ended = command(*arguments)
    assert ended.status == 2
    assert meant in ended.err
