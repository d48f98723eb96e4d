"""Another log takes the place of a log, by a command that is killed now and then."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tidewal.runtime.log.names import DEFAULT_PREFIX
from tidewal.runtime.log.wal import Wal

from .forcing import FORCE
from .inside import COPIES

COMMAND = Path(sys.executable).with_name("tidewal")
MOST_KILLS = 3
KILLED_AFTER_S = (0.5, 8.0)  # starting costs most of the first second
MOVED_WITHIN_S = 180.0
SHOWN = 500  # characters of what a command that has failed said


async def move(kind: str, old: str, new: str, tables: Path, rng: random.Random, log: Path) -> str:
    """Let `new` take the place of `old`, the log of a node that is stopped: by `tidewal migrate`, or `promote`, where
    it is a replica; of kind `FORCE` `old` is the replica of a log that is gone. Returns what was wrong, "" for nothing;
    the commands' words go to `log`, too."""
    orders = {
        "migrate": ["migrate", old, "--to", new],
        "promote": ["promote", new, "--from", old],
        FORCE: ["promote", old, "--force", "--to", new],
    }
    command = [*orders[kind], "--tables", str(tables)]
    for _ in range(rng.randint(0, MOST_KILLS)):
        status, _ = await _run(command, log, killed_after_s=rng.uniform(*KILLED_AFTER_S))
        if status is not None:
            break  # it was faster, and whether it failed is seen below
    status, said = await _run(command, log, killed_after_s=MOVED_WITHIN_S)
    if status is None:
        return f"`tidewal {command[0]}` does not end within {MOVED_WITHIN_S:g} s"
    return "" if status == 0 else f"`tidewal {command[0]}` fails: {said[-SHOWN:]}"


async def salvage(replica: str, source: str, file: Path, log: Path) -> str:
    """Write what `source`, which is back, has beyond its promoted replica, and let it say that it is replaced. Returns
    what was wrong, "" for nothing; the command's words go to `log`, too."""
    command = ["promote", replica, "--from", source, "--salvage", str(file)]
    status, said = await _run(command, log, killed_after_s=MOVED_WITHIN_S)
    return "" if status == 0 else f"the source is not salvaged ({status}): {said[-SHOWN:]}"


async def _run(command: Sequence[str], log: Path, *, killed_after_s: float) -> tuple[int | None, str]:
    """The exit status of the command, None where it was killed, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(COMMAND, *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    status: int | None = None
    reading = asyncio.create_task(process.communicate())
    try:
        async with asyncio.timeout(killed_after_s):
            await asyncio.shield(reading)
        status = process.returncode
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
    said = (await reading)[0].decode(errors="replace")
    with log.open("a") as file:
        file.write(f"{said}status {status}\n")
    return status, said


async def drop_copies(wal: Wal) -> None:
    """Drop what Spark's query has written, its ledger included: that is not migrated, and the query begins anew."""
    for channel in await wal.channels():
        if channel == COPIES or channel.startswith(f"{DEFAULT_PREFIX}-spark-"):
            await wal.drop_channel(channel)
