"""What is known of a backend stands in its adapter: no other code names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("runtime", "actors", "spark_bridge", "cli")
NAMES = re.compile(r"rocks_?mq|kafka|pulsar|woodpecker|memory://", re.IGNORECASE)
MEANT = {
    "runtime/config/defaults.py": "which log an unset `mq.type` means",
    "runtime/testing/memory.py": "the testing kit is the adapter of its log in memory",
    "spark_bridge/source_aliases.py": "the options of Spark's Kafka source are here under other names",
    "cli/verify.py": "`tidewal verify journal` is for RocksMQ's files",
    "cli/salvage.py": "`tidewal salvage` is for RocksMQ's files",
    "cli/stored_catalog.py": "`verify journal` and `salvage` look for the catalog in RocksMQ's files",
}


def named_in(tree: ast.Module) -> Iterator[str]:
    """The names and texts of code in which a backend is named; docstrings may have one as an example."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    for node in ast.walk(tree):
        for text in texts_of(node):
            if id(node) not in docstrings and NAMES.search(text):
                yield f"line {getattr(node, 'lineno', 1)}: {text[:80]}"


def texts_of(node: ast.AST) -> list[str]:
    """Names and literal text of one node."""
    fields = (value for _, value in ast.iter_fields(node))
    return [value for value in fields if isinstance(value, str)]


def modules() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


@pytest.mark.parametrize("floor", FLOORS)
def test_no_code_outside_an_adapter_names_a_backend(floor: str) -> None:
    found = {
        name: list(named_in(ast.parse(path.read_text())))
        for path in sorted((ROOT / floor).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in MEANT
    }
    assert found, "nothing was looked at"
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", MEANT)
def test_what_may_name_one_does(name: str) -> None:
    assert list(named_in(ast.parse((ROOT / name).read_text())))


@pytest.mark.parametrize(
    "code",
    [
        "from ..adapters.kafka import x",
        "import tidewal.adapters.rocksmq",
        "x = 'pulsar://'",
        "f'memory://{x}'",
        "a.kafka",
    ],
)
def test_a_name_in_code_is_found(code: str) -> None:
    assert list(named_in(ast.parse(code)))
    assert not list(named_in(ast.parse(f'"""{code}"""')))
