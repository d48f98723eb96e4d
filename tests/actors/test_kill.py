"""Kill -9 of a node under load: it recovers to exactly what was acknowledged, and whole batches that were on their
way."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

CHILD = Path(__file__).with_name("crash_child.py")
ROUNDS = 5

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["rocksmq"])]


def killed_run(
    directory: Path, first: int, seed: int, acknowledgements: int, *, child: Path = CHILD
) -> tuple[dict[int, int], set[int]]:
    """Run the `child` until it has acknowledged so much, and kill it. Returns the batches tried (first key → rows) and
    the first keys of those acknowledged."""
    command = [sys.executable, str(child), str(directory), str(first), str(seed)]
    tried: dict[int, int] = {}
    acknowledged: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                continue  # torn by the kill: of something that had not happened yet
            word, *numbers = line.split()
            if word == "try":
                tried[int(numbers[0])] = int(numbers[1])
            else:
                acknowledged.add(int(numbers[0]))
            if len(acknowledged) == acknowledgements:
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the child ended by itself"
    return tried, acknowledged


async def test_a_killed_node_recovers_exactly_what_was_acknowledged(home, seed: int) -> None:
    source = random.Random(seed)
    expected: set[int] = set()
    last_terms: dict[str, int] = {}
    for round in range(ROUNDS):
        first = round * 1_000_000
        choices = source.randrange(2**31), source.randrange(1, 300)
        tried, acknowledged = await asyncio.to_thread(killed_run, home.directory, first, *choices)
        async with home.node() as node, node.client() as client:
            found = (await client.query("things", columns=["id"], consistency="strong")).table["id"].to_pylist()
            assert len(found) == len(set(found))
            present = {id for id in found if id >= first}
            for start, rows in tried.items():
                batch = set(range(start, start + rows))
                if start in acknowledged:
                    assert batch <= present, "an acknowledged batch was lost"
                else:
                    assert batch <= present or not batch & present, "half of a batch was there"
            assert {id for id in found if id < first} == expected, "older rows have changed"
            expected = set(found)
            await client.flush("things")
            assert_table_is(home.tables / "things" / "log", expected)
            assert (await client.compact("things"))["rows"] == len(expected)
            collection = await client.describe_collection("things")
            channels = [name.rsplit("_", 1)[0] for name in collection.vchannels]
            asked = {"to": node.node.incarnation, "channels": channels}
            reply = await client._rpc.call("streamingnode", "sync", asked)
            terms = {name: point[0] for name, point in reply.values["channels"].items()}
            assert all(terms[name] > last_terms.get(name, 0) for name in terms)
            last_terms = terms


def assert_table_is(path: Path, expected: set[int]) -> None:
    table = DeltaTable(path).to_pyarrow_table(columns=["id", "_vchannel", "_term", "_cseq", "_row"])
    assert set(table["id"].to_pylist()) == expected
    identities = Counter(tuple(row.values())[1:] for row in table.to_pylist())
    assert max(identities.values()) == 1, "a row version is there twice"
    assert table.num_rows == len(expected)
