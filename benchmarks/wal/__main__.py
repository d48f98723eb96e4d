"""Run the subjects, or some: `python -m benchmarks.wal --only appends,socket`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

from ..report import chosen
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
    names = chosen("wal", __doc__, SUBJECTS)
    with scratch() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(directory, runner)
        try:
            for name in names:
                SUBJECTS[name](bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
