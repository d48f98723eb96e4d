"""The examples of `examples/`: as modules, and as programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.commands import Start, as_processes

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load() -> Callable[[str], ModuleType]:
    """Imports an example, named by its path below `examples/`."""

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", EXAMPLES / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the program `PROGRAM` of the test's module, a path below `examples/`, in an empty directory."""
    with as_processes("-W", "error", str(EXAMPLES / request.module.PROGRAM), cwd=tmp_path) as start:
        yield start
