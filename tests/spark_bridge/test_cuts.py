"""Micro-batches are consistent lines: four channels, three of them late by whatever hypothesis thinks of, owners that
change, retention, limits, crashes of the driver anywhere. No batch shows a row of a later interval, misses one of its
own, or shows half of what was written together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

pytest.importorskip("pyspark")

sys.path.insert(0, str(Path(__file__).parent))
from late_story import LateLog, LateStory
from micro_batches import Query
from story import NAMES, Row, number, sorted_rows

from tidewal.runtime.log.record import Record, RecordType

SHARDS = 4
CHANNELS = [NAMES.pchannel(shard) for shard in range(SHARDS)]
LATE = CHANNELS[1:]
DIRECTORY = "/not/on/disk"
OPTIONS = {"wal": f"rocksmq://{DIRECTORY}", "collection": "flights"}

shards = st.integers(0, SHARDS - 1)
channels = st.sampled_from(CHANNELS)
limits = st.none() | st.integers(1, 12)


class Cuts(RuleBasedStateMachine):
    """The log and its owners on one side, a query on the other."""

    patch: pytest.MonkeyPatch

    def __init__(self) -> None:
        super().__init__()
        self.log = LateLog(LATE)
        self.patch.setattr("tidewal.adapters.rocksmq.client.blocking_client.BlockingClient", lambda *_, **__: self.log)
        self.story = LateStory(self.log)
        self.flights = self.story.create(shards=SHARDS)
        for channel in LATE:
            self.log.land(channel)
        self.query = Query()
        self.options = dict(OPTIONS)
        self.attempts: dict[int, list[Row]] = {}  # batch number to its rows, when it was read first
        self.written = 0

    @initialize(starting=st.sampled_from(["earliest", "latest"]), cut=st.booleans(), dies=st.booleans(), limit=limits)
    def first_start(self, starting: str, cut: bool, dies: bool, limit: int | None) -> None:
        if cut:
            self.write({0: 1, 3: 2}, 1)
            self.draw([False], 0)
        self.options["startingOffsets"] = starting
        self.restart(limit, available_now=False)
        if dies:
            self.dies_after_planning(limit)

    # ---- the log's side ---------------------------------------------------------------------------------------------

    @rule(rows=st.dictionaries(shards, st.integers(1, 4), min_size=1), parts=st.integers(1, 3))
    def write(self, rows: dict[int, int], parts: int) -> None:
        self.written += 1
        name = f"batch {self.written}"
        self.story.write_together(
            self.flights,
            {
                shard: [
                    {"_op": "upsert", "flight": f"{name} {shard} {each}", "origin": name, "place": [0.0, 1.0]}
                    for each in range(max(count, parts))
                ]
                for shard, count in rows.items()
            },
            parts,
        )

    @rule(channel=st.sampled_from(LATE), count=st.integers(1, 9))
    def land(self, channel: str, count: int) -> None:
        self.log.land(channel, count)

    @rule(kinds=st.lists(st.booleans(), min_size=1, max_size=3), stored=st.integers(0, 3))
    def draw(self, kinds: list[bool], stored: int) -> None:
        """Cuts of the present and of the watermark; of those that may be stored any may come first."""
        for now in kinds:
            self.story.draw(self.flights, now=now)
        storable = self.story.storable()
        if storable:
            self.story.store(storable[stored % len(storable)])

    @rule(channel=channels)
    def tick(self, channel: str) -> None:
        self.story.record(channel, Record(RecordType.TIME_TICK))

    @rule(channel=channels)
    def another_collection(self, channel: str) -> None:
        self.story.record(channel, Record(RecordType.ROWS, vchannel=NAMES.vchannel(channel, 99, 0), body=b"not ours"))

    @rule(channel=channels)
    def repeat(self, channel: str) -> None:
        self.story.repeat(channel)

    @rule(landing=st.dictionaries(st.sampled_from(LATE), st.integers(0, 5)))
    def take_over(self, landing: dict[str, int]) -> None:
        self.story.take_over(self.flights, landing)

    @rule(channel=st.sampled_from(LATE), parts=st.integers(1, 2))
    def torn(self, channel: str, parts: int) -> None:
        """An owner dies within a batch, the next one writes another, and then the rest of the first arrives."""
        shard = CHANNELS.index(channel)
        self.log.land(channel)
        self.write({0: 1, shard: 3}, 3)
        self.write({shard: 1}, 1)
        self.take_over({channel: parts})
        self.write({shard: 3}, 3)
        for _ in range(4 - parts):
            self.zombie()
        self.log.land(channel)
        self.draw([False], 0)

    @rule()
    def zombie(self) -> None:
        self.story.zombie()

    @precondition(lambda self: self.query.committed)
    @rule()
    def retain(self) -> None:
        """Retention keeps what a query has not committed: it lags behind."""
        done = [cut for cut in self.story.cuts if cut.time <= self._end_of(len(self.query.committed) - 1)]
        if done:
            self.story.retain(done[-1])

    # ---- the query's side -------------------------------------------------------------------------------------------

    @rule(batches=st.integers(1, 4), dies=st.booleans(), limit=limits)
    def trigger(self, batches: int, dies: bool, limit: int | None) -> None:
        """Some batches; the driver may die between the sink and the commit log."""
        for each in range(batches):
            if self.query.unfinished or self.query.plan():
                rows = self._checked()
                if dies and each == batches - 1:
                    self.restart(limit, available_now=False)
                else:
                    self.query.commit(rows)

    @rule(limit=limits)
    def dies_after_planning(self, limit: int | None) -> None:
        if not self.query.unfinished:
            self.query.plan()
        self.restart(limit, available_now=False)

    @rule(limit=limits, available_now=st.booleans())
    def restart(self, limit: int | None, available_now: bool) -> None:
        """A new driver; one that drains ends at the newest cut there was when it began."""
        given = {} if limit is None else {"maxRowsPerTrigger": str(limit)}
        self.query.start(self.options | given, available_now=available_now)

    @rule(limit=limits, rows=st.integers(1, 4))
    def drain(self, limit: int | None, rows: int) -> None:
        self.restart(limit, available_now=True)
        newest = max((cut.time for cut in self.story.cuts), default=0)
        self.write({0: rows, 1: rows}, 1)
        self.draw([False], 0)
        while self.query.unfinished or self.query.plan():
            self.query.commit(self._checked())
        assert self._end_of(len(self.query.committed) - 1) == max(newest, self.query.begin)
        self.restart(limit, available_now=False)

    def teardown(self) -> None:
        if "startingOffsets" not in self.options:
            return  # it ended before it began
        for channel in LATE:
            self.log.land(channel)
        self.story.draw(self.flights, now=True)
        self.story.store(self.story.drawn[-1])
        self.restart(None, available_now=False)
        while self.query.unfinished or self.query.plan():
            self.query.commit(self._checked())
        last = self.story.cuts[-1].time
        assert [self._plain(row) for batch in self.query.committed for row in sorted_rows(batch)] == [
            self._plain(row) for row in self.story.between(self.query.begin, last)
        ]
        self._nothing_is_seen_in_parts()
        self.query.crash()

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def _checked(self) -> list[Row]:
        """Read the planned batch; it must be the interval of its cuts, and the same however often it is read."""
        place = len(self.query.committed)
        rows = sorted_rows(self.query.read())
        begin, end = self._end_of(place - 1), self._end_of(place)
        assert rows == self.story.between(begin, end), (begin, end)
        assert rows == self.attempts.setdefault(place, rows)
        return rows

    def _end_of(self, place: int) -> int:
        return self.query.begin if place < 0 else self.query.ends()[place]

    def _plain(self, row: Row) -> Row:
        return {name: value for name, value in row.items() if name != "_watermark"}

    def _nothing_is_seen_in_parts(self) -> None:
        homes: dict[object, set[int]] = {}
        for place, batch in enumerate(self.query.committed):
            for row in batch:
                homes.setdefault(row["origin"], set()).add(place)
                assert number(row, "_ts") <= number(row, "_watermark")
        assert all(len(places) == 1 for places in homes.values()), homes


@pytest.mark.slow
def test_every_micro_batch_is_one_line_across_late_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuts.patch = monkeypatch
    run_state_machine_as_test(Cuts, settings=settings(max_examples=60, stateful_step_count=40))
