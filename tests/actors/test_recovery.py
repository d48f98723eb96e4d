"""Roles that crash, flushes that are interrupted, appends of unknown outcome: nothing is lost and nothing doubled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tidewal.actors.datanode import DataNode
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.datanode.pipeline import FlushPipeline
from tidewal.actors.mixcoord import MixCoord
from tidewal.actors.node import Node
from tidewal.actors.proxy import Proxy
from tidewal.actors.querynode import QueryNode
from tidewal.actors.streamingnode import StreamingNode
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import (
    DeadlineExceeded,
    DiskFull,
    Fenced,
    HandlerFailed,
    OutcomeUnknown,
    Unavailable,
)
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

pytestmark = pytest.mark.slow

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


def fail_times(method: Callable, times: list[int], error: Exception, *, after: bool = False) -> Callable:
    """`method`, failing as long as `times[0]` is above 0: before it does anything, or after all is done."""

    def due() -> bool:
        times[0] -= 1
        return times[0] >= 0

    if asyncio.iscoroutinefunction(method):

        async def failing(*args, **kwargs):
            fails = due()
            if fails and not after:
                raise error
            result = await method(*args, **kwargs)
            if fails:
                raise error
            return result
    else:

        def failing(*args, **kwargs):
            fails = due()
            if fails and not after:
                raise error
            result = method(*args, **kwargs)
            if fails:
                raise error
            return result

    return failing


def versions_in(home) -> list[dict[str, object]]:
    """What the table holds, read by a stranger."""
    rows = DeltaTable(home.tables / "people" / "log").to_pyarrow_table()
    return pa.table(rows).to_pylist()


def assert_each_once(home, expected: int) -> None:
    rows = versions_in(home)
    identities = Counter((row["_vchannel"], row["_term"], row["_cseq"], row["_row"]) for row in rows)
    assert [identity for identity, count in identities.items() if count > 1] == []
    assert len(rows) == expected


async def assert_all_works(home, client, rows: int) -> None:
    """Collections, writes, questions, flush, compaction and dropping."""
    await client.insert("people", home.people(1000))
    assert await client.count("people", consistency="strong") == rows + 1
    await client.flush("people")
    assert (await client.compact("people"))["rows"] == rows + 1
    await client.create_collection(home.POINTS)
    await client.insert("points", [{"id": 1, "at": [1.0, 0, 0, 0]}])
    assert await client.count("points", consistency="strong") == 1
    await client.drop_collection("points")


CRASHES = {
    "proxy": (Proxy, "_write", lambda client: client.insert("people", [{"id": 1}])),
    "strong read": (StreamingNode, "sync", lambda client: client.count("people", consistency="strong")),
    "querynode": (QueryNode, "_query", lambda client: client.count("people")),
    "mixcoord": (MixCoord, "_describe", lambda client: client.describe_collection("people")),
    "datanode": (DataNode, "_compact", lambda client: client.compact("people")),
}


@pytest.mark.parametrize("case", CRASHES)
async def test_a_role_that_crashes_comes_back(home, monkeypatch, case) -> None:
    role, method, call = CRASHES[case]
    times = [0]
    monkeypatch.setattr(role, method, fail_times(getattr(role, method), times, RuntimeError("a bug")))
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(10)))
        times[0] = 100  # whoever else calls it meanwhile
        assert isinstance(await home.error_of(call(client)), HandlerFailed)
        times[0] = 0
        await assert_all_works(home, client, 10)


@MEMORY_ONLY
async def test_a_write_of_unknown_outcome_is_repeated_under_its_number(home, monkeypatch) -> None:
    times, unknown = [1], Unavailable("no answer", outcome_unknown=True)
    monkeypatch.setattr(Proxy, "_append_rows", fail_times(Proxy._append_rows, times, unknown, after=True))
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        assert times[0] < 0, "it was not asked again"
        assert (await client.stats("people", consistency="strong")).versions["insert"] == 1


@MEMORY_ONLY
async def test_a_refusal_after_an_attempt_of_unknown_outcome_says_nothing_of_that_attempt(home, monkeypatch) -> None:
    append, attempts = Proxy._append_rows, itertools.count()

    async def append_and_fail(*arguments):
        if next(attempts):
            raise DiskFull("no space")
        await append(*arguments)
        raise Unavailable("no answer", outcome_unknown=True)

    monkeypatch.setattr(Proxy, "_append_rows", append_and_fail)
    async with home.people_client() as client:
        error = await home.error_of(client.insert("people", home.people(1)))
        assert isinstance(error, DiskFull)
        assert error.outcome_unknown


@MEMORY_ONLY
async def test_a_write_that_is_not_answered_again_ends_with_what_became_of_its_first_attempt(home, monkeypatch) -> None:
    attempts = itertools.count()

    async def fail_and_hang(*_):
        if next(attempts):
            await asyncio.Event().wait()
        raise Unavailable("no answer of the log", outcome_unknown=True)

    monkeypatch.setattr(Proxy, "_append_rows", fail_and_hang)
    async with home.people_client() as client:
        error = await home.error_of(client.insert("people", home.people(1), deadline_s=3))
        assert (type(error), error.message) == (Unavailable, "no answer of the log")  # not "within 2.9 s"
        assert error.outcome_unknown


@MEMORY_ONLY
async def test_a_write_that_a_stopping_proxy_cannot_answer_is_of_unknown_outcome(home, monkeypatch) -> None:
    append, appended = Proxy._append_rows, asyncio.Event()

    async def append_and_wait(*arguments):
        await append(*arguments)
        appended.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Proxy, "_append_rows", append_and_wait)
    async with home.node() as node:
        client = await node.client().__aenter__()
        await client.create_collection(home.PEOPLE)
        writing = asyncio.create_task(home.error_of(client.insert("people", home.people(1))))
        await appended.wait()
    assert (await writing).outcome_unknown


@MEMORY_ONLY
@pytest.mark.parametrize("role", [MixCoord, Proxy, DataNode, QueryNode])
async def test_calls_that_wait_while_a_role_restarts_are_answered(home, monkeypatch, role) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        monkeypatch.setattr(role, "on_pack", fail_times(role.on_pack, [2], RuntimeError("a bug")))

        async def use(number: int) -> None:
            await client.describe_collection("people")
            await client.insert("people", home.people(number))
            assert (await client.get("people", [number], consistency="strong")).table.num_rows == 1

        await asyncio.gather(*(use(number) for number in range(50)))
        await client.flush("people")
        await client.compact("people")
        statuses = {status.name: status.restarts for status in node.system.status()}
        assert statuses[role.role] == 2
        stats = await client.stats("people", consistency="strong")
        assert dict(stats.versions)["insert"] == 50
        assert_each_once(home, 50)


@MEMORY_ONLY
@pytest.mark.parametrize("role", [MixCoord, StreamingNode, Proxy, DataNode, QueryNode])
async def test_a_role_that_crashes_again_and_again_gives_up(home, monkeypatch, role) -> None:
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)

        async def crash(self, *args):
            raise RuntimeError("a bug")

        monkeypatch.setattr(role, "prepare", crash)
        cell = next(cell for cell in node.system._cells.values() if cell.name == role.role)
        cell._life.actor.crash(RuntimeError("the first one"))
        assert isinstance(await node.failed(), RuntimeError)
        assert not node.health().ok


FLUSH_CRASHES = {
    "before the commit": (LogTable, "flush", False),
    "after the commit": (LogTable, "flush", True),
    "before it is told": (FlushPipeline, "_publish", False),
    "after it is told": (FlushPipeline, "_publish", True),
    "before the log is held": (MemoryWal, "hold", False),
    "after the log is held": (MemoryWal, "hold", True),
}


@MEMORY_ONLY
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("case", FLUSH_CRASHES)
async def test_a_flush_that_is_interrupted_doubles_and_loses_nothing(home, monkeypatch, case, times) -> None:
    kind, method, after = FLUSH_CRASHES[case]
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(20)))
        await client.flush("people")
        await client.insert("people", home.people(*range(20, 40)))
        bug = RuntimeError("a bug")
        monkeypatch.setattr(kind, method, fail_times(getattr(kind, method), [times], bug, after=after))
        await client.flush("people")
        await client.insert("people", home.people(*range(40, 50)))
        await client.flush("people")
        assert_each_once(home, 50)
        assert (await client.compact("people"))["rows"] == 50
    async with home.client() as client:
        assert await client.count("people", consistency="strong") == 50
        await client.flush("people")
        assert_each_once(home, 50)


@MEMORY_ONLY
async def test_a_datanode_that_has_lost_its_channel_is_fenced_and_doubles_nothing(home, monkeypatch) -> None:
    fenced: list[Fenced] = []
    flush = LogTable.flush

    def watched(self, *args, **options):
        try:
            return flush(self, *args, **options)
        except Fenced as error:
            fenced.append(error)
            raise

    monkeypatch.setattr(LogTable, "flush", watched)
    slow, quick = ({"dataNode": {"flushIntervalS": seconds}} for seconds in (7.0, 3.0))
    async with home.node(settings=slow) as node, node.client() as client:
        one = node.node
        options = Settings.model_validate(quick)
        other = Node("other", one.wal, one.tables, one.cluster, options, one.clock, one.metrics, one.blocking)
        await client.create_collection(home.PEOPLE)
        await node.system.spawn(lambda: DataNode(other), name="second datanode")
        for start in range(0, 100, 10):
            await client.insert("people", home.people(*range(start, start + 10)))
            await home.elapse(1.3)
        await home.elapse(20)
        assert fenced, "the two never met: the test shows nothing"
        await client.flush("people")
        assert_each_once(home, 100)
        assert await client.count("people", consistency="strong") == 100


@MEMORY_ONLY
async def test_a_full_disk_is_waited_for(home, monkeypatch) -> None:
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(20)))
        monkeypatch.setattr(LogTable, "flush", fail_times(LogTable.flush, [2], DiskFull("no space")))
        await client.flush("people")
        assert_each_once(home, 20)


@MEMORY_ONLY
async def test_a_disk_that_stays_full_stops_neither_dropping_nor_the_end(home, monkeypatch) -> None:
    async with home.people_client() as client:
        await client.create_collection(home.POINTS)
        monkeypatch.setattr(LogTable, "flush", fail_times(LogTable.flush, [10**9], DiskFull("no space")))
        for collection, rows in (("people", home.people(1)), ("points", [{"id": 1, "at": [0.0] * 4}])):
            await client.insert(collection, rows)
            error = await home.error_of(client.flush(collection, deadline_s=20))
            assert isinstance(error, DeadlineExceeded)
        await client.drop_collection("points")
        before = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - before < 1


@MEMORY_ONLY
@pytest.mark.parametrize(
    "rates", [Rates(unknown=0.1), Rates(lost=0.1), Rates(fail=0.1), Rates(unknown=0.05, lost=0.05, fail=0.05)]
)
async def test_appends_of_unknown_outcome_are_decided(home, seed, rates) -> None:
    home.faults = FaultPlan(seed, rates, channels="dml")
    acknowledged = 0

    async def insist(call: Callable):
        while True:
            try:
                return await call()
            except Unavailable:  # certainly not written
                await home.elapse(0.05)

    async with home.node() as node, node.client() as client:
        await insist(lambda: client.create_collection(home.PEOPLE, deadline_s=300))

        async def write(number: int) -> None:
            nonlocal acknowledged
            while not await there(number):
                with contextlib.suppress(OutcomeUnknown):  # a later write is there, and this one is not: write it anew
                    written = await insist(lambda: client.insert("people", home.people(number), deadline_s=300))
                    assert written.rows == 1
                    assert await there(number)
            acknowledged += 1

        async def there(number: int) -> int:
            found = await insist(lambda: client.get("people", [number], consistency="strong", deadline_s=300))
            return found.table.num_rows

        for start in range(0, 200, 10):
            await asyncio.gather(*(write(start + number) for number in range(10)))
        stats = await insist(lambda: client.stats("people", consistency="strong"))
        assert dict(stats.versions)["insert"] == acknowledged == 200
        home.faults.rates = Rates()
        await client.flush("people")
        assert_each_once(home, 200)
    assert home.faults.trace


@pytest.mark.long
@MEMORY_ONLY
@pytest.mark.parametrize("role", ["mixcoord", "streamingnode", "proxy", "datanode", "querynode"])
async def test_crashes_at_any_moment_lose_and_double_nothing(home, rng, role) -> None:
    home.faults = FaultPlan(rng.randrange(2**31), Rates(drop=0.05, delay=0.2, delay_s_max=0.2))
    async with home.node(settings={"dataNode": {"flushIntervalS": 0.5}}) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        loop, crashed = asyncio.get_running_loop(), [0]
        cell = next(cell for cell in node.system._cells.values() if cell.name == role)

        def crash() -> None:
            if cell._life is not None:
                crashed[0] += 1
                cell._life.actor.crash(RuntimeError("a bug"))

        crashes = [loop.call_later(number * 15 + rng.uniform(0, 5), crash) for number in range(12)]

        async def write(worker: int) -> None:
            for turn in range(40):
                id = worker * 1000 + turn
                await client.insert("people", home.people(id), deadline_s=600)
                found = await client.get("people", [id], consistency="strong", deadline_s=600)
                assert found.table.num_rows == 1
                await home.elapse(rng.uniform(0, 6))

        await asyncio.gather(*(write(worker) for worker in range(3)))
        assert crashed[0] > 5
        for each in crashes:  # a crash while the node closes is raised by the close
            each.cancel()
        await client.flush("people", deadline_s=600)
        assert_each_once(home, 120)
        assert await client.count("people", consistency="strong") == 120
        assert (await client.compact("people"))["rows"] == 120
