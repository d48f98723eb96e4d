"""Which cut comes next."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import msgpack
import pytest

from tidewal.runtime.errors import CollectionNotFound, FormatTooNew, InvalidRequest, PositionLost
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.spark_bridge.options import MicroBatchLimits
from tidewal.spark_bridge.plan import catalog_view, cut_log
from tidewal.spark_bridge.plan.collection import pchannels_of
from tidewal.spark_bridge.plan.offsets import Offset
from tidewal.spark_bridge.scan.channel_range import ChannelPlace

sys.path.insert(0, str(Path(__file__).parent))
from plans import batch_end, beginning, offset, plan_of, ranges
from story import NAMES, ListLog, Story, random_row


def test_newest_cut_follows_the_log_and_reads_nothing_twice(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    plan = plan_of(log)
    assert plan.newest() is None
    for _ in range(3):
        story.play(flights, rng, batches=3)
        assert plan._newest() == offset(story.cuts[-1])
    log.reads.clear()
    assert plan._newest() == offset(story.cuts[-1])
    assert log.reads == []


def test_cuts_of_other_collections_and_of_dropped_ones_do_not_count(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    old = story.create(id=6)
    story.write(old, 0, [random_row(rng)])
    story.cut(old)
    stored = plan_of(log).newest()
    assert stored is not None
    story.event({"kind": "drop", "id": 6})
    story.event({"kind": "dropped", "id": 6})
    new = story.create(id=8)
    assert plan_of(log).newest() is None
    with pytest.raises(InvalidRequest, match="new checkpoint"):
        plan_of(log).tasks(stored, stored)
    cut = story.cut(new)
    assert plan_of(log)._newest() == offset(cut)


def test_a_dropped_collection_is_noticed_by_a_running_query() -> None:
    log = ListLog()
    story = Story(log.append)
    story.create()
    plan = plan_of(log)
    plan.newest()
    story.event({"kind": "drop", "id": 7})
    with pytest.raises(CollectionNotFound, match=r"no collection 'flights' in rocksmq:///data"):
        plan.newest()


def test_an_empty_log_names_what_to_check() -> None:
    with pytest.raises(CollectionNotFound, match=r"prefix 'by-dev'; there are: none\. Check options"):
        plan_of(ListLog()).collection()


class SnappedLog(ListLog):
    """`snaps` times the catalog's last entry is gone when it is read: a snapshot has taken its place."""

    def __init__(self, snaps: int) -> None:
        super().__init__()
        self.story = Story(self.append)
        self.snaps = snaps

    def latest_id(self, channel: str) -> bytes | None:
        latest = super().latest_id(channel)
        if channel == NAMES.catalog and self.snaps:
            self.snaps -= 1
            self.story.event({"kind": "lease", "node": "n", "limit": 1 << 62, "checkpoints": {}})
            as_of = self.story.snapshot()
            self.entries[channel] = [entry for entry in self.entries[channel] if entry.id >= as_of]
        return latest


@pytest.mark.parametrize("follows", [False, True])
def test_snapshots_that_are_faster_than_the_reader_hide_nothing(follows: bool) -> None:
    log = SnappedLog(snaps=0)
    created = log.story.create()
    plan = plan_of(log)
    if follows:
        assert plan.collection().id == created.id
        log.story.own(list(pchannels_of(created)), 1)
    log.snaps = 3
    assert plan.collection().id == created.id
    log.snaps = catalog_view.ATTEMPTS
    log.story.own(list(pchannels_of(created)), 1)
    with pytest.raises(PositionLost):
        plan.collection()
    assert plan.collection().id == created.id


@pytest.mark.parametrize("max_rows", [1, 5, 20, 100, 10_000])
def test_a_limit_holds_whole_cuts_and_at_least_one(rng: random.Random, max_rows: int) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=60)
    plan, start, seen = plan_of(log), beginning(flights), 0
    while (cut := batch_end(plan, start, MicroBatchLimits(max_rows), story.cuts[-1])) is not None:
        rows = len(story.between(start.time, cut.time))
        following = next((each for each in story.cuts if each.time > cut.time), None)
        first = next(each for each in story.cuts if each.time > start.time)
        assert rows <= max_rows or cut == offset(first)
        assert following is None or len(story.between(start.time, following.time)) > max_rows
        start, seen = cut, seen + rows
    assert start == offset(story.cuts[-1])
    assert seen == len(story.rows)


def test_a_limited_query_holds_few_cuts_and_still_passes_all(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_log, "CUTS_AHEAD_MAX", 4)
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=40)
    plan, start, passed = plan_of(log), beginning(flights), []
    while (cut := batch_end(plan, start, MicroBatchLimits(1), story.cuts[-1])) is not None:
        passed.append(cut)
        start = cut
        assert len(plan.cuts._ahead) <= 4
    assert passed[-1] == offset(story.cuts[-1])
    bounds = [0, *(cut.time for cut in passed)]
    counts = [len(story.between(begin, end)) for begin, end in itertools.pairwise(bounds)]
    assert sum(counts) == len(story.rows)


def test_a_limit_never_passes_the_target_of_available_now(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=10)
    target = offset(story.cuts[-1])
    story.play(flights, rng, batches=10)
    plan = plan_of(log)
    assert batch_end(plan, beginning(flights), MicroBatchLimits(10_000), target) == target
    assert batch_end(plan, beginning(flights), MicroBatchLimits(), target) == target
    assert batch_end(plan, target, MicroBatchLimits(10_000), target) is None


def test_offsets_are_named_in_four_ways(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    first = plan_of(log, starting="earliest")._begin()
    assert plan_of(log, starting="latest")._begin() == first
    assert first == Offset(0, {name: ChannelPlace(log.entries[name][0].id, behind=False) for name in first.ends})
    story.play(flights, rng, batches=10)
    chosen = rng.choice(story.cuts)
    as_json = json.dumps(plan_of(log)._stored(offset(chosen)))
    assert plan_of(log, starting="latest")._begin() == offset(story.cuts[-1])
    assert plan_of(log, starting=str(chosen.time))._begin() == offset(chosen)
    assert plan_of(log, starting=as_json)._begin() == offset(chosen)
    with pytest.raises(InvalidRequest, match="no cut of 'flights' is stored at 12"):
        plan_of(log, starting="12").begin()


def test_an_end_before_the_start_is_refused(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=10)
    with pytest.raises(InvalidRequest, match="before the start"):
        ranges(plan_of(log), story.cuts[-1], beginning(flights))


def test_a_snapshot_that_replaces_the_catalog_is_followed(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    plan = plan_of(log)
    plan.collection()
    story.claim("other")
    snapshot = story.snapshot()
    entries = log.entries[NAMES.catalog]
    entries[:] = [entry for entry in entries if entry.id >= snapshot]
    story.event({"kind": "drop", "id": flights.id})
    with pytest.raises(CollectionNotFound):
        plan.collection()


def test_cuts_that_retention_removed_are_not_missed(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=10)
    plan = plan_of(log)
    plan.newest()
    story.play(flights, rng, batches=10)
    del log.entries[NAMES.cuts][:-1]
    assert plan._newest() == offset(story.cuts[-1])
    assert batch_end(plan, beginning(flights), MicroBatchLimits(1), story.cuts[-1]) == offset(story.cuts[-1])


def test_a_cut_that_cannot_be_read_is_passed_over(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    cut = story.cut(story.create())
    log.append(NAMES.cuts, b"garbage", story.now)
    assert plan_of(log)._newest() == offset(cut)


def test_a_cut_of_a_newer_tidewal_stops_the_read(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    cut = story.cut(story.create())
    newer = Record(RecordType.CUT, ts=story.now, key=cut.collection.encode(), body=msgpack.packb({"v": 2}))
    log.append(NAMES.cuts, encode(newer), story.now)
    with pytest.raises(FormatTooNew, match="upgrade"):
        plan_of(log).newest()
