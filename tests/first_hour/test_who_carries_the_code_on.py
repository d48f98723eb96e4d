"""Somebody who carries the code on: a clone, its tests, a change that a test notices, and one that has its test."""

from __future__ import annotations

import pytest

from tests import packages
from tests.first_hour.stranger import ROOT, Failed, Stranger

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PLACES = "tests/runtime/test_clock.py tests/runtime/test_record.py tests/runtime/actor"
TOOLS = "httpx hypothesis import-linter mmh3 pytest pytest-asyncio pytest-timeout pytest-xdist ruff setuptools"
NEW_TEST = """

def test_logical_is_what_compose_was_given() -> None:
    assert logical(compose(1, 7)) == 7
"""


@pytest.mark.in_turn(1, 3)
def test_a_change_is_made_tested_and_checked(stranger: Stranger) -> None:
    page = stranger.reads("CONTRIBUTING.md")
    clone = packages.copy_tree(stranger.folder / "tidewal")
    # As `make setup` would, from the folder of wheels instead of an index; the rest of the tools is not needed here.
    stranger.types("git init --quiet && git add .", folder="tidewal")
    stranger.types("python3 -m venv .venv", folder="tidewal")
    stranger.types(f".venv/bin/pip install --quiet 'setuptools>=77' {TOOLS}", folder="tidewal")
    stranger.types(".venv/bin/pip install --quiet --no-build-isolation -e '.[node,kafka,pulsar]'", folder="tidewal")
    (clone / ".venv" / ".tidewal-setup").touch()

    assert "make quick" in page
    listed = stranger.types("make", folder="tidewal")
    assert all(f"make {target}" in listed for target in ("quick", "test", "check", "format"))
    stranger.reads("docs/architecture.md", "The floors")
    stranger.types(f"make quick ARGS='{PLACES}'", folder="tidewal")

    clock = clone / "runtime" / "clock.py"
    source = clock.read_text()
    assert "LOGICAL_BITS = 18" in source
    clock.write_text(
        source.replace("return physical_ms << LOGICAL_BITS | logical", "return physical_ms << LOGICAL_BITS")
    )
    with pytest.raises(Failed, match=r"FAILED tests/runtime/test_clock\.py"):
        stranger.types(f"make quick ARGS='{PLACES}'", folder="tidewal")
    clock.write_text(source)

    tests = clone / "tests" / "runtime" / "test_clock.py"
    before = tests.read_text()
    assert (ROOT / "tests" / "runtime" / "test_clock.py").read_text() == before
    tests.write_text(before + NEW_TEST)
    stranger.lines_written += NEW_TEST.strip().count("\n") + 2
    stranger.types("make quick ARGS='tests/runtime/test_clock.py -k logical_is_what'", folder="tidewal")
    stranger.types(
        ".venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports", folder="tidewal"
    )
    assert "tests/runtime/test_clock.py" in stranger.types("git status --short", folder="tidewal")
