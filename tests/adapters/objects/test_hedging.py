"""A block whose answer is late is sent once more: it is stored once, whatever becomes of both requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.adapters.objects.processes import Process
from tests.adapters.objects.simulated_store import Objects, SimulatedStore
from tests.adapters.objects.simulation import driver
from tests.adapters.objects.simulation import processes as simulated
from tidewal.adapters.objects import hedging
from tidewal.adapters.objects.block import BlockHeader, BlockKind, StoredEntry, encode_block
from tidewal.adapters.objects.hedging import LEAST_MEASURED, HedgedCreates
from tidewal.adapters.objects.log_objects import LogObjects
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual

SLOW_S = 8.0


class SlowStore(SimulatedStore):
    """Its requests with these numbers, counted from 1, take long: before they reach the store, or on their way back."""

    def __init__(self) -> None:
        super().__init__(Objects())
        self.late, self.unanswered, self.failing = set[int](), set[int](), set[int]()
        self.sent: list[tuple[str, bytes]] = []

    async def create(self, key: str, body: bytes) -> bool:
        self.sent.append((key, body))
        number = len(self.sent)
        if number in self.failing:
            raise Unavailable("503")
        if number in self.late:
            await asyncio.sleep(SLOW_S)
        created = await super().create(key, body)
        if number in self.unanswered:
            await asyncio.sleep(SLOW_S)
        return created


def hedged(
    test: Callable[[SlowStore, HedgedCreates], Coroutine[Any, Any, None]], share: float = 1.0
) -> tuple[SlowStore, Metrics]:
    """Run the test with creates of which enough have been measured."""
    metrics = Metrics()

    async def main() -> SlowStore:
        store = SlowStore()
        creates = HedgedCreates(store, share, metrics)
        for number in range(LEAST_MEASURED):
            assert await creates.create(f"measured/{number}", b"")
        store.sent.clear()
        await test(store, creates)
        return store

    return run_virtual(main()), metrics


def block(number: int = 0) -> Any:
    return encode_block(BlockHeader(BlockKind.DATA, b"l" * 16, b"w" * 16, 1, number, 1), {1: [StoredEntry(1, b"x")]})


def hedges(metrics: Metrics) -> float:
    return metrics.value("objects_hedged_requests_total")


def test_the_same_bytes_go_once_more_and_the_first_answer_counts() -> None:
    async def late(store: SlowStore, creates: HedgedCreates) -> None:
        store.late = {1}
        began = asyncio.get_running_loop().time()
        assert await creates.create("a", b"body")
        assert asyncio.get_running_loop().time() - began < 0.2
        await asyncio.sleep(2 * SLOW_S)

    store, metrics = hedged(late)
    assert store.sent == [("a", b"body")] * 2
    assert (store.objects.bodies["a"], hedges(metrics)) == (b"body", 1)


def test_an_answer_in_time_costs_one_request() -> None:
    async def quick(store: SlowStore, creates: HedgedCreates) -> None:
        for number in range(50):
            assert await creates.create(f"a{number}", b"body")

    store, metrics = hedged(quick, share=0.05)
    assert len(store.sent) == 50 + hedges(metrics) <= 53


def test_a_block_that_is_there_with_its_own_bytes_is_put() -> None:
    """Its first request has created it, and the second one is told that there is one already."""

    async def unanswered(store: SlowStore, creates: HedgedCreates) -> None:
        store.unanswered = {1}
        began = asyncio.get_running_loop().time()
        await LogObjects(store, hedged_creates=creates).put(block())
        assert asyncio.get_running_loop().time() - began < 0.3

    assert len(hedged(unanswered)[0].sent) == 2


@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}, {2, 3}])
def test_one_that_fails_leaves_the_other(failing: set[int]) -> None:
    async def fail(store: SlowStore, creates: HedgedCreates) -> None:
        store.late, store.failing = {1}, failing
        await LogObjects(store, hedged_creates=creates).put(block())

    store, _ = hedged(fail)
    assert store.objects.bodies["l0/0000000000000001/0000000000000000"] == block().data


def test_so_many_at_most_are_sent_once_more() -> None:
    async def all_slow(store: SlowStore, creates: HedgedCreates) -> None:
        store.late = set(range(1, 10_000))
        for number in range(200):
            assert await creates.create(f"a{number}", b"")

    _, metrics = hedged(all_slow, share=0.05)
    assert hedging.SAVED_UP <= hedges(metrics) <= 200 * 0.05 + hedging.SAVED_UP


def test_none_is_where_that_is_off() -> None:
    async def slow(store: SlowStore, creates: HedgedCreates) -> None:
        store.late = {1}
        assert await creates.create("a", b"")

    store, metrics = hedged(slow, share=0.0)
    assert (len(store.sent), hedges(metrics)) == (1, 0)


def test_the_caller_s_cancellation_leaves_no_request() -> None:
    async def cancelled(store: SlowStore, creates: HedgedCreates) -> None:
        store.late = {1, 2}
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(creates.create("a", b""), 1)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    assert len(hedged(cancelled)[0].sent) == 2


def test_a_limit_of_dollars_counts_them() -> None:
    limited = ObjectsSettings(max_dollars_per_day=1, hedge_share=0.0).least_interval_s
    assert ObjectsSettings(max_dollars_per_day=1, hedge_share=0.1).least_interval_s == pytest.approx(1.1 * limited)


def test_a_log_puts_its_blocks_so() -> None:
    async def main() -> float:
        metrics, store = Metrics(), SlowStore()
        process = Process(ObjectWal("simulated://", store, ObjectsSettings(linger_ms=0, hedge_share=1), metrics), store)
        await process.wal.open()
        await process.wal.create_channel("a", ChannelPolicy())
        for number in range(LEAST_MEASURED):
            await process.wal.append("a", b"%d" % number)
        store.late = {len(store.sent) + 1}
        began = asyncio.get_running_loop().time()
        await process.wal.append("a", b"late")
        assert asyncio.get_running_loop().time() - began < 1
        await process.wal.close()
        return hedges(metrics)

    assert run_virtual(main()) >= 1


def test_logs_keep_their_promises_where_half_of_all_blocks_are_sent_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests may be late, lost, doubled, refused, or arrive when their place is deleted."""

    async def counted(requests: list[asyncio.Task[bool]]) -> bool:
        sent.append(len(requests))
        return await first_answer(requests)

    sent: list[int] = []
    first_answer = hedging._first_answer
    monkeypatch.setattr(hedging, "_first_answer", counted)
    monkeypatch.setattr(hedging, "LEAST_MEASURED", 3)
    monkeypatch.setattr(hedging, "LATE", 0.5)
    monkeypatch.setattr(simulated, "SETTINGS", simulated.SETTINGS.model_copy(update={"hedge_share": 1.0}))
    logging.getLogger("tidewal").setLevel(logging.CRITICAL)  # each fault is meant, and the history has it
    try:
        for number in range(2):
            driver.simulate_log(seed + number, faults_s=20)
    finally:
        logging.getLogger("tidewal").setLevel(logging.NOTSET)
    assert sent.count(2) > 10
