"""Run the subjects, or some: `python -m benchmarks.objects --only appends,reading`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import uvloop

from ..report import chosen
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
    names = chosen("objects", __doc__, SUBJECTS)
    with (
        scratch() as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        running(Path(directory), runner) as bench,
    ):
        for name in names:
            SUBJECTS[name](bench)


if __name__ == "__main__":
    main()
