"""Spark Connect: the client talks to a server that finds the source by itself. Handlers of packs run at the server,
progress is told to the client."""

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


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_a_client_of_connect_reads_batches_and_streams_and_has_the_helpers(
    owner: Owner, story: Story, tmp_path: Path, rng: random.Random
) -> None:
    story.play(story.create(), rng, batches=12)
    log = tmp_path / "connect.log"
    child = Child("connect_child.py", owner.url, tmp_path, len(story.rows), errors=log)
    told: dict[str, list[list[str]]] = {}
    try:
        for word, *rest in filter(None, child.lines()):
            told.setdefault(word, []).append(rest)
    finally:
        child.kill()
    assert told.keys() == {"batch", "stream", "pack", "progress", "latest"}, log.read_text()[-3000:]
    expected = sorted([str(row[name]) for name in ("_channel", "_cseq", "_row")] for row in story.rows)
    assert sorted(told["batch"]) == sorted(told["stream"]) == expected

    packs = [tuple(map(int, each)) for each in told["pack"]]
    assert (packs[0][0], packs[-1][1]) == (0, story.cuts[-1].time)
    assert all(before[1] == after[0] < after[1] for before, after in pairwise(packs))
    records = {(row["_ts"], row["_channel"], row["_cseq"]) for row in story.rows}
    assert sum(count for _, _, count in packs) == len(records)
    assert [list(map(float, each)) for each in told["progress"]] == [[len(story.rows), 0]]
    assert told["latest"] == [[str(len(existing(story.rows)))]]


def existing(rows: list[Row]) -> set[object]:
    """The keys that are there after all versions; a story writes them in the order in which they count."""
    keys: set[object] = set()
    for row in rows:
        (keys.discard if row["_op"] == "delete" else keys.add)(row["flight"])
    return keys
