"""Clients, a node, groups and a Spark query over one log, under faults that are drawn by lot from a seed.

    make torture ARGS="--minutes 30 --log kafka"

The run stops at the first violation of a promise, keeps histories, logs, tables, dead letters and the brokers' data,
says in how many of five repetitions the violation comes back, and tries to shorten the list of faults that leads to it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.turns import commit_number

from .faults import Fault
from .logs import LOGS, logs_in_turn
from .rounds import ROUND_S, Run, Violation
from .shrinking import repeat, shrink

SHRINK_S = 15 * 60.0
BY_COMMIT = "by-commit"
SHOWN = 60


def say(text: str) -> None:
    """A line of the report, at once."""
    print(text, flush=True)


def started(given: argparse.Namespace, folder: Path) -> Run:
    """A run as the options say, to be entered."""
    return Run(given.log, folder, given.seed, spark=given.spark, say=say, round_s=given.round, moves=given.moves)


async def torture(given: argparse.Namespace, folder: Path) -> int:
    """Rounds until the time is over; the exit status."""
    rng, end, total = random.Random(given.seed), time.monotonic() + given.minutes * 60, 0
    faults: list[Fault] = []
    number = 0
    try:
        async with started(given, folder) as run:
            while not number or time.monotonic() < end:
                faults = run.draw(rng)
                say(f"round {number}")
                total += (succeeded := await run.round(faults))
                say(f"round {number} holds: {succeeded} operations succeeded")
                number += 1
    except Violation as violation:
        say(f"\nround {number}: {len(violation.found)} VIOLATIONS; repeat with --seed {given.seed}")
        for found in violation.found[:SHOWN]:
            say(f"  {found}")
        say(f"histories, logs, tables, dead letters and the brokers' data are kept in {folder}")
        if given.shrink:
            await explain(given, faults, folder)
        return 1
    say(f"{number} rounds and {total} operations without a violation; seed {given.seed}")
    return 0


async def explain(given: argparse.Namespace, faults: Sequence[Fault], folder: Path) -> None:
    """Repeat the round by itself, then with fewer faults."""
    deadline = time.monotonic() + SHRINK_S
    tries = 0

    async def fails(some: Sequence[Fault]) -> bool:
        nonlocal tries
        tries += 1
        home = folder / f"again-{tries}"
        home.mkdir()
        say(f"\nagain, with {len(some)} faults, in {home}")
        try:
            async with started(given, home) as run:
                await run.round(some)
        except Violation as violation:
            say(f"  violated: {violation.found[0]}")
            return True
        shutil.rmtree(home, ignore_errors=True)
        return False

    failed, of = await repeat(faults, fails, time.monotonic() + SHRINK_S / 2)
    say(f"\nthe violation came back in {failed} of {of} repetitions")
    if failed:
        shortest = await shrink(faults, fails, deadline)
        say(f"\n{len(shortest)} of {len(faults)} faults lead to it:")
        for fault in shortest:
            say(f"  {fault}")


def log_by_commit() -> str:
    """One of the logs that take turns and can be started here, by the commit's hash: so all have their turn."""
    logs = logs_in_turn()
    return logs[commit_number() % len(logs)]


def main() -> int:
    """Parse the options, run, and return the exit status: 0 without a violation."""
    parser = argparse.ArgumentParser(
        prog="make torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long rounds are begun (10)")
    parser.add_argument("--log", choices=[*LOGS, BY_COMMIT], default="rocksmq", help="over which log (rocksmq)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run's faults and clients' operations")
    parser.add_argument("--round", type=float, default=ROUND_S, help=f"seconds of faults in a round ({ROUND_S:g})")
    parser.add_argument(
        "--moves",
        type=lambda given: given.split(","),
        help="how another log takes the place of this one: migrate,promote,force",
    )
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="without the Spark query")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="end at a violation")
    given = parser.parse_args()
    if given.log == BY_COMMIT:
        given.log = log_by_commit()
    if unknown := sorted({*(given.moves or ())}.difference(LOGS[given.log].moves)):
        parser.error(f"{given.log} has no --moves {','.join(unknown)}")
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(2**32)
    folder = Path(tempfile.mkdtemp(prefix=f"tidewal-torture-{given.log}-"))
    logging.basicConfig(filename=folder / "run.log", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    say(f"{given.log}, seed {given.seed}, in {folder}")
    status = asyncio.run(torture(given, folder))
    if status == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
