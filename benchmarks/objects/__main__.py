"""Run the subjects, or some: `python -m benchmarks.objects --only appends,reading`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import uvloop

from ..wal.limits import scratch
from . import appends, reading, requests, strong_read
from .stores import Bench, running

SUBJECTS: dict[str, Callable[[Bench], None]] = {
    "appends": appends.measure,
    "reading": reading.measure,
    "strong_read": strong_read.measure,
    "requests": requests.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.objects", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    with (
        scratch() as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        running(Path(directory), runner) as bench,
    ):
        for name in names:
            SUBJECTS[name](bench)


if __name__ == "__main__":
    main()
