"""The goals of the figures, and the table that says which are met."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..report import Figure

AT_LEAST = {
    "queue.delays.release.rocksmq": 50_000.0,
    "queue.delays.release.kafka": 20_000.0,
    "queue.transactions.rocksmq": 0.85,
    "queue.transactions.kafka": 0.7,
}
AT_MOST = {"queue.filter.1in100": 0.25, "queue.pending.start_s": 10.0}


def print_table(figures: Sequence[Figure]) -> None:
    """All figures as a table in Markdown, with the machine's load at the end."""
    print("\n| figure | goal | median | lowest and highest | met |\n|---|---|---|---|---|")
    for each in figures:
        low, high = each.spread
        goal, met = _judged(each)
        print(f"| `{each.name}`, {each.unit} | {goal} | {each.value:,.4g} | {low:,.4g}-{high:,.4g} | {met} |")
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


def _judged(figure: Figure) -> tuple[str, str]:
    if (least := AT_LEAST.get(figure.name)) is not None:
        return f"≥ {least:,g}", "yes" if figure.value >= least else "no"
    if (most := AT_MOST.get(figure.name)) is not None:
        return f"≤ {most:,g}", "yes" if figure.value <= most else "no"
    return "", ""
