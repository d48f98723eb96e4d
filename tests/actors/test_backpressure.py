"""A DataNode that sleeps: clients are told to wait, memory stays bounded, and all goes on by itself once it wakes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from tidewal.runtime.errors import Overloaded

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])
MIB = 1024 * 1024
LIMIT_BYTES = 8 * MIB
RSS_MAX_MIB = 1024


def of_datanode(call: Callable[[], object]) -> bool:
    """Whether what runs now is the DataNode's. MixCoord looks for tables in the way of a new collection, too, the
    QueryNode for what it has to load, and each node at its start for the store."""
    task, name = asyncio.current_task(), getattr(call, "__name__", "")
    of_others = task is None or task.get_name().startswith("mixcoord/")
    return not of_others and name not in ("prepare", "identity", "exists")


@pytest.mark.slow
@MEMORY_ONLY
async def test_a_sleeping_datanode_holds_writers_back_and_nothing_else(home) -> None:
    awake = asyncio.Event()

    async def asleep(call):
        if of_datanode(call):
            await awake.wait()
        return call()

    settings = {"streamingNode": {"maxUnflushedBytes": LIMIT_BYTES}, "dataNode": {"flushIntervalS": 1.0}}
    rows = [{"id": id, "name": "x" * 1000} for id in range(500)]
    async with home.people_client(settings=settings, blocking=asleep) as client:
        accepted, errors = 0, []
        for _ in range(100):
            try:
                accepted += (await client.upsert("people", rows)).rows
            except Overloaded as error:
                errors.append(error)
        assert {error.limit for error in errors} == {"streamingNode.maxUnflushedBytes"}
        assert LIMIT_BYTES * 0.8 < accepted * 1000 <= LIMIT_BYTES * 1.1
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        assert await client.count("people", consistency="strong") == 500
        await home.elapse(60)
        assert isinstance(await home.error_of(client.upsert("people", rows)), Overloaded)
        awake.set()
        await home.elapse(5)
        for _ in range(20):
            accepted += (await client.upsert("people", rows)).rows
            await home.elapse(2)
        stats = await client.stats("people", consistency="strong")
        assert dict(stats.versions)["upsert"] == accepted


@pytest.mark.slow
@MEMORY_ONLY
async def test_the_limit_holds_across_a_restart(home) -> None:
    never = asyncio.Event()

    async def asleep(call):
        if of_datanode(call):
            await never.wait()
        return call()

    settings = {"streamingNode": {"maxUnflushedBytes": LIMIT_BYTES}}
    rows = [{"id": id, "name": "x" * 1000} for id in range(500)]

    async def fill(client) -> int:
        for accepted in range(100):
            try:
                await client.upsert("people", rows)
            except Overloaded:
                return accepted
        raise AssertionError("never overloaded")

    async with home.people_client(settings=settings, blocking=asleep) as client:
        assert await fill(client) > 10
    async with home.client(settings=settings, blocking=asleep) as client:
        assert await fill(client) == 0, "what the log holds was forgotten"
    async with home.client(settings=settings) as client:
        await client.flush("people")
        assert await fill(client) > 10


OFFER_2_GB = """
import asyncio, sys
import numpy, pyarrow as pa
from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tests.actors.test_backpressure import of_datanode

SCHEMA = CollectionSchema("people", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id")
BATCH = pa.table({"id": numpy.arange(1024), "name": ["x" * 1016] * 1024}).to_batches()[0]

async def main(directory):
    wal = await RocksMQ.open(directory + "/log", serve=False)
    awake = asyncio.Event()
    async def asleep(call):
        if of_datanode(call):
            await awake.wait()
        return await asyncio.to_thread(call)
    async with Standalone(wal, directory + "/tables", blocking=asleep) as node, node.client() as client:
        await client.create_collection(SCHEMA)
        accepted = refused = 0
        for start in range(0, 2048, 8):
            writes = (client.upsert("people", BATCH, deadline_s=300) for _ in range(8))
            for result in await asyncio.gather(*writes, return_exceptions=True):
                if isinstance(result, Overloaded):
                    refused += 1
                elif isinstance(result, BaseException):
                    raise result
                else:
                    accepted += 1
        with open("/proc/self/status") as status:  # ru_maxrss begins at the size of the process that started this one
            peak_mib = int(status.read().partition("VmHWM:")[2].split()[0]) // 1024
        awake.set()
        await client.flush("people")
        for _ in range(50):
            await client.upsert("people", BATCH, deadline_s=300)
        assert await client.count("people", consistency="strong", deadline_s=300) == 1024
    await wal.close()
    print(accepted, refused, peak_mib)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.in_turn(0, 3)
@pytest.mark.timeout(900)  # so a run begins with it: writers are held back for five minutes
def test_two_gigabytes_offered_to_a_sleeping_datanode_leave_memory_bounded(tmp_path) -> None:
    command = [sys.executable, "-c", OFFER_2_GB, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accepted, refused, peak_mib = map(int, done.stdout.split())
    print(f"accepted {accepted} MiB, refused {refused} MiB, peak {peak_mib} MiB")
    assert 200 <= accepted <= 300
    assert accepted + refused == 2048
    assert peak_mib < RSS_MAX_MIB
