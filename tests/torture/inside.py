"""What the processes of a run share: orders on stdin, a wall clock that can be stepped, a disk that can be full.

Orders are lines: `clock MS` sets the process' wall clock so far from the machine's, `stop` ends it in good order. The
end of stdin ends it at once, so no process outlives the run.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidewal.adapters.objects.pace import MaintenancePace
from tidewal.runtime.aio_fsync import KernelDisk
from tidewal.runtime.clock import SystemClock
from tidewal.runtime.config.loading import load_settings, wal_options
from tidewal.runtime.log.opening import backend_name, open_wal
from tidewal.runtime.log.wal import Payload, Wal

COPIES = "copies"  # the topic into which Spark copies the ids of NUMBERS
CHANNELS = 4
TOPIC = "messages"  # of as many partitions as there are channels
LATER = "later"  # the topic of messages that are due later, which gets other numbers of partitions, too
GROWING = "growing"  # the topic that gets more partitions and fewer, as many at most
BRISK = MaintenancePace(turn_s=1, checkpoint_blocks=100, run_blocks=100)  # so that a round has many of each
FULL = "disk-is-full"  # a file of this name beside the log makes the disk full

_clock_offset_ms = 0


class SteppedClock(SystemClock):
    """The machine's clocks, the wall clock moved by what the run asks for."""

    def wall_ms(self) -> int:
        return super().wall_ms() + _clock_offset_ms


class FillingDisk(KernelDisk):
    """A disk that is full while the flag is there: no file grows, and what was allocated before can be written."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def write(self, file: int, buffers: Sequence[Payload], offset: int) -> int:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._flag.exists() and offset + size > self.size(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, buffers, offset)

    def free_bytes(self, directory: str) -> int:
        return 0 if self._flag.exists() else super().free_bytes(directory)


def obey(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Follow the orders from now on; the event is set by `stop`."""
    stopping = asyncio.Event()

    def follow() -> None:
        global _clock_offset_ms
        for line in sys.stdin:
            match line.split():
                case ["clock", ms]:
                    _clock_offset_ms = int(ms)
                case _:
                    loop.call_soon_threadsafe(stopping.set)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    return stopping


async def open_log(url: str, *, own: bool | None = None, read_only: bool = False) -> Wal:
    """The log of the run, with the clock and the disk that can be disturbed. With `own` None the process may own a log
    on object storage, and never owns a directory of RocksMQ, where it would be in the node's place. A log on object
    storage that is `read_only` is read from the store alone."""
    options: dict[str, Any] = {}
    if url.startswith("rocksmq://"):
        directory = Path(url.removeprefix("rocksmq://"))
        options = {"own": bool(own), "clock": SteppedClock(), "disk": FillingDisk(directory.with_name(FULL))}
    elif backend_name(url) == "objects":
        options = wal_options(load_settings(), url) | {"own": own, "clock": SteppedClock(), "pace": BRISK}
        if read_only:
            linked_to_none = options["settings"].model_copy(update={"listen": "", "advertise": ""})
            options |= {"read_only": True, "cluster": None, "settings": linked_to_none}
    return await open_wal(url, **options)


def tell(text: object) -> None:
    """A line into the log of this process."""
    print(text, file=sys.stderr, flush=True)
