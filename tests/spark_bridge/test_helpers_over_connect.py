"""Packs, progress and `latest` over Spark Connect: the handler runs at the server, progress is told to the client."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Owner
from kill_kit import Child
from story import Row, Story


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_helpers_work_over_connect(owner: Owner, story: Story, tmp_path: Path, rng: random.Random) -> None:
    story.play(story.create(), rng, batches=12)
    log = tmp_path / "connect.log"
    child = Child("helpers_over_connect.py", owner.url, tmp_path, len(story.rows), errors=log)
    try:
        lines = [line for line in child.lines() if line]
    finally:
        child.kill()
    packs = [tuple(map(int, rest)) for word, *rest in lines if word == "pack"]
    assert packs, log.read_text()[-3000:]
    assert (packs[0][0], packs[-1][1]) == (0, story.cuts[-1].time)
    assert all(before[1] == after[0] < after[1] for before, after in pairwise(packs))
    assert sum(count for _, _, count in packs) == len(
        {(row["_ts"], row["_channel"], row["_cseq"]) for row in story.rows}
    )
    told = {word: [float(value) for value in rest] for word, *rest in lines if word != "pack"}
    assert told == {"progress": [len(story.rows), 0], "latest": [len(existing(story.rows))]}


def existing(rows: list[Row]) -> set[object]:
    """The keys that are there after all versions; a story writes them in the order in which they count."""
    keys: set[object] = set()
    for row in rows:
        (keys.discard if row["_op"] == "delete" else keys.add)(row["flight"])
    return keys
