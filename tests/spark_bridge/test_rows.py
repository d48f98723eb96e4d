"""From ranges of the log to Arrow batches: exactly the rows of the interval, in exactly Spark's types."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tidewal.runtime.errors import CorruptLog, InvalidRequest, PositionLost
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.rows.row_codec import encode_rows
from tidewal.spark_bridge.scan import batches as batching
from tidewal.spark_bridge.scan.columns import arrow_schema
from tidewal.spark_bridge.scan.scanner import scan_channel

sys.path.insert(0, str(Path(__file__).parent))
from plans import COLUMNS, beginning, plan_of, ranges
from story import FLIGHTS, NAMES, ListLog, Row, Story, batch_of, random_row, sorted_rows


def read(log: ListLog, begin: object, end: object) -> list[Row]:
    """The rows of an interval through a planner made anew, as after a restart."""
    found = ranges(plan_of(log), begin, end)
    return sorted_rows([row for each in found for batch in scan_channel(log, each, COLUMNS) for row in as_rows(batch)])


def as_rows(batch: pa.RecordBatch) -> list[Row]:
    assert batch.schema.equals(arrow_schema(FLIGHTS, COLUMNS))
    batch.validate(full=True)
    return batch.to_pylist()


def test_every_interval_holds_exactly_its_rows(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.play(flights, rng, batches=60)
    cuts = [beginning(flights), *story.cuts]
    for begin, end in itertools.pairwise(cuts):
        assert read(log, begin, end) == story.between(begin.time, end.time)
    assert read(log, cuts[0], cuts[-1]) == story.between(0, cuts[-1].time)
    begin, end = sorted(rng.sample(cuts, 2), key=lambda cut: cut.time)
    assert read(log, begin, end) == story.between(begin.time, end.time)


def test_large_reads_are_cut_into_batches_of_one_size(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.setattr(batching, "BATCH_ROWS", 50)
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    for size in (60, 7, 30, 20, 120, 1):
        story.write(flights, 0, [random_row(rng) for _ in range(size)])
    [wanted] = ranges(plan_of(log), beginning(flights), story.cut(flights))[:1]
    batches = list(scan_channel(log, wanted, COLUMNS))
    assert [batch.num_rows for batch in batches] == [50, 10, 37, 20, 50, 50, 20, 1]
    assert [row for batch in batches for row in as_rows(batch)] == story.between(0, story.now)


def test_columns_may_be_chosen_in_any_order(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 1, [random_row(rng)])
    wanted = ranges(plan_of(log), beginning(flights), story.cut(flights))[-1]
    [batch] = scan_channel(log, wanted, ("_op", "place", "flight"))
    assert batch.schema.names == ["_op", "place", "flight"]
    assert batch.to_pylist() == [{name: story.between(0, story.now)[0][name] for name in batch.schema.names}]


def test_a_change_feed_speaks_deltas_words(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 1, [random_row(rng) for _ in range(20)])
    wanted = ranges(plan_of(log), beginning(flights), story.cut(flights))[-1]
    [batch] = scan_channel(log, wanted, ("_change_type", "_commit_version", "_commit_timestamp"))
    assert batch.schema.equals(arrow_schema(FLIGHTS, batch.schema.names))
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (row["_op"], row["_ts"], row["_time"]) for row in story.rows
    ]


def test_columns_that_are_left_out_are_not_looked_at(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    rows = [random_row(rng) | {"origin": "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 9}]
    batch = batch_of(FLIGHTS, rows)
    broken = bytes(encode_rows(batch)).replace("\N{LATIN SMALL LETTER A WITH DIAERESIS}".encode() * 9, b"\xff" * 18)
    story.record(NAMES.pchannel(0), Record(RecordType.ROWS, vchannel=flights.vchannels[0], body=broken))
    [wanted] = ranges(plan_of(log), beginning(flights), story.cut(flights))[:1]
    assert list(scan_channel(log, wanted, ("flight", "origin"))) == []
    [batch] = scan_channel(log, wanted, ("flight", "_op"))
    assert batch.to_pylist() == [{name: rows[0][name] for name in ("flight", "_op")}]


def test_what_a_deposed_owner_wrote_behind_a_fence_does_not_count(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    before = story.cut(flights)
    story.own([NAMES.pchannel(0), NAMES.pchannel(1)], term=2)
    story.write(flights, 0, [random_row(rng)])
    zombie = dataclasses.replace(
        Record(RecordType.ROWS, vchannel=flights.vchannels[0], body=encoded(rng)), term=1, cseq=3, ts=story.now
    )
    log.append(NAMES.pchannel(0), encode(zombie), story.now)
    story.write(flights, 0, [random_row(rng)])
    after = story.cut(flights)
    assert read(log, before, after) == story.between(before.time, after.time)
    # Retention has removed the fence and all before it: the lowest term comes from the catalog.
    del log.entries[NAMES.pchannel(0)][:4]
    assert read(log, beginning(flights), after) == story.between(0, after.time)[-1:]


def test_parts_of_a_batch_are_seen_together(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng) for _ in range(8)], parts=4)
    cut = story.cut(flights)
    assert read(log, beginning(flights), cut) == story.between(0, cut.time)
    del log.entries[NAMES.pchannel(0)][-1]
    assert read(log, beginning(flights), cut) == []


def test_unreadable_records_are_skipped_and_named(rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    log.append(NAMES.pchannel(0), b"garbage", story.now)
    story.record(NAMES.pchannel(0), Record(RecordType.ROWS, vchannel=flights.vchannels[0], body=b"no rows"))
    story.write(flights, 0, [random_row(rng)])
    with caplog.at_level(logging.WARNING, "tidewal.spark"):
        assert read(log, beginning(flights), story.cut(flights)) == story.between(0, story.now)
    assert [record.message.split(":")[1].strip()[-10:] for record in caplog.records] == ["is skipped", "is skipped"]


def test_lost_rows_are_an_error_unless_they_may_be_lost(rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    before = story.cut(flights)
    for _ in range(3):
        story.write(flights, 0, [random_row(rng)])
    after = story.cut(flights)
    del log.entries[NAMES.pchannel(0)][:3]
    with pytest.raises(PositionLost, match=r"new checkpoint.*failOnDataLoss=false") as caught:
        read(log, before, after)
    assert caught.value.first_available is not None
    tolerant = plan_of(log, fail_on_data_loss=False)
    [wanted] = ranges(tolerant, before, after)
    [batch] = scan_channel(log, wanted, COLUMNS)
    assert as_rows(batch) == story.between(before.time, after.time)[1:]
    assert "rows are lost" in caplog.text


def test_a_cut_that_would_lose_rows_is_refused(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    lying = dataclasses.replace(story.cut(flights), time=story.now - 2)
    with pytest.raises(CorruptLog, match="before the end of the cut"):
        read(log, beginning(flights), lying)


def test_a_position_before_its_entry_is_read_with_it(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    first = story.cut(flights)
    story.write(flights, 0, [random_row(rng)])
    [wanted] = ranges(plan_of(log), first, story.cut(flights))
    begin = dataclasses.replace(wanted.begin, cseq=wanted.begin.cseq - 1)
    wanted = dataclasses.replace(wanted, begin_ts=0)
    for included in (False, True):
        place = dataclasses.replace(begin, behind=not included)
        [batch] = scan_channel(log, dataclasses.replace(wanted, begin=place), COLUMNS)
        assert as_rows(batch) == story.between(0, story.now)[0 if included else 1 :]


def test_an_end_in_the_middle_leaves_out_what_is_later(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    story.write(flights, 0, [random_row(rng)])
    middle = story.now
    story.write(flights, 0, [random_row(rng)])
    [wanted] = ranges(plan_of(log), beginning(flights), story.cut(flights))[:1]
    [batch] = scan_channel(log, dataclasses.replace(wanted, end_ts=middle, watermark=middle, end_beyond=True), COLUMNS)
    assert as_rows(batch) == story.between(0, middle)


def test_rows_of_a_later_schema_ask_for_a_restart(rng: random.Random) -> None:
    log = ListLog()
    story = Story(log.append)
    flights = story.create()
    record = Record(
        RecordType.ROWS,
        story.now + 1,
        1,
        2,
        vchannel=flights.vchannels[0],
        schema_version=2,
        body=encoded(rng),
    )
    id = log.append(NAMES.pchannel(0), encode(record), story.now)
    story.now += 1
    cut = story.cut(flights)
    ends = {**cut.ends, NAMES.pchannel(0): dataclasses.replace(cut.ends[NAMES.pchannel(0)], id=id, cseq=2)}
    with pytest.raises(InvalidRequest, match="restart the query"):
        read(log, beginning(flights), dataclasses.replace(cut, ends=ends))


def encoded(rng: random.Random) -> bytes:
    return bytes(encode_rows(batch_of(FLIGHTS, [random_row(rng)])))
