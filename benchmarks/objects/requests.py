"""What a log costs by the rate of its messages: requests a thousand messages, and dollars a day at S3's prices."""

from __future__ import annotations

import asyncio
import time

from tidewal.adapters.objects.metered_store import PRICES
from tidewal.adapters.objects.settings import DAY_S, ObjectsSettings
from tidewal.runtime.log.wal import Append, Wal

from ..report import figure
from ..wal.limits import KIB
from .stores import Bench

RATES = (0, 1, 10, 100, 1_000, 10_000, 50_000)  # messages of 1 KiB a second
SECONDS = 10.0
STEP_S = 0.01


def measure(bench: Bench) -> None:
    for rate in RATES:
        bench.run(_measure(bench, rate))


async def _measure(bench: Bench, rate: int) -> None:
    async with bench.log(ObjectsSettings()) as (wal, store):
        await wal.append("bench", b"first")
        before, began = dict(store.requests), time.perf_counter()
        sent = await _offer(wal, rate)
        took_s = time.perf_counter() - began
        _tell(rate, sent, took_s, {kind: store.requests[kind] - before[kind] for kind in before}, bench.name)


async def _offer(wal: Wal, rate: int) -> int:
    """Append at a rate, whether the store keeps up or not; how many were acknowledged."""
    payload, sent, appends = bytes(KIB), 0, set[asyncio.Task[object]]()
    began = time.perf_counter()
    while (past_s := time.perf_counter() - began) < SECONDS:
        due = int(past_s * rate) - sent
        if due and len(appends) < 100:
            task = asyncio.create_task(wal.append_many([Append("bench", payload)] * due))
            appends.add(task)
            task.add_done_callback(appends.discard)
            sent += due
        await asyncio.sleep(STEP_S)
    await asyncio.gather(*appends)
    return sent


def _tell(rate: int, sent: int, took_s: float, requests: dict[str, int], store: str) -> None:
    dollars = sum(PRICES[kind] * count for kind, count in requests.items()) / took_s * DAY_S
    beside: dict[str, float | str] = {
        "creates_per_s": requests["create"] / took_s,
        "gets_per_s": requests["get"] / took_s,
        "creates_per_1000_messages": requests["create"] / sent * 1000 if sent else 0.0,
        "messages_per_s": sent / took_s,
        "store": store,
    }
    figure(f"objects.dollars_per_day.{rate}", dollars, "dollars a day, by S3's prices", beside=beside)
