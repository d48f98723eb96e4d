"""Where the stored cuts of a collection are found."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tidewal.runtime.catalog.cuts import Cut, CutEnd
from tidewal.runtime.log.record import encode
from tidewal.spark_bridge.plan import cut_log
from tidewal.spark_bridge.plan.cut_log import CutLog

sys.path.insert(0, str(Path(__file__).parent))
from plans import plan_of, told
from story import NAMES, ListLog, Story, random_row


def cut_log_of(log: ListLog) -> CutLog:
    """Of the collection in a log."""
    return CutLog(log, NAMES.cuts, plan_of(log).collection())


def test_cuts_are_looked_for_where_they_are(rng: random.Random) -> None:
    log, story = told(rng, 200, ms=1000)
    cuts = cut_log_of(log)
    log.reads.clear()
    assert cuts.newest() == story.cuts[-1]
    first = min(after for channel, after, _ in log.reads if channel == NAMES.cuts)
    assert first is not None
    assert first > log.entries[NAMES.cuts][-30].id
    for _ in range(20):
        at = rng.randrange(len(story.cuts))
        time = story.cuts[at].time
        assert cuts.last_upto(time) == story.cuts[at]
        assert cuts.last_upto(time - 1) == (story.cuts[at - 1] if at else None)
        assert next(cuts.between(time - 1)) == story.cuts[at]
        assert list(cuts.between(time, story.cuts[-2].time)) == story.cuts[at + 1 : -1]


def test_cuts_out_of_order_are_passed_over(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(10):
        story.write(flights, 0, [random_row(rng)])
        story.cut(flights)
    entries = log.entries[NAMES.cuts]
    payloads = [(entry.timestamp, entry.payload) for entry in entries]
    payloads[4], payloads[5] = payloads[5], payloads[4]
    payloads[8], payloads[9] = payloads[9], payloads[8]
    entries[:] = [
        entry._replace(timestamp=ts, payload=body) for entry, (ts, body) in zip(entries, payloads, strict=True)
    ]
    cuts = CutLog(log, NAMES.cuts, flights)
    assert cuts.newest() == story.cuts[9]
    times = [cut.time for cut in cuts.between(0)]
    assert times == sorted(times)
    assert times[-1] == story.cuts[9].time


def test_points_to_split_at_are_few_and_even(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_log, "POINTS_MAX", 10)
    log, story = told(rng, 70)
    found = cut_log_of(log).points(0, story.cuts[-1].time)
    at = [story.cuts.index(cut) for cut in found]
    assert 5 <= len(at) <= 11
    assert len({b - a for a, b in pairwise(at)}) == 1


def test_a_cut_is_about_every_collection_whose_channels_it_has(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    own = story.cut(flights)
    a, _ = own.ends
    elsewhere = {"elsewhere": CutEnd(1, 1, b"")}
    found = [
        Cut(own.time + 1, own.ends | elsewhere),
        Cut(own.time + 2, {a: own.ends[a]} | elsewhere),
        Cut(flights.created_ts - 1, own.ends),
        Cut(own.time + 3, own.ends, flights.id, flights.name),  # as an earlier version has stored them
        Cut(own.time + 4, own.ends, flights.id - 1, flights.name),  # one of that name that was dropped
        Cut(own.time + 5, own.ends, flights.id + 1, "another"),
    ]
    for cut in found:
        log.append(NAMES.cuts, encode(cut.to_record()), cut.time)
    cuts = list(CutLog(log, NAMES.cuts, flights).between(0))
    assert [cut.time for cut in cuts] == [own.time, own.time + 1, own.time + 3]
    assert all(cut.ends == own.ends for cut in cuts)


def test_the_newest_cut_moves_only_where_the_collection_ends_later(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    first = story.cut(flights)
    cuts = CutLog(log, NAMES.cuts, flights)
    assert cuts.newest() == first
    story.cut(flights)
    assert cuts.newest() == first
    story.write(flights, 1, [random_row(rng)])
    assert cuts.newest() == first
    later = story.cut(flights)
    assert cuts.newest() == later
