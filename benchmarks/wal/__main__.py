"""Run the subjects, or some: `python -m benchmarks.wal --only appends,socket`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import uvloop

from . import appends, busy, channels, device, ephemeral, opening, reading, sockets
from .limits import Bench, scratch

SUBJECTS: dict[str, Callable[[Bench], None]] = {
    "opening": opening.measure,
    "appends": appends.measure,
    "socket": sockets.measure,
    "device": device.measure,
    "reading": reading.measure,
    "busy": busy.measure,
    "channels": channels.measure,
    "ephemeral": ephemeral.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.wal", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    with scratch() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(directory, runner)
        try:
            for name in names:
                SUBJECTS[name](bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
