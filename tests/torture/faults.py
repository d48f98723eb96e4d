"""Faults: drawn by lot from a seed, all of a round in advance, so that a list of them can be repeated and shortened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

HOUR_MS = 3_600_000
PER_ROUND = (4, 10)
LENGTHS_S = (0.5, 8.0)
GARBAGE = 30  # entries at a time: a reader stops at 100 bad records in a row
WORKERS = ("kill", "pause", "kill", "clock")  # what happens to processes; each as often as it stands here
VERSION_AT = 2  # in a record
FROM_OUTSIDE = ("garbage", "delete", "garbage", "grow")
MOVED = 0.5  # of the rounds over a log that can be moved


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at_s` after the round's clients began, `length_s` long where it has a length. `target` is the name of
    a process, where it is one that suffers. `seed` decides what else is random about it."""

    at_s: float
    kind: str
    target: str
    length_s: float
    seed: int

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s  {self.kind} {self.target}".rstrip() + f" ({self.length_s:.1f} s)"


def draw(
    rng: random.Random,
    of_log: Sequence[str],
    workers: Sequence[str],
    round_s: float,
    decisive: Sequence[str] = (),
    *,
    moves: Sequence[str] = (),
) -> list[Fault]:
    """The faults of a round, in order. Those of the log itself, of processes, and from outside come equally often; one
    that is `decisive`, where there are such, comes in any case, once the clients have begun. Behind some of
    the rounds another log takes the place of this one, in one of the ways in `moves`."""
    found: list[Fault] = []
    for _ in range(rng.randint(*PER_ROUND)):
        kind = rng.choice(rng.choice((of_log, WORKERS, FROM_OUTSIDE)))
        target = rng.choice(workers) if kind in WORKERS else ""
        found.append(Fault(rng.uniform(0, round_s), kind, target, rng.uniform(*LENGTHS_S), rng.randrange(2**32)))
    if decisive:
        at_s = rng.uniform(round_s / 4, round_s)
        found.append(Fault(at_s, rng.choice(decisive), "", rng.uniform(*LENGTHS_S), rng.randrange(2**32)))
    if moves and rng.random() < MOVED:
        found.append(Fault(round_s, rng.choice(moves), "", 0.0, rng.randrange(2**32)))
    return sorted(found, key=lambda fault: fault.at_s)


def clock_step_ms(rng: random.Random) -> int:
    """How far a wall clock is set: an hour forward or back, or a little."""
    return rng.choice([HOUR_MS, -HOUR_MS, rng.randrange(-60_000, 60_000)])


def garbage(rng: random.Random, real: Sequence[bytes]) -> list[bytes]:
    """Entries that no reader may trip over: random bytes, and real entries that are cut, flipped, or sent again."""
    return [_garbage(rng, real) for _ in range(rng.randint(1, GARBAGE))]


def _garbage(rng: random.Random, real: Sequence[bytes]) -> bytes:
    original = bytearray(rng.choice(real)) if real else bytearray()
    match rng.choice(["random", "cut", "flipped", "again"]):
        case "cut" if len(original) > 1:
            return bytes(original[: rng.randrange(1, len(original))])
        case "flipped" if original:
            position = rng.randrange(len(original))
            if position == VERSION_AT:  # a record of a newer Tidewal: what must know it stops, as it should
                position -= 1
            original[position] ^= 1 << rng.randrange(8)
            return bytes(original)
        case "again" if original:
            return bytes(original)
        case _:
            return rng.randbytes(rng.randrange(1, 300))
