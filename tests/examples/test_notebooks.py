"""The notebooks of `examples/notebooks` run from the first cell to the last one, and print what they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

pytestmark = [pytest.mark.slow, pytest.mark.spark]

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 300  # the start of Spark, on a busy machine


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def printed(cell: Any) -> str:
    """What a cell has printed; Spark's and Python's words on stderr differ from run to run."""
    outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    assert {each.output_type for each in outputs} <= {"stream"}, "what is not printed would not be compared"
    return "".join(each.text for each in outputs)


def run(notebook: Any, directory: Path) -> Any:
    """The notebook as it is after all its cells have run in a kernel of its own."""
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    )
    return client.execute()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem == "tables" else pytest.mark.long) for path in NOTEBOOKS],
)
def test_the_notebook_runs_and_prints_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_home: None
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ran = run(read(path), tmp_path)
    shown = [printed(cell) for cell in read(path).cells if cell.cell_type == "code"]
    assert [printed(cell) for cell in ran.cells if cell.cell_type == "code"] == shown
    assert any(shown)


@pytest.fixture
def unused_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps its connection's file and its history where the test leaves nothing behind."""
    for variable, folder in (("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython")):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / folder))


def test_a_notebook_that_shows_something_else_is_seen(tmp_path: Path, unused_home: None) -> None:
    cell = nbformat.v4.new_code_cell("print(1 + 1)")
    assert printed(run(nbformat.v4.new_notebook(cells=[cell]), tmp_path).cells[0]) == "2\n"
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(broken, tmp_path)


def test_the_guide_leads_to_the_notebooks_and_no_path_of_a_machine_is_in_them() -> None:
    guide = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    readme = (ROOT / "examples" / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert "../examples/notebooks/spark.ipynb" in guide
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        assert f"]({path.name})" in readme
        assert not re.search(r"/(?:home|root|Users|tmp|work)/", path.read_text(encoding="utf-8"))
