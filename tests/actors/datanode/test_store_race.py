"""Two DataNodes that store one collection in a bucket at once, each of which takes itself for the only one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.objects.faulty_http import HELD_S, FaultyStore, Forward, StoreRequest
from tidewal.actors.datanode.datanode import DataNode
from tidewal.actors.datanode.delta_files import checkpoint, open_delta
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.datanode.pipeline import FlushPipeline
from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.errors import Fenced
from tidewal.runtime.tables.object_options import client_of, storage_options
from tidewal.runtime.tables.table_metadata import commit_name
from tidewal.runtime.tables.table_store import LOG, open_tables

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, V1

pytestmark = [pytest.mark.slow, pytest.mark.long]  # `test_object_store.py` has the same with threads of one process

CHILD = Path(__file__).with_name("flushing_child.py")
END = 24
HELD_VERSION = 5  # of the commit that is held up
WITHIN_S = 120
FENCED = 5  # of two pipelines, how often one finds that the other has stored what it was to store


@pytest.fixture
def log(bucket: str) -> LogTable:
    """A table with a checkpoint every fourth commit."""
    return LogTable.open(open_tables(bucket).table("flights", LOG), SCHEMA, KEY, checkpoint_every_commits=4)


def stored(log: LogTable, column: str = "_ts") -> list[int]:
    table = DeltaTable(log.location.uri, storage_options=log.location.storage_options)
    return sorted(table.to_pyarrow_table(columns=[column])[column].to_pylist())


@contextmanager
def flushing(log: LogTable, vchannel: str, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A process that flushes `vchannel` up to `END`; it is killed at the end of the block."""
    command = [sys.executable, str(CHILD), log.location.uri, vchannel, str(END), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def acknowledged(child: subprocess.Popen[str]) -> list[int]:
    """What a process was told to be stored until it has ended in good order."""
    said, _ = child.communicate(timeout=WITHIN_S)
    assert child.returncode == 0
    return [int(line) for line in said.splitlines()]


def test_two_processes_store_the_rows_of_one_vchannel_once_though_one_is_killed(log: LogTable, seed: int) -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(flushing(log, V0, seed + number)) for number in range(3))
        assert first.stdout is not None
        assert first.stdout.readline()
        first.send_signal(signal.SIGKILL)
        told = acknowledged(second) + acknowledged(third)
    assert stored(log) == list(range(1, END + 1))
    assert (log.flushed(V0), max(told)) == (END, END)


class HeldCommit:
    """Holds the first PUT of the commit `HELD_VERSION`, from whichever process it comes, until `released`."""

    def __init__(self) -> None:
        self.arrived, self.released = threading.Event(), threading.Event()

    def __call__(self, request: StoreRequest, forward: Forward) -> bool:
        if request.command == "PUT" and request.key.endswith(commit_name(HELD_VERSION)) and not self.arrived.is_set():
            self.arrived.set()
            assert self.released.wait(HELD_S)
        return True


@pytest.mark.parametrize("other", [V0, V1], ids=["the same vchannel", "vchannels of their own"])
def test_a_commit_of_a_process_that_lands_behind_cleaned_up_ones_is_not_taken_for_stored(
    faulty: FaultyStore, log: LogTable, bucket: str, seed: int, other: str
) -> None:
    faulty.fault = held = HeldCommit()
    with ThreadPoolExecutor() as threads, flushing(log, V0, seed) as one, flushing(log, other, seed + 1) as two:
        told = [threads.submit(acknowledged, child) for child in (one, two)]
        assert held.arrived.wait(WITHIN_S)
        assert len(wait(told, WITHIN_S, FIRST_COMPLETED).done) == 1
        present = open_delta(log.location)
        assert present.version() > HELD_VERSION
        checkpoint(log.location, present)
        # as the Delta library does once they are old
        names = [f"flights/log/{commit_name(version)}" for version in range(HELD_VERSION + 1)]
        client_of(bucket, storage_options(bucket)).delete(names)
        held.released.set()
        for each in told:
            each.result(WITHIN_S)
    assert stored(log) == sorted([*range(1, END + 1)] * len({V0, other}))
    again = LogTable.open(log.location.uri)
    assert {again.flushed(vchannel) for vchannel in (V0, other)} == {END}


@pytest.mark.asyncio(loop_factories=["rocksmq"])
async def test_two_pipelines_of_one_collection_store_each_row_once(
    home, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a DataNode goes on that the others take for dead."""
    begun: list[FlushPipeline] = []
    made = DataNode.pipeline

    def pipeline(role: DataNode, part: Collection) -> FlushPipeline:
        begun.append(made(role, part))
        return begun[-1]

    async def zombie(role: DataNode, collection: Collection) -> None:
        while True:
            with suppress(Fenced):
                await role.pipeline(collection).run()

    monkeypatch.setattr(DataNode, "pipeline", pipeline)
    home.tables = f"{bucket}/tables"
    settings = {"dataNode": {"flushIntervalS": 0.05, "flushBytes": 2_000}}
    async with home.people_client(settings=settings) as client:
        await client.flush("people")
        first, rows = begun[0], 0
        beside = asyncio.create_task(zombie(first._role, first.collection))
        async with asyncio.timeout(WITHIN_S):
            while len(begun) < 2 + FENCED:
                await client.insert("people", home.people(*range(rows, rows + 20)))
                rows += 20
        await client.flush("people")
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    assert stored(LogTable.open(open_tables(home.tables).table("people", LOG)), "id") == list(range(rows))
