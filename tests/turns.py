"""What one run tries of what takes turns: all of it would take too long, and each run takes another part."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

EVERY = int(os.environ.get("TIDEWAL_TEST_EVERY", "3"))  # of the writes at which a process is killed; with 1 all of them


def commit_number() -> int:
    """The hash of the commit, as a number. Raises `CalledProcessError` outside a clone."""
    return int(subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout, 16)


def writes_in_turn(turn: int) -> Iterator[tuple[int, int]]:
    """Each `EVERY`th write, counted from 1, for ever: which ones, `turn` says. Each with its number among those, from
    1, for what alternates from one to the next: by the write it would be alike at all of them. Prints each, for a test
    that fails there."""
    write = 1 + turn % EVERY
    number = 1
    while True:
        print(f"killed at write {write}")
        yield write, number
        write, number = write + EVERY, number + 1


def in_turn(choices: Sequence[Choice], turn: int) -> Iterator[tuple[str, Choice]]:
    """The choice of this run, which `turn` says, with `TIDEWAL_TEST_EVERY` 1 all; each with its number, as the name of
    a directory. Prints it, for a test that fails there."""
    for number, choice in enumerate(choices):
        if EVERY == 1 or number == turn % len(choices):
            print(f"in turn: {choice}")
            yield str(number), choice
