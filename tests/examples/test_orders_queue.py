"""The example `examples/orders_queue`: each order is shipped or refused exactly once, and gone from the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.commands import Start
from tidewal.runtime import Entry

pytestmark = pytest.mark.slow

PROGRAM = "orders_queue/orders.py"
URL = "rocksmq://./log"
BOUND_S = 100.0


async def test_each_order_is_shipped_or_refused_once_though_a_worker_is_killed(
    load: Callable[[str], ModuleType], start: Start, tmp_path: Path
) -> None:
    example = load(PROGRAM)
    place = start("place", URL, 200)
    assert place.communicate(timeout=BOUND_S)[0] == "200 orders\n"
    killed = start("work", URL)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "working\n"
    killed.kill()  # whatever it had done by then
    start("work", URL)
    async with asyncio.timeout(BOUND_S), await example.open_log(f"rocksmq://{tmp_path}/log") as log:
        shipped, refused = [], []
        while len(shipped) + len(refused) < 200:
            await asyncio.sleep(0.05)
            shipped, refused = [await example.messages(log, name) for name in ("shipped", "refused")]
        (group,) = await log.groups()
        waiting = [name for name in example.QUEUES if group.positions[name] != await log.latest_id(name)]
    assert sorted(order["number"] for order in shipped) == [n for n in range(200) if n % 4 != 3]
    assert {each["reason"] for each in refused} == {"no unicorn in stock"}
    assert len(refused) == 50
    assert waiting == []


def test_an_order_that_is_none_is_refused_and_holds_nothing_up(load: Callable[[str], ModuleType]) -> None:
    example = load(PROGRAM)
    for text in (b"not json", b"{}", b"[]", b"\xff"):
        assert example.decided(Entry(b"", 0, text)).channel == "refused"
    assert example.decided(Entry(b"", 0, b'{"number": 1, "customer": "c", "item": "lamp"}')).channel == "shipped"
