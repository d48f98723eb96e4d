"""Same seed, same run: a log, its owner, its faults and its readers leave byte-identical traces (guarantee 12)."""

from __future__ import annotations

import asyncio
import random

import pytest

from tidewal.runtime.clock import add_ms
from tidewal.runtime.ownership import ChannelGrant
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import Fault, FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

RATES = Rates(fail=0.1, unknown=0.03, lost=0.03, delay=0.3, drop=0.2, duplicate=0.2)


def traced(world_type, seed: int) -> tuple[object, ...]:
    """Run three producers against an owner that loses answers and takes new terms; return all that can be seen."""
    world = world_type()
    rng = random.Random(seed)
    plan = FaultPlan(seed)
    seen: list[object] = []

    async def main() -> None:
        await world.channels("a", "b")
        owner = world.owner(MemoryWal(world.log, plan), snapshot_records=20)
        following = world.follow("a", "b")
        term = 0

        async def take() -> None:
            nonlocal term
            term += 1
            rates, plan.rates = plan.rates, Rates()
            limit = add_ms(owner.clock.now(), 1_000_000)
            grants = [
                ChannelGrant(name, term, owner.limit, limit, owner.channel_owner.checkpoints().get(name, b""))
                for name in "ab"
            ]
            owner.limit = limit
            await owner.channel_owner.acquire_all(grants)
            for name in "ab":
                owner.channel_owner.activate(name, term)
            plan.rates = rates

        async def produce(name: str) -> None:
            for number in range(40):
                batch = [(rng.choice("ab"), world.rows(f"{name}{number}".encode())) for _ in range(rng.randint(1, 3))]
                for _ in range(5):
                    try:
                        seen.append((name, await owner.channel_owner.append(batch, producer=name, pseq=number)))
                        break
                    except Exception as error:  # -- every error is part of the trace
                        seen.append((name, repr(error)))
                        await asyncio.sleep(rng.random() * 0.05)

        async def beat() -> None:
            while True:
                if owner.channel_owner.stalled:
                    await take()
                owner.channel_owner.tick_all()
                await asyncio.sleep(0.02)

        await take()
        plan.rates = RATES
        beats = asyncio.ensure_future(beat())
        await asyncio.gather(*map(produce, "xyz"))
        await asyncio.sleep(1)
        beats.cancel()
        packs = await following.stop()
        seen.extend((pack.begin_ts, pack.end_ts, [bytes(m.body) for m in pack.messages]) for pack in packs)
        seen.append([position.to_bytes() for position in packs[-1].end_positions.values()])

    run_virtual(main(), world.source)
    return world.log.dump(), plan.trace, seen


@pytest.mark.slow
def test_two_runs_with_one_seed_are_identical_to_the_byte(seed, make_world):
    first, second = traced(make_world, seed), traced(make_world, seed)
    assert first == second
    assert first != traced(make_world, seed + 1)
    dump, trace, _ = first
    assert len(dump) > 100
    assert {line.partition(":")[2] for line in trace} >= {"fail", "delay"}


@pytest.mark.slow
def test_what_was_acknowledged_is_delivered_once_and_the_rest_not_at_all(seed, make_world):
    for run in range(5):
        _, _, seen = traced(make_world, seed + run)
        packs = [item for item in seen if isinstance(item, tuple) and len(item) == 3]
        delivered = [body for _, _, bodies in packs for body in bodies]
        acknowledged = {(name, item.ts) for name, item in (t for t in seen if len(t) == 2) if hasattr(item, "ts")}
        by_batch: dict[bytes, int] = {}
        for body in delivered:
            by_batch[body] = by_batch.get(body, 0) + 1
        assert len(by_batch) == len(acknowledged)
        assert max(by_batch.values()) <= 3  # as many records as the batch has, never a second time


def test_a_plan_touches_only_its_channels_and_only_faults_they_can_have():
    plan = FaultPlan(3, Rates(fail=1, drop=1), channels="dml")
    assert plan.decide("other", ephemeral=False) is Fault.NONE
    assert plan.decide("x-dml-1", ephemeral=False) is Fault.FAIL
    assert plan.decide("x-dml-1", ephemeral=True) is Fault.DROP
    assert plan.trace == ["x-dml-1:fail", "x-dml-1:drop"]
    assert [FaultPlan(4, Rates(crash=0.5)).crashes("a") for _ in range(1)] == [
        FaultPlan(4, Rates(crash=0.5)).crashes("a")
    ]
