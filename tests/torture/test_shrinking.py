"""A list of faults becomes shorter, and stays one that fails."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tests.torture.faults import Fault, draw
from tests.torture.shrinking import REPETITIONS, repeat, shrink


def some(rng: random.Random) -> list[Fault]:
    return [fault for _ in range(3) for fault in draw(rng, ["cut"], ["node"], 40.0)]


async def test_what_does_not_matter_is_left_out(rng: random.Random) -> None:
    faults = some(rng)
    needed = set(rng.sample(faults, 2))

    async def fails(given: Sequence[Fault]) -> bool:
        return needed <= set(given)

    assert set(await shrink(faults, fails, math.inf)) == needed
    assert await repeat(faults, fails, math.inf) == (REPETITIONS, REPETITIONS)


async def test_without_time_all_is_left_as_it_is(rng: random.Random) -> None:
    faults = some(rng)

    async def fails(given: Sequence[Fault]) -> bool:
        raise AssertionError("there is no time")

    assert await shrink(faults, fails, 0.0) == faults
    assert await repeat(faults, fails, 0.0) == (0, 0)


def test_one_seed_draws_the_same_faults(seed: int) -> None:
    assert some(random.Random(seed)) == some(random.Random(seed))


def test_each_round_has_a_decisive_fault_once_its_clients_have_begun(rng: random.Random) -> None:
    for _ in range(100):
        faults = draw(rng, ["cut"], ["node"], 40.0, decisive=["owner killed", "owner stopped"])
        [decisive] = [fault for fault in faults if fault.kind.startswith("owner")]
        assert 10 <= decisive.at_s <= 40
