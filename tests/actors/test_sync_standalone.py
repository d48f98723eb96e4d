"""Running a node, and work beside it, for a while: `run`, and `standalone_sync` for programs without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tidewal
from tidewal.runtime.errors import Closed, DeadlineExceeded, DirectoryInUse, Fenced

CITIES = tidewal.CollectionSchema("cities", (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar")), "id")
ROWS = [{"id": 1, "name": "Cádiz"}, {"id": 2, "name": "Porto"}]

# A program that never closes its node ends all the same, and what was acknowledged is there.
SCRIPT = """
import sys, tidewal
node = tidewal.standalone_sync(sys.argv[1])
client = node.client()
print(client.insert("cities", [{"id": 3, "name": "Turku"}]).rows)
"""


def node_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "tidewal-node" in thread.name]


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append("ended")


async def failing() -> None:
    raise ValueError("its own")


# ---- Standalone.run --------------------------------------------------------------------------------------------------


async def test_run_gives_the_result_or_the_error_of_the_work(home) -> None:
    async with home.node() as node:
        assert await node.run(asyncio.sleep(0, "done"), timeout_s=60) == "done"
        with pytest.raises(ValueError, match="its own"):
            await node.run(failing())


async def test_run_ends_work_that_is_not_done_in_time_and_the_node_goes_on(home) -> None:
    ended: list[str] = []
    async with home.node() as node:
        with pytest.raises(DeadlineExceeded, match=r"has not ended after 0\.01 s"):
            await node.run(forever(ended), timeout_s=0.01)
        assert ended == ["ended"]
        assert node.health().ok


async def test_run_without_work_serves_for_the_time_that_it_is_given(home) -> None:
    async with home.node() as node:
        assert await node.run(timeout_s=0.01) is None
        assert node.health().ok


@pytest.mark.parametrize("with_work", [True, False])
async def test_run_raises_the_error_of_a_role_that_fails_for_good(home, with_work: bool) -> None:
    ended: list[str] = []
    async with home.node() as node:
        running = asyncio.create_task(node.run(forever(ended)) if with_work else node.run())
        await asyncio.sleep(0)
        node.system.escalate("proxy", Fenced("another node has the log"))
        with pytest.raises(Fenced):
            await asyncio.wait_for(running, 20)
        assert ended == ["ended"] * with_work


async def test_run_that_is_cancelled_cancels_the_work(home) -> None:
    ended: list[str] = []
    async with home.node() as node:
        running = asyncio.create_task(node.run(forever(ended)))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == ["ended"]


# ---- standalone_sync -------------------------------------------------------------------------------------------------


def test_a_node_and_its_client_need_no_event_loop(tmp_path: Path) -> None:
    with tidewal.standalone_sync(tmp_path) as node:
        assert node.health().ok
        with node.client("first") as client:
            client.create_collection(CITIES)
            client.insert("cities", ROWS)
        other = node.client()
        assert other.count("cities", consistency="strong") == 2
    for call in (node.client, node.health, node.run, lambda: other.count("cities")):
        with pytest.raises(Closed):
            call()
    node.close()
    assert node_threads() == []
    with tidewal.standalone_sync(tmp_path) as node:
        assert node.client().count("cities", consistency="strong") == 2


async def test_a_notebook_whose_loop_runs_may_use_it(tmp_path: Path) -> None:
    with tidewal.standalone_sync(tmp_path) as node, node.client() as client:
        client.create_collection(CITIES)
        assert client.insert("cities", ROWS).rows == 2


def test_run_reaches_streams_of_the_nodes_log(tmp_path: Path) -> None:
    async def written_and_read(wal: tidewal.Wal) -> list[bytes]:
        await wal.create_channel("events", tidewal.ChannelPolicy())
        stream = tidewal.MsgStream(wal, tidewal.HybridClock())
        stream.as_producer(["events"])
        await stream.produce([tidewal.Record(tidewal.RecordType.ROWS, body=b"opened")])
        stream.as_consumer(["events"])
        [pack] = await tidewal.take(stream, 1)
        await stream.close()
        return [bytes(record.body) for record in pack.messages]

    with tidewal.standalone_sync(tmp_path) as node:
        assert node.run(written_and_read(node.wal), timeout_s=60) == [b"opened"]
        with pytest.raises(DeadlineExceeded):
            node.run(forever([]), timeout_s=0.01)
        assert node.run(timeout_s=0.01) is None
        assert node.health().ok


def test_what_fails_to_start_leaves_no_thread_and_no_lock(tmp_path: Path) -> None:
    with tidewal.standalone_sync(tmp_path):
        with pytest.raises(DirectoryInUse):
            tidewal.standalone_sync(tmp_path)
        assert len(node_threads()) == 1
    assert node_threads() == []


@pytest.mark.slow
def test_a_script_that_forgets_to_close_ends_and_loses_nothing(tmp_path: Path) -> None:
    with tidewal.standalone_sync(tmp_path) as node:
        node.client().create_collection(CITIES)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    assert (ran.stdout, ran.stderr) == ("1\n", "")
    with tidewal.standalone_sync(tmp_path) as node:
        assert node.client().count("cities", consistency="strong") == 1


def test_both_take_the_same_arguments() -> None:
    def parameters(call) -> list[tuple[str, object]]:
        return [(each.name, each.default) for each in inspect.signature(call).parameters.values()]

    assert parameters(tidewal.standalone_sync) == parameters(tidewal.standalone)
    for name in ("run", "client", "health", "close"):
        assert parameters(getattr(tidewal.SyncStandalone, name)) == parameters(getattr(tidewal.Standalone, name)), name
