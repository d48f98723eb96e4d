"""Spark Connect: the client talks to a server that finds the source by itself."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Owner
from kill_kit import Child
from story import Story

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_client_of_connect_reads_batches_and_streams(
    owner: Owner, story: Story, tmp_path: Path, rng: random.Random
) -> None:
    story.play(story.create(), rng, batches=10)
    child = Child("connect_child.py", owner.url, tmp_path, errors=tmp_path / "connect.log")
    try:
        lines = list(child.lines())
    finally:
        child.kill()
    expected = sorted((str(row["_channel"]), str(row["_cseq"]), str(row["_row"])) for row in story.rows)
    for kind in ("batch", "stream"):
        got = sorted(tuple(rest) for first, *rest in lines if first == kind)
        assert got == expected, (tmp_path / "connect.log").read_text()[-3000:]
