"""What one run tries of what takes turns: all of it would take too long, and each run takes another part."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Choice = TypeVar("Choice")

MARKED = 6  # tests with two or three of such marks have each of the turns, so what is chosen within one has others
EVERY = int(os.environ.get("TIDEWAL_TEST_EVERY", "3"))  # of the writes at which a process is killed; with 1 all of them


def commit_number() -> int:
    """The hash of the commit, as a number. Raises `CalledProcessError` outside a clone."""
    return int(subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout, 16)


def cases_in_turn(choices: Sequence[object], *marks: pytest.MarkDecorator, of: int = 0) -> list[ParameterSet]:
    """Parameters of a test or a fixture, with `marks`, of which a run tries one, or each `of`th."""
    of = of or len(choices)
    return [
        pytest.param(choice, marks=[*marks, pytest.mark.in_turn(number % of, of)])
        for number, choice in enumerate(choices)
    ]


def turn_of_run() -> int:
    """Says what this run tries: by the commit in CI, where the seed is always the same."""
    return commit_number() if os.environ.get("CI") == "true" else int(os.environ["TIDEWAL_TEST_SEED"])


@pytest.fixture(scope="session")
def turn() -> int:
    return turn_of_run()


def has_turn(marks: Iterable[pytest.Mark], turn: int) -> bool:
    """Whether the run `turn` tries a test with these marks `in_turn`."""
    return all(turn % of == number for number, of in (mark.args for mark in marks))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked `in_turn(number, of)` and have another run's turn: one of `of` runs tries
    number `number`, counted from 0. A test that is named is run."""
    marked = [item for item in items if item.get_closest_marker("in_turn")]
    if not marked or EVERY == 1 or any("::" in argument for argument in config.args):
        return
    turn = turn_of_run()
    left_out = {item for item in marked if not has_turn(item.iter_markers("in_turn"), turn)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


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
        if EVERY == 1 or number == turn // MARKED % len(choices):
            print(f"in turn: {choice}")
            yield str(number), choice
