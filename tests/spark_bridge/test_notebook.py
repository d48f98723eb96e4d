"""The notebook of docs/examples works from its first cell to its last one, and prints what it shows."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/examples/spark.ipynb"


def cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def shown(cell: dict) -> str:
    """What the notebook says a cell has printed."""
    assert {output["output_type"] for output in cell["outputs"]} <= {"stream"}
    return "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(
    spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    capfd.readouterr()
    defined: dict[str, object] = {"__name__": "__main__"}
    last = cells()[-1]
    try:
        for cell in cells()[:-1]:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), defined)
            assert capfd.readouterr().out == shown(cell), cell["id"]
    finally:
        exec("".join(last["source"]), defined)  # the node's thread would outlive a failed test
    assert [shown(cell) for cell in cells()].count("") < len(cells())


@pytest.mark.slow
def test_the_guide_leads_to_the_notebook_and_no_path_of_a_machine_is_in_it() -> None:
    assert "examples/spark.ipynb" in (ROOT / "docs/spark.md").read_text(encoding="utf-8")
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(?:home|root|Users|tmp|work)/", text)
