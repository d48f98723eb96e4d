"""What the README tells a newcomer to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import tracebacks
from tidewal import connect_sync
from tidewal.actors.standalone import standalone
from tidewal.runtime.log.loop_thread import LoopThread

ROOT = Path(__file__).parents[1]


def examples() -> tuple[str, str, str]:
    rows, events, spark = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return rows, events, spark


@contextmanager
def node(directory: Path) -> Iterator[None]:
    loop = LoopThread("node-of-the-test")
    with loop.entered(standalone(directory / "data")):
        yield
    loop.end()


@pytest.mark.slow
def test_the_examples_run_and_go_on_where_they_were(tmp_path: Path) -> None:
    rows, events, _ = examples()
    with node(tmp_path):
        for _ in range(2):
            assert run(rows, tmp_path) == "[{'id': 2, 'name': 'Porto'}]\n"
    for _ in range(2):
        assert run(events, tmp_path) == "[b'THE TIDE']\n"


@pytest.mark.slow
@pytest.mark.spark
def test_spark_reads_what_the_first_example_wrote(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    rows, _, spark = examples()
    with node(tmp_path), connect_sync(tmp_path / "data") as client:
        run(rows, tmp_path)
        client.cut("cities")  # the newest stored one may be half a second old
        printed = run(spark, tmp_path, warnings="default")  # Spark's own, at its end
    assert "|  1|Cádiz|\n|  2|Porto|\n" in printed


def run(example: str, directory: Path, warnings: str = "error") -> str:
    """What an example prints in a process of its own."""
    command = [sys.executable, "-W", warnings, "-c", example]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not tracebacks(done.stderr), done.stderr  # on a busy machine it may say that the loop was blocked
    return done.stdout


def test_every_page_that_the_readme_and_the_docs_name_exists() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} names {target}, which is not there"


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the README names make {target}"


@pytest.mark.parametrize("name", ["guarantees.md", "backends.md"])
def test_every_test_that_the_page_names_exists(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    modules = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "runtime" / "testing" / "conformance").glob("*.py")]
    files = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    for path in re.findall(r"`((?:tests|runtime)/[^`]+\.py)`", page):
        assert (ROOT / path).exists(), f"{name} names {path}, which is not there"
    for test in re.findall(r"`(test_\w+)`", page):
        assert f"def {test}(" in files, f"{name} names {test}, which is not there"
