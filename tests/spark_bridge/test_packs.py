"""Micro-batches as packs: the messages of the log, between the times they say, each once."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")
from pyspark.errors import StreamingQueryException

from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.rows.row_codec import decode_rows
from tidewal.runtime.rows.schema import OPS
from tidewal.runtime.streams.messages import MsgPack
from tidewal.spark_bridge import foreach_pack, pack_schema
from tidewal.spark_bridge.helpers.packs import _ends, _messages
from tidewal.spark_bridge.helpers.records import encode_records

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, NAMES, Row, Story, number, random_row

OP_NAMES = list(OPS)
ROWS = FLIGHTS.row_arrow()

Messages = dict[tuple[object, object, object], list[Row]]


def written(rows: list[Row]) -> Messages:
    """The rows of a story by record, as bodies have them."""
    found: Messages = {}
    for row in rows:
        own = {name: row[name] for name in ROWS.names}
        found.setdefault((row["_ts"], row["_channel"], row["_cseq"]), []).append(own)
    return found


def told(pack: MsgPack, schema: pa.Schema = ROWS) -> Messages:
    """What the messages of a pack hold, checked to be in order and in its interval."""
    names = [(message.ts, message.vchannel, message.cseq) for message in pack.messages]
    assert names == sorted(names)
    assert all(pack.begin_ts < ts <= pack.end_ts for ts, _, _ in names)
    return {
        name: [{**row, "_op": OP_NAMES[row["_op"]]} for row in decode_rows(message.body, schema).to_pylist()]
        for name, message in zip(names, pack.messages, strict=True)
    }


def frame_of(rows: list[Row]) -> pa.RecordBatch:
    """Rows of a story in the types that Spark has."""
    kinds = {name: ROWS.field(name).type for name in FLIGHTS.arrow().names} | {"place": pa.list_(pa.float32())}
    kinds |= {"_ts": pa.int64(), "_op": pa.string(), "_channel": pa.string(), "_cseq": pa.int64(), "_row": pa.int32()}
    return pa.RecordBatch.from_pylist(rows, pa.schema(list(kinds.items())))


def a_record(rng: random.Random, cseq: int, rows: int) -> list[Row]:
    nothing = dict.fromkeys(FLIGHTS.arrow().names)
    where = {"_ts": 10 * cseq, "_channel": "v", "_cseq": cseq}
    return [{**nothing, **random_row(rng), **where, "_row": place} for place in range(rows)]


def encoded(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(list(encode_records(batches, ROWS)))


def test_rows_become_the_records_that_they_came_from(rng: random.Random) -> None:
    rows = [row for cseq in range(1, 20) for row in a_record(rng, cseq, rng.randrange(1, 9))]
    whole = frame_of(rows)
    batches: list[pa.RecordBatch] = []
    at = 0
    while at < len(rows):  # Spark divides rows as it likes, and sends batches of none
        size = rng.randrange(0, 7)
        batches.append(whole.slice(at, size))
        at += size
    found = _messages(encoded(batches))
    assert told(MsgPack(0, 200, found)) == written(rows)
    assert list(encode_records([whole.slice(0, 0)], ROWS)) == []


def test_numbers_that_begin_anew_with_an_owner_are_other_records(rng: random.Random) -> None:
    rows = [row | {"_ts": ts} for ts in (10, 20, 30) for row in a_record(rng, 2, 3)]
    assert told(MsgPack(0, 30, _messages(encoded([frame_of(rows[:4]), frame_of(rows[4:])])))) == written(rows)
    assert len(written(rows)) == 3


def test_a_filter_leaves_records_with_fewer_rows(rng: random.Random) -> None:
    rows = [row for cseq in range(1, 20) for row in a_record(rng, cseq, 8) if rng.random() < 0.4]
    assert told(MsgPack(0, 200, _messages(encoded([frame_of(rows)])))) == written(rows)


def test_records_of_deletes_alone_have_no_vectors(rng: random.Random) -> None:
    rows = [row | dict.fromkeys(FLIGHTS.arrow().names[1:]) | {"_op": "delete"} for row in a_record(rng, 1, 3)]
    assert told(MsgPack(0, 200, _messages(encoded([frame_of(rows)])))) == written(rows)
    for wrong in ([1.0], [1.0, None]):
        with pytest.raises(InvalidRequest, match="has not 2 numbers, or null among them"):
            encoded([frame_of([{**rows[0], "place": wrong}])])


def test_rows_that_were_shuffled_are_refused(rng: random.Random) -> None:
    first, second = a_record(rng, 1, 3), a_record(rng, 2, 2)
    with pytest.raises(InvalidRequest, match="out of order"):
        encoded([frame_of(first[::-1])])
    with pytest.raises(InvalidRequest, match="out of order"):
        encoded([frame_of(first[1:]), frame_of(first[:1])])
    with pytest.raises(InvalidRequest, match="lie apart"):
        _messages(encoded([frame_of([*first[:1], *second, *first[1:]])]))


def test_packs_hold_whole_timestamps_and_no_more_than_they_may(rng: random.Random) -> None:
    limit = 100
    times = [rng.randrange(1, 60) for _ in range(80)]
    sizes = [rng.randrange(1, 60) for _ in times]
    ends = list(_ends(pa.table({"ts": times, "size": pa.array(sizes, pa.int32())}), 0, 99, limit))
    assert ends == sorted(set(ends))
    assert ends[-1] == 99
    for begin, end in pairwise([0, *ends]):
        inside = {ts for ts in times if begin < ts <= end}
        held = sum(size for ts, size in zip(times, sizes, strict=True) if ts in inside)
        assert held <= limit or len(inside) == 1
    assert len(ends) > 5
    nothing = pa.table({"ts": pa.array([], pa.int64()), "size": pa.array([], pa.int32())})
    assert list(_ends(nothing, 0, 99, limit)) == [99]
    assert list(_ends(nothing, 99, 99, limit)) == []
    for begin, end in ((20, 40), (10, 30), (10, 29)):
        with pytest.raises(InvalidRequest, match="leave column _ts as it is"):
            list(_ends(pa.table({"ts": [20, 31], "size": pa.array([1, 1], pa.int32())}), begin, end, limit))


# ---- in Spark --------------------------------------------------------------------------------------------------------


def drained(frame: Any, checkpoint: Path, packs: list[tuple[MsgPack, int]], *, max_bytes: int = 1 << 20) -> None:
    """Hand what there is to `packs`."""
    writer = foreach_pack(
        frame, lambda pack, batch: packs.append((pack, batch)), checkpoint=str(checkpoint), max_bytes=max_bytes
    )
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(200)


@pytest.mark.spark
@pytest.mark.slow
def test_packs_are_the_log_between_their_times_also_after_a_restart(
    spark, story: Story, options, rng: random.Random, tmp_path: Path
) -> None:
    flights = story.create()
    while len(story.cuts) < 6:
        story.play(flights, rng, batches=4)
    begin = story.cuts[2].time
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", str(begin))
    frame = stream.option("maxRowsPerTrigger", "15").load()
    assert pack_schema(frame) == ROWS
    packs: list[tuple[MsgPack, int]] = []
    drained(frame, tmp_path / "checkpoint", packs, max_bytes=200)
    before = len(packs)
    story.own([NAMES.pchannel(0), NAMES.pchannel(1)], term=2)  # whose numbers begin anew
    story.play(flights, rng, batches=6)
    story.cut(flights)  # moves time and nothing else
    drained(frame, tmp_path / "checkpoint", packs, max_bytes=200)
    assert before < len(packs)
    assert (packs[0][0].begin_ts, packs[-1][0].end_ts) == (begin, story.cuts[-1].time)
    for (one, _), (next_one, _) in pairwise(packs):
        assert next_one.begin_ts == one.end_ts > one.begin_ts
    assert len({batch for _, batch in packs}) < len(packs)  # a micro-batch in several packs
    found: Messages = {}
    for pack, _ in packs:
        found |= told(pack)
    assert found == written([row for row in story.rows if number(row, "_ts") > begin])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_a_pack_that_failed_comes_again(spark, story: Story, options, rng: random.Random, tmp_path: Path) -> None:
    flights = story.create()
    story.play(flights, rng, batches=10)
    frame = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest").load()
    stored: list[int] = []
    handled: list[Messages] = []

    def handle(pack: MsgPack, batch: int) -> None:
        if stored and pack.end_ts <= stored[-1]:
            return
        if len(stored) == 2 and not failed:
            failed.append(batch)
            raise ValueError("the disk is full")
        stored.append(pack.end_ts)
        handled.append(told(pack))

    failed: list[int] = []
    for again in (False, True):
        writer = foreach_pack(frame, handle, checkpoint=str(tmp_path / "checkpoint"), max_bytes=1000)
        query = writer.trigger(availableNow=True).start()
        if again:
            assert query.awaitTermination(200)
        else:
            with pytest.raises(StreamingQueryException, match="the disk is full"):
                query.awaitTermination(200)
    assert sum(map(len, handled)) == len({name for messages in handled for name in messages})
    assert {name: rows for messages in handled for name, rows in messages.items()} == written(story.rows)


@pytest.mark.spark
@pytest.mark.slow
def test_a_frame_may_leave_out_columns_and_rows(
    spark, story: Story, options, rng: random.Random, tmp_path: Path
) -> None:
    flights = story.create()
    story.play(flights, rng, batches=10)
    frame = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest").load()
    some = frame.where("_op != 'delete'").drop("place", "event_time", "_watermark")
    packs: list[tuple[MsgPack, int]] = []
    drained(some, tmp_path / "checkpoint", packs)
    schema = pack_schema(some)
    assert schema.names == ["flight", "origin", "delay", "stops", "_op"]
    expected = [row for row in story.rows if row["_op"] != "delete"]
    assert {name: rows for pack, _ in packs for name, rows in told(pack, schema).items()} == {
        name: [{key: row[key] for key in schema.names} for row in rows] for name, rows in written(expected).items()
    }


@pytest.mark.spark
@pytest.mark.slow
def test_what_packs_cannot_be_made_of_is_said(spark, story: Story, options, tmp_path: Path) -> None:
    flights = story.create()
    stream = spark.readStream.format("tidewal").options(**options).option("startingOffsets", "earliest").load()

    def refused(frame: Any, **arguments: Any) -> Callable[[], object]:
        return lambda: foreach_pack(frame, print, **{"checkpoint": str(tmp_path), **arguments})

    for attempt, reason in (
        (refused(spark.read.format("tidewal").options(**options).load()), "takes a stream"),
        (refused(stream.drop("_cseq", "_op")), "need the columns _op, _cseq too"),
        (refused(stream.withColumnRenamed("_ts", "_id")), "need the columns _ts, key, value too"),
        (refused(stream, max_bytes=0), "1 or more"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            attempt()
    story.cut(flights)
    both = stream.unionByName(stream)
    with pytest.raises(StreamingQueryException, match="made of one stream, of a collection"):
        drained(both, tmp_path / "checkpoint", [])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_messages_of_topics_come_in_packs_too(spark, story: Story, options, rng: random.Random, tmp_path: Path) -> None:
    channels = [NAMES.pchannel(0), NAMES.pchannel(1)]
    story.own(channels, term=1)
    sent: list[tuple[int, str, bytes, bytes]] = []
    for size in range(60):
        channel, body = rng.choice(channels), rng.randbytes(size)
        id = story.record(channel, Record(RecordType.ROWS, body=body))
        sent.append((story.now, channel, id, body))
    for channel in channels:
        story.record(channel, Record(RecordType.TIME_TICK))
    topics = {"wal": options["wal"], "topic": ",".join(channels), "startingOffsets": "earliest"}
    stream = spark.readStream.format("tidewal").options(**topics, consistency="tick").load()
    packs: list[tuple[MsgPack, int]] = []
    drained(stream, tmp_path / "checkpoint", packs, max_bytes=100)
    for (one, _), (next_one, _) in pairwise(packs):
        assert next_one.begin_ts == one.end_ts > one.begin_ts
    assert packs[-1][0].end_ts == story.now - 1  # of the tick in the first channel: the second one knew more
    assert len(packs) > 5
    got = [(each.ts, each.vchannel, each.id, bytes(each.body)) for pack, _ in packs for each in pack.messages]
    assert got == sorted(sent)
    each_on_its_own = spark.readStream.format("tidewal").options(**topics).load()
    with pytest.raises(StreamingQueryException, match="topics with consistency=tick"):
        drained(each_on_its_own, tmp_path / "other", [])
