"""The examples of the guides work, and print what the page says they print.

Each ```python block is a program of its own, run in an empty directory; then the tests that it defines are. A ```text
block right behind one is what it prints.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "actors.md",
    "collections.md",
    "delays.md",
    "groups.md",
    "metrics.md",
    "retries.md",
    "growing-topics.md",
    "streams.md",
    "testing.md",
    "topics.md",
    "transactions.md",
    "windows.md",
)
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    code: str
    printed: str


def examples_of(page: str) -> list[Example]:
    return [Example(*found) for found in EXAMPLE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))]


def run(code: str, directory: Path) -> int:
    """Run an example, then the tests it defines; returns how many. One with fixtures is run by pytest."""
    if "@pytest.fixture" in code:
        (directory / "test_example.py").write_text(code, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return 1
    defined: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "example", "exec"), defined)
    tests = [each for name, each in defined.items() if name.startswith("test_") and inspect.isfunction(each)]
    for test in tests:
        test(**dict.fromkeys(inspect.signature(test).parameters, directory))
    return len(tests)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=f"{page}-{number}")
        for page in PAGES
        for number, example in enumerate(examples_of(page), 1)
    ],
)
def test_the_example_runs_and_prints_what_the_page_says(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tests = run(example.code, tmp_path)
    assert tests or example.printed, "the example shows nothing"
    assert capsys.readouterr().out == example.printed


def test_the_example_on_object_storage_prints_what_the_page_says(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [example] = examples_of("object-storage.md")
    run(example.code.replace("s3://my-bucket", bucket), tmp_path)
    assert capsys.readouterr().out == example.printed


@pytest.mark.parametrize("wrong", ["assert False", "def test_it(tmp_path):\n    assert False"])
def test_an_example_that_fails_is_seen(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(wrong, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_the_page_is_found(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert len(examples_of(page)) == text.count("```python") > 0
