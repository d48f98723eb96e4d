"""Topics in lists: plans of them, what tasks read, and channels with an owner."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

from hypothesis import strategies as st
from story import ListLog, Row, Story

from tidewal.runtime.clock import compose
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.offsets import StoredOffset
from tidewal.spark_bridge.plan.read_plan import ReadPlan
from tidewal.spark_bridge.plan.topic_by_channel import ByChannel
from tidewal.spark_bridge.plan.topic_by_tick import ByTick
from tidewal.spark_bridge.scan.scanner import scan_channel
from tidewal.spark_bridge.scan.topic_rows import topic_columns

NOON = compose(1_700_000_000_000)


COLUMNS = tuple(topic_columns(headers=True))


topic_limits = st.builds(
    MicroBatchLimits,
    rows=st.none() | st.integers(1, 9),
    bytes=st.none() | st.integers(1, 200),
    entries=st.none() | st.integers(1, 9),
)


def by_channel(log: ListLog, **options: Any) -> ByChannel:
    return ByChannel(log, ReadOptions("rocksmq:///data", **({"topics": ("a", "b")} | options)))


def by_tick(log: ListLog, **options: Any) -> ByTick:
    return ByTick(log, ReadOptions("kafka://b", **({"topics": ("a", "b"), "consistency": "tick"} | options)))


def rows(log: ListLog, plan: ReadPlan, start: StoredOffset, end: StoredOffset) -> list[Row]:
    """What the tasks between two offsets read, which went through Spark's hands as JSON."""
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))
    found: list[Row] = []
    for task in pickle.loads(pickle.dumps(plan.tasks(start, end))):
        for batch in scan_channel(log, task, COLUMNS):
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def values(found: list[Row], channel: str) -> list[object]:
    return [row["value"] for row in found if row["_channel"] == channel]


def shown(found: list[Row]) -> list[tuple[object, object, object]]:
    return sorted((row["_ts"], row["_channel"], row["value"]) for row in found)


def total(sizes: list[Any]) -> Any:
    result = sizes[0]
    for size in sizes[1:]:
        result = result.plus(size)
    return result


class Owned:
    """Channels with an owner, and the rows that count."""

    def __init__(self, rng: random.Random) -> None:
        self.log = ListLog()
        self.story = Story(self.log.append)
        self.rng = rng
        self.written: list[tuple[int, str, bytes]] = []
        self.names = ["a", "b", "c"]
        self.own()

    def own(self) -> None:
        self.story.own(self.names, self.story.term + 1)

    def write(self, channel: str) -> None:
        self.story.now += self.rng.choice([1, 1 << 18, 100 << 18])
        ts, value = self.story.now, b"%d" % self.log._last
        parts = self.rng.choice([1, 1, 3])
        for number in range(parts):
            part = BatchPart(ts, number, parts) if parts > 1 else None
            body = value + b".%d" % number
            self.story.stamped(channel, Record(RecordType.QUERY, part=part, key=b"k", body=body), ts)
            self.written.append((ts, channel, body))

    def zombie(self, channel: str) -> None:
        """Records of a superseded owner, and half of a batch that its owner abandoned."""
        last = Record(RecordType.QUERY, self.story.now, self.story.term - 1, 10**6, body=b"zombie")
        self.log.append(channel, encode(last), self.story.now)

    def tick(self, channel: str) -> None:
        self.story.record(channel, Record(RecordType.TIME_TICK))

    def step(self) -> None:
        channel = self.rng.choice(self.names)
        kind = self.rng.random()
        if kind < 0.05:
            self.own()
        elif kind < 0.25:
            self.zombie(channel)
        elif kind < 0.45:
            self.tick(channel)
        else:
            self.write(channel)

    def between(self, begin: int, end: int) -> list[tuple[int, str, bytes]]:
        return sorted(row for row in self.written if begin < row[0] <= end)
