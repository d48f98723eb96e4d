"""Plans over the log that a story tells, asked in cuts."""

from __future__ import annotations

import pickle
import random
from typing import Any

from story import FLIGHTS, ListLog, Row, Story, sorted_rows

from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.clock import compose
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.collection import CollectionPlan, pchannels_of
from tidewal.spark_bridge.plan.offsets import Offset
from tidewal.spark_bridge.plan.predicate import EVERYTHING, Predicate
from tidewal.spark_bridge.scan.channel_range import BEGINNING, IN_TABLE, ChannelRange
from tidewal.spark_bridge.scan.columns import arrow_columns
from tidewal.spark_bridge.scan.scanner import scan_channel

URL = "rocksmq:///data"
COLUMNS = tuple(arrow_columns(FLIGHTS))


def plan_of(log: ListLog, **options: Any) -> CollectionPlan:
    """One made anew, as after a restart."""
    return CollectionPlan(log, ReadOptions(URL, "flights", **options))


def beginning(collection: Collection) -> Offset:
    """The offset before everything."""
    return Offset(0, dict.fromkeys(pchannels_of(collection), BEGINNING))


def table_offset(collection: Collection, time: int) -> Offset:
    """The offset at a time that the collection's table has passed."""
    return Offset(time, dict.fromkeys(pchannels_of(collection), IN_TABLE))


def offset(cut: Cut | Offset) -> Offset:
    """The offset up to which a cut is read."""
    return Offset.of_cut(cut) if isinstance(cut, Cut) else cut


def ranges(plan: CollectionPlan, begin: Cut | Offset, end: Cut | Offset) -> list[ChannelRange]:
    """What lies between two cuts."""
    return plan.ranges(offset(begin), offset(end))


def batch_end(plan: CollectionPlan, start: Cut | Offset, limits: MicroBatchLimits, upto: Cut | Offset) -> Offset | None:
    """Where a micro-batch from `start` ends."""
    found = plan.next(plan._stored(offset(start)), plan._stored(offset(upto)), limits)
    return None if found is None else plan._offset(found)


def told(rng: random.Random, batches: int, ms: int = 0) -> tuple[ListLog, Story]:
    """A log with a collection in it; `ms` pass between batches."""
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for _ in range(batches):
        story.now += compose(ms)
        story.play(flights, rng, batches=1)
    return log, story


def rows_of(log: ListLog, tasks: Any, where: Predicate = EVERYTHING) -> list[Row]:
    found: list[Row] = []
    for task in pickle.loads(pickle.dumps(tasks)):
        for batch in where.filtered(scan_channel(log, task, COLUMNS)):
            found += batch.to_pylist()
    return sorted_rows(found)
