"""What all benchmarks share: one JSON line per figure, and rounds in which the candidates take turns."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """The values of one candidate, one per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value to report."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return min(self.values), max(self.values)


@dataclass(frozen=True, slots=True)
class Figure:
    """What was printed: the median, and the lowest and the highest round."""

    name: str
    value: float
    unit: str
    spread: tuple[float, float]


def interleaved(candidates: Mapping[str, Callable[[], float]], rounds: int = 5) -> dict[str, Rounds]:
    """Measure each candidate once per round, so that a slow moment of the machine meets all of them alike.

    A candidate does its work and returns its value (a rate, a latency). One round before counts for nothing: it warms
    up. The garbage of one candidate is collected before the next one starts.
    """
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, candidate in candidates.items():
            gc.collect()
            value = candidate()
            if number > 0:
                values[name].append(value)
    return {name: Rounds(tuple(measured)) for name, measured in values.items()}


def per_second(count: int, work: Callable[[], object]) -> float:
    """The rate at which `work` does its `count` things."""
    began_s = time.perf_counter()
    work()
    return count / (time.perf_counter() - began_s)


def figure(
    name: str,
    value: float,
    unit: str,
    spread: tuple[float, float] | None = None,
    beside: Mapping[str, float | str] | None = None,
) -> Figure:
    """Print one figure: its median, its spread over the rounds, and what was measured beside it."""
    low, high = spread or (value, value)
    line = {
        "name": name,
        "value": _short(value),
        "unit": unit,
        "spread": [_short(low), _short(high)],
        "beside": {key: _short(other) for key, other in (beside or {}).items()},
    }
    print(json.dumps(line), flush=True)
    return Figure(name, value, unit, (low, high))


def ratio(name: str, ours: Rounds, others: Rounds, unit: str, **beside: float | str) -> Figure:
    """Print what came of `ours` for each of `others`, round by round."""
    ratios = Rounds(tuple(one / other for one, other in zip(ours.values, others.values, strict=True)))
    return figure(name, ratios.median, unit, ratios.spread, beside)


def chosen(benchmark: str, description: str | None, subjects: Iterable[str]) -> Sequence[str]:
    """Those of the subjects that the command line names with `--only`, all by default; ends where there is no such."""
    known = list(subjects)
    parser = argparse.ArgumentParser(prog=f"benchmarks.{benchmark}", description=description)
    parser.add_argument("--only", metavar="NAMES", default=",".join(known), help="of " + ", ".join(known))
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    return names


def _short(value: float | str) -> float | str:
    """Four significant digits: what lies behind them is noise."""
    return value if isinstance(value, str) else float(f"{value:.4g}")
