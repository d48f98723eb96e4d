"""What tests import from Tidewal, and call: pyright does not read tests, for which it would take minutes.

    python -m tests.calls

An import that is not there, an attribute that a module or class does not have, and a call whose arguments do not fit
are named, each with its line, and the exit status is 1. What is called on objects is not known here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent
PACKAGE = "tidewal"
_UNKNOWN = object()


class Calls(ast.NodeVisitor):
    """Reads one file; `found` has each fault with its line. A name that the file also binds by itself is left alone."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[tuple[int, str]] = set()
        self._known: dict[str, object] = {}
        self._bound = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and _binds(each)}
        self._bound |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module or ""):
                self._import_from(node)
            elif isinstance(node, ast.Import):
                self._import(node)
        self.visit(tree)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            if alias.name == "*":
                continue
            try:
                self._known[alias.asname or alias.name] = _member(module, alias.name)
            except AttributeError:
                self.found.add((node.lineno, f"{node.module} has no {alias.name}"))

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_ours(alias.name):
                module = importlib.import_module(alias.name)
                self._known[alias.asname or PACKAGE] = module if alias.asname else sys.modules[PACKAGE]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._value(node.func)
        if called is not _UNKNOWN and (fault := _unfit(called, node)):
            self.found.add((node.lineno, f"{ast.unparse(node.func)}(...): {fault}"))

    def _value(self, node: ast.expr) -> object:
        """What an expression of imported names is."""
        if isinstance(node, ast.Name):
            return _UNKNOWN if node.id in self._bound else self._known.get(node.id, _UNKNOWN)
        if not isinstance(node, ast.Attribute):
            return _UNKNOWN
        owner = self._value(node.value)
        if not isinstance(owner, (ModuleType, type)):
            return _UNKNOWN
        try:
            return _member(owner, node.attr)
        except AttributeError:
            if isinstance(node.ctx, ast.Load) and not _may_be_set(owner, node.attr):
                self.found.add((node.lineno, f"{owner.__name__} has no {node.attr}"))
            return _UNKNOWN


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def _binds(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _member(owner: ModuleType | type, name: str) -> object:
    try:
        return getattr(owner, name)
    except AttributeError:
        if not isinstance(owner, ModuleType):
            raise
    try:
        return importlib.import_module(f"{owner.__name__}.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(name) from error


def _may_be_set(owner: ModuleType | type, name: str) -> bool:
    """Whether instances have it, which a class says by its annotations."""
    return isinstance(owner, type) and any(name in vars(each).get("__annotations__", {}) for each in owner.__mro__)


def _unfit(called: object, node: ast.Call) -> str:
    """Why the arguments of a call do not fit; "" where they do, or that is not known."""
    try:
        signature = inspect.signature(called)  # pyright: ignore[reportArgumentType] -- what is not callable raises
    except (TypeError, ValueError):
        return ""
    given = [each for each in node.args if not isinstance(each, ast.Starred)]
    fields = getattr(called, "model_fields", ())  # of settings: they take these names beside those of the signature
    named = [each.arg for each in node.keywords if each.arg is not None and each.arg not in fields]
    is_whole = len(given) == len(node.args) and all(each.arg is not None for each in node.keywords)
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*given, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    return ""


def faults(path: Path) -> list[str]:
    """What is wrong in the file at `path`, a line for each."""
    return [f"{path}:{line}: {fault}" for line, fault in sorted(Calls(ast.parse(path.read_text())).found)]


def files(root: Path = ROOT) -> Iterator[Path]:
    """The Python files below `root`."""
    return iter(sorted(root.rglob("*.py")))


def main(paths: Sequence[str]) -> int:
    """Print the faults in the files at `paths`, of all tests where there are none; the exit status."""
    found = [fault for path in (map(Path, paths) if paths else files()) for fault in faults(path)]
    print("\n".join(found) or "the calls in tests fit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
