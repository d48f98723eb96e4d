"""`tidewal doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..runtime.extras import install_command
from ..runtime.log.backend import Check
from ..runtime.log.opening import installed_backends
from ..spark_bridge.helpers.jdk import MINIMAL_JAVA, Java, find_java
from .results import AsJson

__all__ = ["Check", "Java", "doctor", "examine", "find_java"]

MINIMAL_PYTHON = (3, 11)

# These load compiled code, which may be installed and still not run on this machine.
COMPILED = ("deltalake", "pyarrow", "rocksdict", "uvloop")


def doctor(
    path: Annotated[Path, typer.Option(help="Directory of the future log; its disk is checked.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Show what is installed, what is missing, and what to do about it.

    The exit status is 1 where something is missing that Tidewal cannot run without.
    """
    checks = examine(path)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    if any(check.status == "missing" for check in checks):
        raise typer.Exit(1)


def examine(path: Path = Path()) -> list[Check]:
    """Run all checks below `path`; a missing thing is a result, not an error."""
    return [_python(), *_distributions(), _java(find_java()), *_backends(path)]


def _print_table(checks: list[Check]) -> None:
    table = Table("", "what", "found", "what to do", box=None)
    marks = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "optional": "[yellow]optional[/]"}
    for check in checks:
        table.add_row(marks[check.status], *(Text(cell) for cell in (check.name, check.found, check.advice)))
    Console().print(table)


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info[:2] >= MINIMAL_PYTHON:
        return Check("Python", "ok", found)
    wanted = ".".join(str(part) for part in MINIMAL_PYTHON)
    return Check("Python", "missing", found, f"install Python {wanted} or newer")


def _distributions() -> Iterator[Check]:
    """Check what the installed package itself says that it needs, the extras' requirements as optional."""
    try:
        requirements = metadata.requires("tidewal") or []
    except metadata.PackageNotFoundError:
        yield Check("tidewal", "missing", "", "install the package: pip install tidewal")
        return
    yield Check("tidewal", "ok", metadata.version("tidewal"))
    extras: dict[str, str] = {}
    for requirement in requirements:
        name, extra = _parse(requirement)
        if name == "tidewal" or extra == "all":
            continue
        if extra is None:
            yield _distribution(name, None)
        else:
            extras.setdefault(name, extra)
    for name, extra in extras.items():
        yield _distribution(name, extra)


def _parse(requirement: str) -> tuple[str, str | None]:
    """Split `aiokafka<1,>=0.14; extra == "kafka"` into the name and the extra."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    extra = re.search(r"""extra\s*==\s*["']([^"']+)""", requirement)
    assert name is not None
    return name[0], extra[1] if extra else None


def _distribution(name: str, extra: str | None) -> Check:
    try:
        version = metadata.version(name)
        if name in COMPILED:
            importlib.import_module(name)
    except metadata.PackageNotFoundError:
        if extra is None:
            return Check(name, "missing", "", f"pip install {name}")
        return Check(name, "optional", "", f"for {extra}: {install_command(extra)}")
    except ImportError as error:
        return Check(name, "missing", f"does not load: {error}", f"pip install --force-reinstall {name}")
    return Check(name, "ok", version)


def _backends(path: Path) -> Iterator[Check]:
    for backend in installed_backends():
        yield from backend.checks(path)


def _java(java: Java | None) -> Check:
    advice = f"for Spark: install a JDK {MINIMAL_JAVA} or newer and set JAVA_HOME"
    if java is None:
        return Check("Java", "optional", "", advice)
    found = f"{java.version} in {java.home}"
    return Check("Java", "ok", found) if java.suffices else Check("Java", "optional", found, advice)
