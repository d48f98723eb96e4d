"""`tidewal level`: it shows the feature level of a cluster, and whether it may rise."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cluster.versions import NEW
from tests.commands import Command
from tests.stored_cluster import stored_node
from tidewal.cli.level import described_level, hold_level, level_sentence
from tidewal.runtime.cluster.state import ClusterState, NodeMember
from tidewal.runtime.errors import ChannelNotFound
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.testing.memory import MemoryWal


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The directory of a log with a node of the next version, and none that runs."""

    async def fill() -> None:
        async with await open_wal(f"rocksmq://{tmp_path}") as wal, stored_node(wal, "alpha-1", version=NEW):
            pass

    asyncio.run(fill())
    return tmp_path


def test_it_holds_the_level_and_lets_it_rise(command: Command, log: Path) -> None:
    assert "is 1, and rises to 3" in command("level", log).out
    held = command("level", log, "hold")
    assert (held.status, "is held at 1" in held.out) == (0, True), held.err
    assert json.loads(command("level", log, "--json").out) == {
        "present": 1,
        "held": True,
        "known": 3,
        "waits_for": [],
    }
    assert json.loads(command("level", log, "raise", "--json").out)["held"] is False


@pytest.mark.parametrize(
    ("highest", "held", "says"),
    [
        ([], False, "the feature level is 1, and no member knows a later one"),
        ([1, 1], True, "the feature level is held at 1, and no member knows a later one"),
        (
            [2, 1],
            False,
            "the feature level is 1; it rises to 2 once these are upgraded or have ended: n1 (0.1, which knows 1)",
        ),
        (
            [3, 2, 1],
            False,
            "the feature level is 1; it rises to 3 once these are upgraded or have ended: "
            "n1 (0.1, which knows 1 to 2), n2 (0.1, which knows 1)",
        ),
        (
            [2, 1],
            True,
            "the feature level is held at 1; it could rise to 2 once these are upgraded or have ended: "
            "n1 (0.1, which knows 1)",
        ),
        ([2, 2], False, "the feature level is 1, and rises to 2 once a node has led for a lease"),
    ],
)
def test_it_says_what_the_level_waits_for(highest: list[int], held: bool, says: str) -> None:
    cluster = ClusterState()
    cluster.level_held = held
    for number, level in enumerate(highest):
        cluster.members[f"n{number}-1"] = NodeMember(f"n{number}-1", f"n{number}", (), 1, level, version="0.1")
    assert level_sentence(described_level(cluster)) == says


async def test_a_log_without_a_cluster_gets_none() -> None:
    wal = MemoryWal()
    with pytest.raises(ChannelNotFound):
        await hold_level(wal, Names(), held=True)
    assert not wal.log.channels
