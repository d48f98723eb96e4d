"""The example `examples/word_count`: words are counted exactly once, whoever is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.commands import Start
from tests.examples.conftest import EXAMPLES

pytestmark = pytest.mark.slow

PROGRAM = "word_count/word_count.py"
URL = "rocksmq://./log"
BOUND_S = 100.0


def lines_of(round: int) -> list[str]:
    return [f"tide {round} wave {number % 7}" for number in range(300)]


def started(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """A worker that has joined the group."""
    assert process.stdout is not None
    assert process.stdout.readline() == "counting\n"
    return process


async def test_each_word_is_counted_once_though_workers_are_killed(
    load: Callable[[str], ModuleType], start: Start, tmp_path: Path
) -> None:
    example = load(PROGRAM)
    killed, staying = started(start("count", URL)), started(start("count", URL))
    expected = Counter[str]()
    for round in range(3):
        async with await example.open_log(f"rocksmq://{tmp_path}/log") as log:
            await example.write(log, lines_of(round))
        killed.kill()  # at any moment: perhaps in the middle of a batch, perhaps as the owner of the log
        expected.update(word for line in lines_of(round) for word in line.split())
        killed, staying = staying, started(start("count", URL))
    async with asyncio.timeout(BOUND_S), await example.open_log(f"rocksmq://{tmp_path}/log") as log:
        counted = Counter[str]()
        while counted.total() < expected.total():
            await asyncio.sleep(0.05)
            counted = await example.totals(log)
    assert counted == expected


def test_lines_from_standard_input_are_counted_and_shown(start: Start, tmp_path: Path) -> None:
    write = subprocess.run(
        [sys.executable, EXAMPLES / PROGRAM, "write", URL],
        input="to be or\nnot to be\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert write.stdout == "2 lines\n"
    worker = started(start("count", URL))
    shown = ""
    while shown.splitlines()[:2] not in (["2 to", "2 be"], ["2 be", "2 to"]):
        shown = start("show", URL).communicate(timeout=BOUND_S)[0]
    assert sorted(shown.splitlines()) == ["1 not", "1 or", "2 be", "2 to"]
    worker.terminate()
