"""Hybrid reads: whatever is stored, cut off and joined in between, an interval is the rows of the model, each once."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objects.faulty_http import FaultyStore
from tidewal.runtime.catalog.cuts import Cut
from tidewal.runtime.errors import ConfigError, CorruptLog, InvalidRequest, PositionLost, PositionMismatch, Unavailable
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.tables import object_options
from tidewal.runtime.tables.table_metadata import commit_name
from tidewal.runtime.tables.table_store import LOG, StoreUri, open_tables
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.plan.collection import in_table
from tidewal.spark_bridge.plan.history import HistoryPlan
from tidewal.spark_bridge.plan.offsets import Offset
from tidewal.spark_bridge.plan.predicate import EVERYTHING, Predicate
from tidewal.spark_bridge.scan import history
from tidewal.spark_bridge.scan.channel_range import ChannelRange
from tidewal.spark_bridge.scan.columns import arrow_schema
from tidewal.spark_bridge.scan.delta import StoredRange, stored_batches
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from history_story import StoredStory
from plans import COLUMNS, batch_end, beginning, offset, plan_of, ranges, table_offset
from story import FLIGHTS, ListLog, Row, number, random_row, sorted_rows


def planner(stored: StoredStory, **options: Any) -> HistoryPlan:
    """One made anew, as after a restart."""
    return HistoryPlan(stored.log, ReadOptions("rocksmq:///x", "flights", history=str(stored.folder), **options))


def tasks_of(plan: HistoryPlan, start: Cut | Offset, end: Cut | Offset, predicate: Predicate = EVERYTHING) -> list[Any]:
    """What lies between two cuts, or times that the table has passed."""
    return list(plan._tasks(offset(start), offset(end), predicate))


def rows_of(log: ListLog, tasks: Sequence[Any], columns: tuple[str, ...] = COLUMNS) -> list[Row]:
    """What the tasks give, in exactly Spark's types."""
    found: list[Row] = []
    for task in tasks:
        log_part = isinstance(task, ChannelRange)
        for batch in scan_channel(log, task, columns) if log_part else stored_batches(task, columns):
            assert batch.schema.equals(arrow_schema(FLIGHTS, columns))
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def read(stored: StoredStory, start: Cut | Offset, end: Cut | Offset, tasks: int = 1) -> list[Row]:
    return sorted_rows(rows_of(stored.log, tasks_of(planner(stored, min_partitions=tasks), start, end)))


@contextmanager
def stored_story() -> Iterator[StoredStory]:
    with tempfile.TemporaryDirectory() as folder:
        yield StoredStory(Path(folder))


def change(stored: StoredStory, rng: random.Random) -> None:
    """What may happen to a log and its table."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            stored.play(rng, rng.randrange(1, 4))
        case 3 | 4:
            stored.flush(rng)
        case 5:
            stored.flush(rng, (rng.choice(stored.flights.vchannels),))
        case 6:
            stored.truncate()
        case _:
            stored.table.join_files()


def some_intervals(stored: StoredStory, rng: random.Random, count: int) -> list[tuple[Offset, Offset]]:
    """Between any two of: the beginning, stored cuts, and times that the table has passed."""
    within = [table_offset(stored.flights, rng.randint(1, stored.time)) for _ in range(4 if stored.time else 0)]
    cuts = [beginning(stored.flights), *map(offset, stored.story.cuts), *within]
    return [tuple(sorted(rng.sample(cuts, 2), key=lambda cut: cut.time)) for _ in range(count)]


@pytest.mark.long
@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_any_interval_is_the_rows_of_the_model_whatever_is_stored_and_cut_off(seed: int) -> None:
    rng = random.Random(seed)
    with stored_story() as stored:
        stored.play(rng, 5)
        stored.story.cut(stored.flights)
        asked: list[tuple[Offset, Offset]] = []
        planned: list[tuple[list[Any], list[Row]]] = []
        for _ in range(8):
            change(stored, rng)
            # Tasks that were planned before the table moved on and the log was cut off: as many rows, and the same.
            for tasks, expected in planned:
                assert sorted_rows(rows_of(stored.log, tasks)) == expected
            asked += some_intervals(stored, rng, 2)
            for start, end in rng.sample(asked, min(6, len(asked))):
                assert read(stored, start, end, rng.choice([1, 1, 5])) == stored.story.between(start.time, end.time)
            start, end = rng.choice(asked)
            planned.append((tasks_of(planner(stored), start, end), stored.story.between(start.time, end.time)))


@pytest.fixture
def stored(tmp_path: Path, rng: random.Random) -> StoredStory:
    return filled_story(tmp_path, rng)


def filled_story(folder: StoreUri, rng: random.Random) -> StoredStory:
    """Rows of which some are in the table only, some in both, some in the log only."""
    made = StoredStory(folder)
    for _ in range(3):
        made.play(rng, 12)
        made.story.cut(made.flights)
        made.flush(rng, back=2)
    made.truncate()
    made.play(rng, 12)
    for shard in (0, 1, 2, 0, 1, 2):
        made.story.write(made.flights, shard, [random_row(rng)])
    made.story.cut(made.flights)
    return made


@pytest.mark.slow
def test_nothing_below_the_tables_t_is_read_from_the_log(stored: StoredStory) -> None:
    last = stored.story.cuts[-1]
    tasks = tasks_of(planner(stored), beginning(stored.flights), last)
    stored.log.reads.clear()
    unstored = rows_of(stored.log, [task for task in tasks if isinstance(task, ChannelRange)])
    ends = {(position.channel, position.message_id) for position in stored.table.positions().values()}
    begins = {(channel, after) for channel, after, _ in stored.log.reads}
    assert begins <= ends  # vchannels that share a channel may differ in theirs, and either will do
    assert sorted(channel for channel, _ in begins) == sorted({channel for channel, _ in ends})  # of each channel one
    assert sorted_rows(unstored) == [row for row in stored.story.between(0, last.time) if row["_ts"] > stored.time]
    stored.log.entries.clear()
    del tasks[: len(tasks) - sum(isinstance(task, StoredRange) for task in tasks)]
    assert sorted_rows(rows_of(stored.log, tasks)) == [
        {**row, "_watermark": last.time} for row in stored.story.between(0, stored.time)
    ]


@pytest.mark.slow
def test_what_neither_log_nor_table_has_is_lost(stored: StoredStory) -> None:
    last = stored.story.cuts[-1]
    lost = next(row for row in stored.story.rows if number(row, "_ts") > stored.time)
    entries = stored.log.entries[pchannel_of(str(lost["_channel"]))]
    entries[:] = [entry for entry in entries if entry.timestamp > number(lost, "_ts")]
    with pytest.raises(PositionLost, match="failOnDataLoss=false"):
        read(stored, beginning(stored.flights), last)
    tolerant = tasks_of(planner(stored, fail_on_data_loss=False), beginning(stored.flights), last)
    left = sorted_rows(rows_of(stored.log, tolerant))
    expected = stored.story.between(0, last.time)
    assert left == [row for row in expected if row["_ts"] != lost["_ts"]]


def test_columns_may_be_chosen_in_any_order(stored: StoredStory) -> None:
    columns = ("_op", "_change_type", "place", "_commit_version", "_commit_timestamp", "flight")
    end = table_offset(stored.flights, stored.time)
    found = rows_of(stored.log, tasks_of(planner(stored), beginning(stored.flights), end), columns)
    expected = [
        {
            "_op": row["_op"],
            "_change_type": row["_op"],
            "place": row["place"],
            "_commit_version": row["_ts"],
            "_commit_timestamp": row["_time"],
            "flight": row["flight"],
        }
        for row in stored.story.between(0, stored.time)
    ]
    assert [tuple(row) for row in found] == [columns] * len(found)

    def key(row: Row) -> tuple[str, ...]:
        return str(row["_commit_version"]), str(row["flight"]), str(row["_op"]), str(row["place"])

    assert sorted(found, key=key) == sorted(expected, key=key)


@pytest.mark.slow
def test_batches_and_tasks_are_bounded(stored: StoredStory, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("batches", "delta"):
        monkeypatch.setattr(f"tidewal.spark_bridge.scan.{module}.BATCH_ROWS", 7)
    end = table_offset(stored.flights, stored.time)
    plan = planner(stored)
    [task] = tasks_of(plan, beginning(stored.flights), end)
    assert all(0 < batch.num_rows <= 7 for batch in stored_batches(task, ("_ts",)))
    files = len(task.files)
    assert files == 3
    monkeypatch.setattr(history, "TASK_BYTES", 1)
    assert [len(task.files) for task in tasks_of(plan, beginning(stored.flights), end)] == [1] * files
    monkeypatch.undo()
    assert len(tasks_of(planner(stored, min_partitions=2), beginning(stored.flights), end)) >= 2


@pytest.mark.slow
def test_files_of_other_times_are_not_opened(stored: StoredStory) -> None:
    plan = planner(stored)
    middle = table_offset(stored.flights, stored.story.cuts[0].time)
    [early] = tasks_of(plan, beginning(stored.flights), middle)
    last = max(number(row, "_ts") for row in stored.story.rows if number(row, "_ts") <= stored.time)
    [late] = tasks_of(plan, table_offset(stored.flights, last - 1), table_offset(stored.flights, last))
    assert set(early.files).isdisjoint(late.files)


@pytest.mark.slow
def test_what_a_filter_does_not_ask_for_is_not_read(stored: StoredStory) -> None:
    plan, start, end = planner(stored), beginning(stored.flights), stored.story.cuts[-1]
    everything = tasks_of(plan, start, end)
    assert len([task for task in everything if isinstance(task, ChannelRange)]) == 2
    [late] = tasks_of(plan, start, end, Predicate(last_ts=stored.time))
    assert sorted_rows(rows_of(stored.log, [late])) == [
        {**row, "_watermark": end.time} for row in stored.story.between(0, stored.time)
    ]
    cut = stored.story.cuts[0].time
    [first] = tasks_of(plan, start, end, Predicate(last_ts=cut))
    assert set(first.files) < set(late.files)
    assert [row for row in sorted_rows(rows_of(stored.log, [first])) if number(row, "_ts") <= cut] == [
        {**row, "_watermark": end.time} for row in stored.story.between(0, cut)
    ]
    newest = max(number(row, "_ts") for row in stored.story.rows if number(row, "_ts") <= stored.time)
    *_, last = tasks_of(plan, start, end, Predicate(first_ts=newest))
    assert {number(row, "_ts") for row in rows_of(stored.log, [last])} == {newest}


# ---- where to cut ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        MicroBatchLimits(rows=1),
        MicroBatchLimits(rows=9),
        MicroBatchLimits(rows=40),
        MicroBatchLimits(entries=3),
        MicroBatchLimits(bytes=4000),
        MicroBatchLimits(rows=9999),
    ],
)
def test_a_limit_holds_whole_timestamps_of_the_table_and_then_cuts(
    stored: StoredStory, limits: MicroBatchLimits
) -> None:
    plan, last = planner(stored), stored.story.cuts[-1]
    passed = [beginning(stored.flights)]
    while (cut := batch_end(planner(stored), passed[-1], limits, last)) is not None:
        passed.append(cut)
    assert passed[-1] == offset(last)
    assert any(map(in_table, passed))
    assert stored.time in [cut.time for cut in passed]
    for start, end in itertools.pairwise(passed):
        found = sorted_rows(rows_of(stored.log, tasks_of(plan, start, end)))
        assert found == stored.story.between(start.time, end.time)
        times = {row["_ts"] for row in found}
        cuts = sum(start.time < cut.time <= end.time for cut in stored.story.cuts)
        assert limits.rows is None or len(found) <= limits.rows or len(times) == 1 or cuts == 1
        if limits.entries is not None and in_table(end):
            assert len({(row["_channel"], row["_cseq"]) for row in found}) <= limits.entries or len(times) == 1
        if in_table(end) and limits.rows is not None and end.time < stored.time:
            following = [row for row in stored.story.rows if row["_ts"] > end.time]
            more = [row for row in following if row["_ts"] == following[0]["_ts"]]
            assert len(found) + len(more) > limits.rows, "the next timestamp had fitted too"


@pytest.mark.slow
def test_a_limit_counts_all_shards_of_a_channel_whatever_is_stored_of_them(
    stored: StoredStory, rng: random.Random
) -> None:
    first, _, third = stored.flights.vchannels
    assert pchannel_of(first) == pchannel_of(third)
    stored.flush(rng, (first,), back=3)
    start = offset(stored.story.cut(stored.flights))
    for shard in (2, 0, 2, 2, 0, 2, 2):
        stored.story.write(stored.flights, shard, [random_row(rng)])
        stored.story.cut(stored.flights)
    assert stored.times[first] > stored.times[third]
    last = stored.story.cuts[-1]
    while (end := batch_end(planner(stored), start, MicroBatchLimits(rows=2), last)) is not None:
        cuts = sum(start.time < cut.time <= end.time for cut in stored.story.cuts)
        assert cuts == 1 or len(stored.story.between(start.time, end.time)) <= 2
        start = end
    assert start == offset(last)


@pytest.mark.slow
def test_a_step_is_what_counting_all_rows_would_give(tmp_path: Path, rng: random.Random) -> None:
    stored = StoredStory(tmp_path)
    for _ in range(10):
        stored.play(rng, 5)
        stored.flush(rng, (rng.choice(stored.flights.vchannels),))  # files of one time beside each other
    stored.flush(rng, back=1)
    table = planner(stored).look()
    times = sorted(number(row, "_ts") for row in stored.story.rows if number(row, "_ts") <= table.time)
    for _ in range(50):
        begin, rows = rng.choice([0, *times]), rng.randrange(1, 60)
        behind = [time for time in times if time > begin]
        within = [time for time in behind if sum(other <= time for other in behind) <= rows]
        expected = table.time if len(behind) <= rows else max(within, default=behind[0])
        assert table.step(begin, table.time, MicroBatchLimits(rows=rows)) == expected
        assert table.count(begin, table.time, len(times)) == len(behind)


@pytest.mark.slow
def test_a_step_over_many_small_files_reads_few_of_them(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredStory(tmp_path)
    for _ in range(12):
        stored.play(rng, 4)
        stored.flush(rng)
    table = planner(stored).look()
    opened: list[object] = []
    original = table._stamps
    monkeypatch.setattr(table, "_stamps", lambda file, *rest: opened.append(file) or original(file, *rest))
    time = table.step(0, table.time, MicroBatchLimits(rows=10))
    assert 0 < len(stored.story.between(0, time)) <= 10
    assert len(opened) < 8


@pytest.mark.slow
def test_rows_are_counted_over_both_parts(stored: StoredStory) -> None:
    last = stored.story.cuts[-1]
    total = len(stored.story.between(0, last.time))
    plan = planner(stored)
    assert plan._has_rows(beginning(stored.flights), offset(last), total)
    assert not planner(stored)._has_rows(beginning(stored.flights), offset(last), total + 1)
    assert plan._has_rows(beginning(stored.flights), table_offset(stored.flights, stored.time), 5)


def test_without_any_cut_the_newest_is_the_end_of_the_table(stored: StoredStory) -> None:
    plan = planner(stored)
    assert plan._newest() == offset(stored.story.cuts[-1])
    del stored.log.entries["by-dev-cuts"]
    plan = planner(stored)
    assert plan._newest() == table_offset(stored.flights, stored.time)
    assert plan._named("latest", "latest") == plan._newest()


def test_any_time_that_the_table_has_passed_may_be_named(stored: StoredStory) -> None:
    plan = planner(stored)
    assert plan._named(str(stored.time - 2), "latest") == table_offset(stored.flights, stored.time - 2)
    with pytest.raises(InvalidRequest, match="no cut"):
        plan._named(str(stored.story.cuts[-1].time - 1), "latest")


# ---- time travel -----------------------------------------------------------------------------------------------------


def as_of(stored: StoredStory, **options: Any) -> list[Row]:
    given = ReadOptions("rocksmq:///x", "flights", history=str(stored.folder), **options)
    return sorted_rows(rows_of(stored.log, HistoryPlan(stored.log, given).all_tasks()))


@pytest.mark.slow
def test_the_state_at_any_time_up_to_the_newest_cut(stored: StoredStory, rng: random.Random) -> None:
    last = stored.story.cuts[-1].time
    for time in (1, rng.randint(last - 60, stored.time), stored.time, rng.randint(stored.time + 1, last), last):
        assert as_of(stored, timestamp_as_of=time) == stored.story.between(0, time)
    with pytest.raises(InvalidRequest, match="not known yet: the newest cut is of 2023-11-14T22:13:20"):
        as_of(stored, timestamp_as_of=last + 1)


def test_a_version_of_the_table_stays_what_it_was(stored: StoredStory, rng: random.Random) -> None:
    version, time = stored.table.version, stored.time
    before = stored.story.between(0, time)
    stored.flush(rng)
    stored.table.join_files()
    stored.truncate()
    assert stored.time > time
    assert as_of(stored, version_as_of=version) == before
    assert as_of(stored, version_as_of=stored.table.version) == stored.story.between(0, stored.time)
    with pytest.raises(InvalidRequest, match=r"does not have version 999: the newest is \d+, and older ones are kept"):
        as_of(stored, version_as_of=999)


@pytest.mark.slow
def test_the_tables_may_lie_in_a_bucket(bucket: str, rng: random.Random) -> None:
    stored = filled_story(f"{bucket}/tables", rng)
    last = stored.story.cuts[-1].time
    for time in (rng.randint(1, stored.time), last):
        assert as_of(stored, timestamp_as_of=time) == stored.story.between(0, time)
    start, end = table_offset(stored.flights, rng.randint(1, stored.time)), offset(stored.story.cuts[-1])
    assert read(stored, start, end, tasks=3) == stored.story.between(start.time, end.time)
    with pytest.raises(ConfigError, match="there is no table"):
        HistoryPlan(stored.log, ReadOptions("rocksmq:///x", "flights", history=f"{bucket}/nowhere")).look()


@pytest.mark.slow
def test_a_store_that_is_away_is_unavailable(
    faulty: FaultyStore, bucket: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_options, "RETRY_S", 1)
    stored = filled_story(f"{bucket}/tables", rng)
    tasks = tasks_of(planner(stored), beginning(stored.flights), stored.story.cuts[-1])
    faulty.fault = lambda request, forward: False
    with pytest.raises(Unavailable):
        planner(stored).look()
    with pytest.raises(Unavailable):
        rows_of(stored.log, tasks)


# ---- what may be wrong -----------------------------------------------------------------------------------------------


def test_a_folder_without_the_table_is_told(stored: StoredStory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no table at .*nowhere/flights/log: option history is the folder"):
        HistoryPlan(stored.log, ReadOptions("rocksmq:///x", "flights", history=str(tmp_path / "nowhere"))).look()
    with pytest.raises(ConfigError, match="must be a folder"):
        HistoryPlan(stored.log, ReadOptions("rocksmq:///x", "flights", history="hdfs://host/tables")).look()
    file = ReadOptions("rocksmq:///x", "flights", history=f"file://{stored.folder}")
    assert HistoryPlan(stored.log, file).look().time == stored.time


@pytest.mark.slow
def test_the_table_of_another_log_or_collection_is_refused(stored: StoredStory) -> None:
    with pytest.raises(PositionMismatch, match="was filled from rocksmq, option wal names kafka"):
        HistoryPlan(stored.log, ReadOptions("kafka://x", "flights", history=str(stored.folder))).look()
    stored.story.event({"kind": "drop", "id": 7})
    stored.story.event({"kind": "dropped", "id": 7})
    stored.story.create(id=8, shards=3, pchannels=2)
    with pytest.raises(InvalidRequest, match="the table of another collection of that name"):
        planner(stored).look()


def test_an_offset_of_history_needs_the_table_that_has_it(stored: StoredStory, tmp_path: Path) -> None:
    last = stored.story.cuts[-1]
    with pytest.raises(InvalidRequest, match="set option history as it was set before"):
        ranges(plan_of(stored.log), table_offset(stored.flights, 5), last)
    behind = StoredStory(tmp_path / "other")
    for start, end in [
        (beginning(stored.flights), table_offset(stored.flights, stored.time)),
        (table_offset(stored.flights, stored.time), last),
    ]:
        plan = HistoryPlan(stored.log, ReadOptions("rocksmq:///x", "flights", history=str(behind.folder)))
        with pytest.raises(InvalidRequest, match=r"is one of history, but .* goes up to 0 only"):
            tasks_of(plan, start, end)


def test_a_file_that_is_gone_or_damaged_is_told(stored: StoredStory) -> None:
    [task] = tasks_of(planner(stored), beginning(stored.flights), table_offset(stored.flights, stored.time))
    path = Path(task.table, task.files[0])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptLog, match="cannot be read"):
        list(stored_batches(task, COLUMNS))
    path.unlink()
    with pytest.raises(CorruptLog, match="is gone"):
        list(stored_batches(task, COLUMNS))


def test_a_table_that_another_tool_restored_is_no_history(stored: StoredStory) -> None:
    within = table_offset(stored.flights, stored.time)
    table = DeltaTable(open_tables(stored.folder).table("flights", LOG).uri)
    sound = table.version()
    table.restore(1)
    for end in (within, stored.story.cuts[-1]):
        with pytest.raises(CorruptLog, match=r"\(RESTORE\) is another tool's"):
            read(stored, beginning(stored.flights), end)
    DeltaTable(table.table_uri).restore(sound)
    assert read(stored, beginning(stored.flights), within) == stored.story.between(0, stored.time)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "with a checkpoint"])  # Delta reads no commit before it
def test_a_table_whose_newest_commit_is_torn_is_no_history(stored: StoredStory, checkpoint: bool) -> None:
    location = open_tables(stored.folder).table("flights", LOG)
    table = DeltaTable(location.uri)
    if checkpoint:
        table.create_checkpoint()
    commit = Path(location.uri, commit_name(table.version()))
    sound = commit.read_bytes()
    for torn in (sound[: len(sound) // 3], b"", b'{"commitInfo": {"tidewal.positions": "[1]"}}', b'{"txn": {"a": 1}}'):
        commit.write_bytes(torn)
        with pytest.raises(CorruptLog, match=commit.name if checkpoint else "flights"):
            planner(stored).look()
    commit.write_bytes(sound)
    assert planner(stored).look().time == stored.time


def test_a_log_that_forgets_while_it_is_read_asks_to_begin_again(
    stored: StoredStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidewal.spark_bridge.scan.batches.BATCH_ROWS", 1)
    start, end = table_offset(stored.flights, stored.time), stored.story.cuts[-1]
    task = tasks_of(planner(stored), start, end)[0]
    assert isinstance(task, ChannelRange)
    original = stored.log.read

    def forgetful(*asked: Any, **how: Any) -> Iterator[Any]:
        yield from list(original(*asked, **how))[:-1]
        raise PositionLost("gone", requested=b"", first_available=b"")

    monkeypatch.setattr(stored.log, "read", forgetful)
    batches = scan_channel(stored.log, task, COLUMNS)
    assert next(batches).num_rows
    with pytest.raises(Unavailable, match="read again, the table has the rows now"):
        list(batches)


def test_a_table_without_positions_is_read_and_told_where_the_log_is_needed(
    stored: StoredStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "newest_own_commit", lambda *_: None)
    within = table_offset(stored.flights, stored.time)
    assert read(stored, beginning(stored.flights), within) == stored.story.between(0, stored.time)
    with pytest.raises(CorruptLog, match=r"does not say where .* ends in the log"):
        read(stored, beginning(stored.flights), stored.story.cuts[-1])


def test_a_column_that_a_file_does_not_have_yet_is_null(stored: StoredStory) -> None:
    [task] = tasks_of(planner(stored), beginning(stored.flights), table_offset(stored.flights, stored.time))
    later = CollectionSchema("flights", (*FLIGHTS.fields, Field("gate", "varchar"), Field("seat", "int8")), "flight", 2)
    batches = list(stored_batches(dataclasses.replace(task, schema=later), ("seat", "flight", "gate", "_ts")))
    assert sum(batch.num_rows for batch in batches) == len(stored.story.between(0, stored.time))
    for batch in batches:
        assert batch.schema.equals(arrow_schema(later, ("seat", "flight", "gate", "_ts")))
        assert batch.column("gate").null_count == batch.column("seat").null_count == batch.num_rows
        assert not batch.column("flight").null_count
