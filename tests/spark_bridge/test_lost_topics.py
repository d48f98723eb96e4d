"""Entries of topics that retention removes before, while or after a read is planned: the read tells."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.heartbeats import Announcement, heartbeat
from tidewal.runtime.log.record import encode
from tidewal.spark_bridge.options import MicroBatchLimits
from tidewal.spark_bridge.scan.channel_range import ChannelPlace, ChannelRange, entries_of
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from story import NAMES, ListLog
from topic_story import COLUMNS, NOON, Owned, by_channel, by_tick, rows, shown, values


def test_lost_entries_are_an_error_unless_they_may_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    for number in range(6):
        log.append("a", b"%d" % number, NOON)
    log.entries["b"] = []
    plan = by_channel(log)
    upto = plan.newest()
    assert upto is not None
    start = plan.next(plan.begin(), upto, MicroBatchLimits(rows=2))
    assert start is not None
    del log.entries["a"][:4]
    with pytest.raises(PositionLost, match=r"new checkpoint and startingOffsets=earliest, or set failOnDataLoss=false"):
        rows(log, plan, start, upto)
    tolerant = by_channel(log, fail_on_data_loss=False)
    assert [row["value"] for row in rows(log, tolerant, start, upto)] == [b"4", b"5"]
    assert "rows are lost" in caplog.text
    # Made anew, a channel may end before where it was read on.
    log.entries["a"] = [log.entries["a"][0]._replace(id=bytes(7) + b"\x01")]
    anew = plan.newest()
    assert anew is not None
    with pytest.raises(PositionLost, match="was created anew"):
        plan.next(upto, anew, MicroBatchLimits())
    assert tolerant.next(upto, anew, MicroBatchLimits()) == anew
    assert [row["value"] for row in rows(log, tolerant, upto, anew)] == [b"4"]


class HoledLog(ListLog):
    """Has lost entries in the middle of its channel, as a salvaged log has."""

    holes: tuple[int, ...] = ()

    def read(self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False) -> Any:
        for entries in super().read(channel, after, upto, inclusive=inclusive):
            for entry in entries:
                if int.from_bytes(entry.id) in self.holes:
                    behind = (int.from_bytes(entry.id) + 1).to_bytes(8)
                    raise PositionLost("damaged", requested=entry.id, first_available=behind)
                yield [entry]


@pytest.mark.parametrize(
    ("holes", "left"), [((5,), "346789"), ((3, 4), "56789"), ((5, 7, 8), "3469"), ((9,), "345678")]
)
def test_behind_a_loss_in_the_middle_the_rest_comes_once(holes: tuple[int, ...], left: str) -> None:
    log = HoledLog()
    ids = [log.append("a", b"%d" % number, NOON) for number in range(1, 11)]
    log.holes = holes
    wanted = ChannelRange("", "a", ChannelPlace(ids[1]), ChannelPlace(ids[8]), fail_on_data_loss=False)
    assert "".join(bytes(e.payload).decode() for entries in entries_of(log, wanted) for e in entries) == left


@pytest.mark.parametrize("make", [by_channel, by_tick])
def test_what_goes_before_a_first_batch_of_topics_runs_again_is_told(rng: random.Random, make: Any) -> None:
    owned = Owned(rng)
    for channel in ("a", "b", "a", "b"):
        owned.write(channel)
    plans = [make(owned.log, starting="earliest", fail_on_data_loss=strict) for strict in (True, False)]
    [(start, end), _] = [(plan.begin(), plan.newest()) for plan in plans]
    before = [rows(owned.log, plan, start, end) for plan in plans]
    assert before[0] == before[1] != []
    assert rows(owned.log, plans[0], start, start) == []
    for left in (2, 0):
        owned.log.entries["a"] = owned.log.entries["a"][len(owned.log.entries["a"]) - left :]
        with pytest.raises(PositionLost, match="removed rows of a that were not read yet"):
            rows(owned.log, plans[0], start, end)
        found = rows(owned.log, plans[1], start, end)
        assert values(found, "b") == values(before[0], "b")
        assert set(values(found, "a")) <= set(values(before[0], "a"))


@pytest.mark.parametrize("strict", [True, False])
def test_a_channel_that_was_emptied_is_planned_for_many_tasks(strict: bool) -> None:
    log = ListLog()
    for number in range(4):
        log.append("a", b"%d" % number, NOON + (number << 18))
    log.entries["a"].clear()
    plan = by_channel(log, topics=("a",), min_partitions=4, fail_on_data_loss=strict)
    assert rows(log, plan, plan.begin(), plan.newest() or {}) == []
    assert [batch for task in plan.all_tasks() for batch in scan_channel(log, task, COLUMNS)] == []


def test_rows_that_are_gone_before_time_has_come_to_them_are_told(rng: random.Random) -> None:
    """Of a channel that is ahead retention removes what is not read yet, and leaves what lies behind T."""
    owned = Owned(rng)
    plans = [by_tick(owned.log, fail_on_data_loss=strict) for strict in (True, False)]
    for channel in ("a", "b"):
        owned.tick(channel)
    starts = [plan.newest() for plan in plans]
    owned.write("a")
    owned.tick("b")
    kept = len(owned.log.entries["a"])
    owned.write("a")
    del owned.log.entries["a"][:kept]
    (strictly, begin), (laxly, _) = zip(plans, starts, strict=True)
    end = strictly.newest()
    assert begin is not None
    assert end is not None
    with pytest.raises(PositionLost, match="removed rows of a that were not read yet"):
        rows(owned.log, strictly, begin, end)
    assert rows(owned.log, laxly, begin, end) == []
    owned.tick("b")
    last = strictly.newest()
    assert last is not None
    assert shown(rows(owned.log, strictly, end, last)) == owned.between(end["t"], last["t"]) != []


def test_a_channel_that_was_emptied_goes_on_by_its_owners_heartbeats(rng: random.Random) -> None:
    owned = Owned(rng)
    first = by_tick(owned.log)
    for channel in ("a", "b"):
        owned.write(channel)
        owned.tick(channel)
    at = first.newest()
    assert at is not None
    owned.log.entries["a"].clear()
    strictly, laxly = (by_tick(owned.log, fail_on_data_loss=strict) for strict in (True, False))  # begun anew
    with pytest.raises(PositionLost, match="removed all entries of a, and no owner of it announces a time"):
        strictly.newest()
    assert (laxly.newest() or {})["ends"].keys() == {"b"}
    for _ in range(2):
        owned.write("b")
        owned.tick("b")
        told = [Announcement("a", owned.story.term, owned.story._cseq["a"], owned.story.now)]
        owned.log.append(NAMES.heartbeats, encode(heartbeat(told)), owned.story.now)
        end = strictly.newest()
        assert end is not None
        assert end["t"] == owned.story.now
        assert shown(rows(owned.log, strictly, at, end)) == owned.between(at["t"], end["t"]) != []
        at = end
    for channel in ("a", "b"):
        owned.write(channel)
        owned.tick(channel)
    end = strictly.newest()
    assert end is not None
    assert shown(rows(owned.log, strictly, at, end)) == owned.between(at["t"], end["t"]) != []
