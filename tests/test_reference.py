"""The reference pages say what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = runpy.run_path(str(DOCS / "reference.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_table_says(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"
