"""Rows that retention removes before, while or after a read of a collection is planned: the read tells."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tidewal.runtime.errors import PositionLost

sys.path.insert(0, str(Path(__file__).parent))
from plans import plan_of, rows_of, told
from story import NAMES


@pytest.mark.parametrize("left", [0, 1])
def test_an_as_of_read_tells_that_its_beginning_was_removed(rng: random.Random, left: int) -> None:
    log, story = told(rng, 5, ms=10)
    plan = plan_of(log, timestamp_as_of=story.cuts[-1].time)
    assert len(rows_of(log, plan.all_tasks())) == len(story.rows)
    channel = NAMES.pchannel(0)
    log.entries[channel] = log.entries[channel][len(log.entries[channel]) - left :]
    with pytest.raises(PositionLost, match="removed the beginning"):
        plan.all_tasks()


def test_what_goes_between_planning_and_reading_is_told(rng: random.Random) -> None:
    log, _ = told(rng, 5)
    strict, lax = plan_of(log).all_tasks(), plan_of(log, fail_on_data_loss=False).all_tasks()
    channel = strict[0].channel
    del log.entries[channel][:1]
    with pytest.raises(PositionLost, match=f"removed rows of {channel} that were not read yet"):
        rows_of(log, strict)
    left = plan_of(log).all_tasks()
    assert rows_of(log, lax) == rows_of(log, left)
    log.entries[channel].clear()
    assert rows_of(log, plan_of(log).all_tasks()) == rows_of(log, left[1:])


def test_what_goes_before_a_first_batch_runs_again_is_told(rng: random.Random) -> None:
    log, story = told(rng, 5)
    found = []
    for strict in (True, False):
        plan = plan_of(log, fail_on_data_loss=strict, starting="earliest")
        start, end = (json.loads(json.dumps(offset)) for offset in (plan.begin(), plan.newest()))
        assert len(rows_of(log, plan.tasks(start, end))) == len(story.rows)
        assert rows_of(log, plan.tasks(start, start)) == []
        found.append((plan, start, end))
    (strictly, *_), (laxly, start, end) = found
    channel = NAMES.pchannel(0)
    for left in (len(log.entries[channel]) - 1, 0):
        log.entries[channel] = log.entries[channel][len(log.entries[channel]) - left :]
        with pytest.raises(PositionLost, match=f"removed rows of {channel} that were not read yet"):
            rows_of(log, strictly.tasks(start, end))
        assert rows_of(log, laxly.tasks(start, end)) == rows_of(log, plan_of(log).all_tasks())


@pytest.mark.parametrize("tasks", [1, 4])
def test_what_goes_while_an_as_of_read_is_planned_is_told(rng: random.Random, monkeypatch: Any, tasks: int) -> None:
    log, story = told(rng, 5, ms=10)
    plan = plan_of(log, timestamp_as_of=story.cuts[-1].time, min_partitions=tasks)
    check = plan._check_beginning

    def passed_by(*args: Any) -> None:
        check(*args)
        del log.entries[args[0].channel][:-1]

    monkeypatch.setattr(plan, "_check_beginning", passed_by)
    with pytest.raises(PositionLost):
        rows_of(log, plan.all_tasks())
