"""Kill the demo at random moments, run it again on its directory, and see that it ends with everything agreeing.

    python tests/kill_demo.py [--kills 20] [--spark-kills 5] [--events 100000] [--seed N]

A first run, which is left alone, tells how long each step takes. Then, for each kill, a fresh run is killed with
SIGKILL somewhere in a step that is drawn by lot (so many of them in Spark's part), whatever processes it had must be
gone soon, and the run that follows on the same directory must exit with 0. The exit status is 0 when all did.
Needs Linux, for it looks into /proc.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(rb"^\d+\. (\w+)")
SPARK = "Spark"
STEPS = ("A", "Replay", "Delta", SPARK)  # the first words of their headings
RUN_WITHIN_S = 300.0
GONE_WITHIN_S = 90.0  # Spark's JVM ends at once, but lets a hook at its shutdown hang for 30 s (Hadoop's default)


@dataclass(frozen=True, slots=True)
class Moment:
    """So many seconds after a step began."""

    step: str
    delay_s: float


class Run:
    """One run of the demo as a process of its own."""

    def __init__(self, directory: Path, events: int, options: list[str]) -> None:
        self._started = time.monotonic()
        self.output = b""
        self.began_s: dict[str, float] = {}
        command = [sys.executable, "-m", "examples.flights"]
        command += ["--keep", str(directory), "--events", str(events), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT
        )

    def follow(self, until: str = "") -> None:
        """Read what the run prints, up to its end or the heading of step `until`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            found = HEADING.match(line)
            if found:
                self.began_s[found[1].decode()] = time.monotonic() - self._started
            if until in self.began_s:
                return

    def finish(self) -> int:
        """Wait for the end and return the exit status."""
        self.follow()
        status = self._process.wait(RUN_WITHIN_S)
        self.began_s["end"] = time.monotonic() - self._started
        return status

    def kill(self, moment: Moment) -> set[int]:
        """Kill the process at `moment`, or find it ended; returns the processes that it leaves behind."""
        self.follow(until=moment.step)
        try:
            self._process.wait(moment.delay_s)
        except subprocess.TimeoutExpired:
            left = descendants(self._process.pid)
            self._process.kill()
        else:
            left = set[int]()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return left


def descendants(pid: int) -> set[int]:
    """The children of a process and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    found, wave = set[int](), {pid}
    while wave := {child for child, parent in parents.items() if parent in wave}:
        found |= wave
    return found


def still_there(pids: set[int]) -> set[int]:
    """Those that have not ended within `GONE_WITHIN_S`."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = "?"
    return f"process {pid} ({words[:80].rstrip()})"


def durations(folder: Path, events: int, options: list[str]) -> dict[str, float]:
    """How long each step takes in a run that is left alone."""
    run = Run(folder / "whole", events, options)
    status = run.finish()
    shutil.rmtree(folder / "whole")
    if status != 0:
        raise SystemExit(f"the demo fails even when nobody kills it, with {status}:\n{run.output.decode()}")
    names = list(run.began_s)
    took = {name: run.began_s[after] - run.began_s[name] for name, after in pairwise(names)}
    print("seconds:", ", ".join(f"{name} {took[name]:.1f}" for name in STEPS if name in took), flush=True)
    return took


def try_once(folder: Path, moment: Moment, events: int, options: list[str]) -> bool:
    """Kill one run, run again, and say how it went."""
    directory = folder / "killed"
    left = [_command(pid) for pid in sorted(still_there(Run(directory, events, options).kill(moment)))]
    again = Run(directory, events, options)
    status = again.finish()
    resumed = re.search(rb"resumes ([\d,]+)", again.output)
    verdict = "agrees" if status == 0 else f"FAILED with {status}"
    if left:
        verdict += f", but {', '.join(left)} outlived it"
    found = resumed[1].decode() if resumed else "0"
    print(f"{moment.step:7} +{moment.delay_s:6.3f} s  found {found:>9} events, {verdict}", flush=True)
    if status != 0:
        print(again.output.decode(errors="replace"), flush=True)
        return False
    shutil.rmtree(directory)
    return not left


def main() -> int:
    """Parse the options, kill, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--spark-kills", type=int, default=5)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"repeat with --seed {seed}", flush=True)
    rng = random.Random(seed)
    options = [] if given.spark_kills else ["--no-spark"]
    steps = [SPARK] * given.spark_kills + rng.choices(STEPS[:-1], (1, 3, 2), k=given.kills - given.spark_kills)
    rng.shuffle(steps)
    with tempfile.TemporaryDirectory(prefix="tidewal-kill-", ignore_cleanup_errors=True) as name:
        took = durations(Path(name), given.events, options)
        moments = [Moment(step, rng.uniform(0, took[step])) for step in steps]
        good = sum(try_once(Path(name), moment, given.events, options) for moment in moments)
    print(f"{good} of {len(moments)} kills were recovered from")
    return 0 if good == len(moments) else 1


if __name__ == "__main__":
    raise SystemExit(main())
