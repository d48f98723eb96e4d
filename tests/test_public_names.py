"""The public names: they are there, they are described, they cost nothing until used, and the guides need no others."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FACES = (
    "tidewal",
    "tidewal.runtime",
    "tidewal.runtime.testing",
    "tidewal.adapters",
    "tidewal.actors",
    "tidewal.spark_bridge",
)
SUITE = "tidewal.runtime.testing.conformance"  # for pytest; public, too
LIGHT = (*FACES, "tidewal.adapters.kafka", "tidewal.adapters.pulsar", "tidewal.adapters.rocksmq")
HEAVY = ("aiokafka", "deltalake", "numpy", "pandas", "pulsar", "pyarrow", "pydantic", "pyspark", "rocksdict", "uvloop")


@pytest.mark.parametrize("package", [*LIGHT, SUITE])
def test_every_public_name_is_there_and_described(package: str) -> None:
    module = import_module(package)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{package}.{name} has no docstring"
        assert value is getattr(module, name), f"{package}.{name} is another thing each time"
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name


@pytest.mark.parametrize("package", [*LIGHT, SUITE])
def test_no_public_name_is_that_of_a_module_beside_it(package: str) -> None:
    """The import of that module would put it where the name was. `tidewal.errors` is a module under both."""
    clashes = [name for name in import_module(package).__all__ if importlib.util.find_spec(f"{package}.{name}")]
    assert clashes == (["errors"] if package == "tidewal" else [])


def test_errors_are_the_same_however_they_are_imported() -> None:
    assert classes_of("tidewal.errors") == classes_of("tidewal.runtime.errors")


def classes_of(module: str) -> dict[str, type]:
    """The public classes that a module has."""
    found = vars(import_module(module)).items()
    return {name: value for name, value in found if isinstance(value, type) and not name.startswith("_")}


@pytest.mark.parametrize("package", FACES)
def test_type_checkers_see_the_names_that_python_sees(package: str) -> None:
    for_checkers: dict[str, set[str]] = {}
    for_python: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(import_module(package).__file__ or "").read_text())):
        if isinstance(node, ast.ImportFrom) and all(name.asname == name.name for name in node.names):
            for_checkers["." * node.level + (node.module or "")] = {name.name for name in node.names}
        elif isinstance(node, ast.Dict):
            homes: dict[str, str] = ast.literal_eval(node)
            for_python = {home: set(names.split()) for home, names in homes.items()}
    assert for_checkers == for_python != {}


def test_importing_the_packages_imports_nothing_heavy() -> None:
    program = f"import sys, {', '.join(LIGHT)}\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(LIGHT) <= set(loaded)
    assert [name for name in HEAVY if name in loaded] == []


def guides() -> Iterator[tuple[str, str]]:
    """Each program of the guides, with the name of its page."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            yield page.name, code
    for notebook in sorted((ROOT / "examples").rglob("*.ipynb")):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield notebook.name, "".join(cell["source"])
    for path in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs" / "examples").rglob("*.py")]):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def names_not_public(code: str) -> list[str]:
    """What of Tidewal `code` imports, or takes from `tidewal`, that is not public."""
    used: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            used += [(node.module, name.name) for name in node.names]
        elif isinstance(node, ast.Import):
            used += [(name.name, "") for name in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.append((node.value.id, node.attr))
    ours = [(module, name) for module, name in used if module.partition(".")[0] == "tidewal"]
    return [f"{module}.{name}" for module, name in ours if not is_public(module, name)]


def is_public(module: str, name: str) -> bool:
    return module in (*FACES, SUITE) and (name in ("", "*") or name in import_module(module).__all__)


def test_the_guides_use_public_names_only() -> None:
    programs = list(guides())
    assert {"README.md", "streams.md", "spark.ipynb", "examples/flights/story.py"} <= {page for page, _ in programs}
    assert {(page, name) for page, code in programs for name in names_not_public(code)} == set()


# Packages, modules, classes and functions. Loggers, properties of tables and files also begin with `tidewal.`.
NAMED = re.compile(
    r"(?<![\w./-])tidewal\.(?:(?:runtime|adapters|actors|spark_bridge|cli|errors)\b|[A-Z]\w*|\w+(?=\())(?:\.[A-Za-z_]\w*)*"
)


def test_the_words_of_the_guides_name_nothing_else() -> None:
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))
    named = {(page.name, name) for page in pages for name in names_in(page.read_text(encoding="utf-8"))}
    assert {("metrics.md", "tidewal.Standalone.metrics_app"), ("backends.md", SUITE)} <= named
    assert {(page, name) for page, name in named if not is_reachable(name)} == set()


def names_in(text: str) -> list[str]:
    return NAMED.findall(text)


def is_reachable(name: str) -> bool:
    """Whether a face is named, or something that one has: a public name, and then its attributes."""
    if name in (*FACES, SUITE):
        return True
    face = max((face for face in (*FACES, SUITE) if name.startswith(f"{face}.")), key=len)
    first, *rest = name.removeprefix(f"{face}.").split(".")
    if first not in import_module(face).__all__:
        return False
    value = getattr(import_module(face), first)
    for each in rest:
        if not hasattr(value, each):
            return False
        value = getattr(value, each)
    return True


@pytest.mark.parametrize(
    "name", ["tidewal.runtime.log.wal", "tidewal.adapters.kafka", "tidewal.errors.NoSuchError", "tidewal.NoSuchClass"]
)
def test_a_private_word_is_found(name: str) -> None:
    assert names_in(f"see `{name}`") == [name]
    assert not is_reachable(name)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from tidewal.runtime.log.wal import Wal", "tidewal.runtime.log.wal.Wal"),
        ("from tidewal.runtime.errors import Closed", "tidewal.runtime.errors.Closed"),
        ("from tidewal.adapters.rocksmq import RocksMQ", "tidewal.adapters.rocksmq.RocksMQ"),
        ("from tidewal import Payload", "tidewal.Payload"),
        ("import tidewal.runtime.clock", "tidewal.runtime.clock."),
        ("import tidewal\ntidewal.add_ms(1, 2)", "tidewal.add_ms"),
    ],
)
def test_a_name_that_is_not_public_is_found(code: str, name: str) -> None:
    assert names_not_public(code) == [name]
