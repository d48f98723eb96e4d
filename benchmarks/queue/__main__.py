"""Run the subjects, or some: `python -m benchmarks.queue --only filter,transactions [--quick]`. The figures come as a
table at the end, with their goals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from tidewal.runtime import collect_rarely

from ..report import Figure
from ..wal.limits import scratch
from . import delays, filters, migration, pending, replication, transactions
from .bench import FULL, QUICK, Bench
from .goals import print_table

SUBJECTS: dict[str, Callable[[Bench], list[Figure]]] = {
    "delays": delays.measure,
    "pending": pending.measure,
    "filter": filters.measure,
    "transactions": transactions.measure,
    "migration": migration.measure,
    "replication": replication.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.queue", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, help="of each subject")
    parser.add_argument("--pending", type=int, help="messages that wait while a node starts")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if unknown := set(names) - set(SUBJECTS):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    collect_rarely()  # as a node's process does
    sizes = QUICK if chosen.quick else FULL
    sizes = replace(sizes, rounds=chosen.rounds or sizes.rounds, pending=chosen.pending or sizes.pending)
    with scratch() as directory, Bench(directory, sizes) as bench:
        figures = [figure for name in names for figure in SUBJECTS[name](bench)]
    print_table(figures)


if __name__ == "__main__":
    main()
