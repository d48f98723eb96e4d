"""Writing in order: what a refusal does to the batches behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
import pytest

from examples.flights import flights
from examples.flights.replay import IN_FLIGHT, Replay
from tidewal.actors.client import Client, WriteResult
from tidewal.runtime.errors import MessageTooLarge, Overloaded, TidewalError


class FakeClient:
    """Takes or refuses batches as it is told; what it takes is the log."""

    def __init__(self, refuse: Callable[[int, int], TidewalError | None]) -> None:
        self.log: list[int] = []
        self.inside = self.most_inside = 0
        self._refuse = refuse
        self._calls = 0

    async def apply(self, collection: str, batch: pa.RecordBatch) -> WriteResult:
        number = batch.column("number")[0].as_py()
        self._calls += 1
        refusal = self._refuse(number, self._calls)
        if refusal is None:
            self.log.append(number)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        if refusal is not None:
            raise refusal
        return WriteResult(number, batch.num_rows)


def batches(count: int) -> list[pa.RecordBatch]:
    moment = pa.array([0], pa.timestamp("us", "UTC"))
    return [pa.record_batch({"number": pa.array([number]), "event_time": moment}) for number in range(count)]


def replay(client: FakeClient, count: int) -> Replay:
    return Replay(cast(Client, client), batches(count), 5)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    async def at_once(_: float) -> None:
        await sleep(0)

    monkeypatch.setattr("examples.flights.replay.asyncio.sleep", at_once)


async def test_all_batches_in_order_so_many_at_once():
    client = FakeClient(lambda number, call: None)
    writing = replay(client, 30)
    await writing.run()
    assert client.log == list(range(30))
    assert client.most_inside == IN_FLIGHT
    assert (writing.written, writing.done, writing.last_ts) == (30, 35, 29)


async def test_a_time_of_overload_changes_neither_order_nor_number():
    client = FakeClient(lambda number, call: Overloaded("full") if 12 <= call < 40 else None)
    writing = replay(client, 30)
    await writing.run()
    assert client.log == list(range(30))
    assert writing.pauses > 1


async def test_a_batch_that_overtook_a_refused_one_ends_the_replay():
    client = FakeClient(lambda number, call: Overloaded("full") if call == 12 else None)
    with pytest.raises(TidewalError, match="out of order"):
        await replay(client, 30).run()
    assert client.inside == 0


async def test_other_errors_pass_through():
    client = FakeClient(lambda number, call: MessageTooLarge("too large") if number == 7 else None)
    with pytest.raises(MessageTooLarge):
        await replay(client, 30).run()
    assert client.inside == 0


@pytest.mark.slow
def test_batches_of_the_demo_keep_the_order(every_event: Any):
    few = every_event.slice(0, 2500)
    cut = list(flights.batches(few))
    assert [batch.num_rows for batch in cut] == [1000, 1000, 500]
    assert pa.Table.from_batches(cut).equals(few.combine_chunks())
