"""What goes wrong under a running query is told in Spark's exception in words that say what to do."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.errors import StreamingQueryException

from tidewal.runtime.log.record import Record, RecordType
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.rows.row_codec import encode_rows

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SEGMENT_BYTES, Owner
from story import FLIGHTS, NAMES, Row, Story, batch_of, number, random_row

pytestmark = pytest.mark.spark


def stream(spark: Any, options: dict[str, str], **more: str) -> Any:
    return spark.readStream.format("tidewal").options(**options | {"startingOffsets": "earliest"} | more).load()


def started(frame: Any, folder: Path) -> Any:
    return frame.writeStream.format("noop").option("checkpointLocation", str(folder / "running")).start()


def identities(rows: list[Row]) -> set[tuple[str, int, int]]:
    return {(str(row["_channel"]), number(row, "_cseq"), number(row, "_row")) for row in rows}


@pytest.mark.long
def test_a_collection_that_is_dropped_under_a_query_and_made_again(
    spark, story: Story, options, collect, tmp_path: Path, rng: random.Random
) -> None:
    flights = story.create()
    story.play(flights, rng, batches=3)
    collect(stream(spark, options))
    query = started(stream(spark, options), tmp_path)
    query.processAllAvailable()
    story.event({"kind": "drop", "id": flights.id})
    with pytest.raises(StreamingQueryException, match=r"no collection 'flights' .* Check options"):
        query.awaitTermination(200)
    story.event({"kind": "dropped", "id": flights.id})
    story.term += 1  # channels that are created anew have a new owner
    again = story.create(id=8)
    story.rows.clear()
    story.play(again, rng, batches=3)
    with pytest.raises(StreamingQueryException, match=r"'flights' .*that was dropped .*start with a new checkpoint"):
        collect(stream(spark, options))
    assert identities([row for batch in collect(stream(spark, options), "new") for row in batch]) == identities(
        story.rows
    )


@pytest.mark.long
def test_rows_that_retention_removed_before_a_query_came(
    spark, owner: Owner, story: Story, options, collect, rng: random.Random
) -> None:
    flights = story.create()
    story.play(flights, rng, batches=5)
    collect(stream(spark, options))
    begin = story.cuts[-1].time
    for _ in range(3):
        story.write(flights, 0, [random_row(rng)])
    fill_segment(owner)
    story.claim("other")
    catalog_from = story.snapshot()
    story.write(flights, 1, [random_row(rng)])
    story.write(flights, 0, [random_row(rng)])
    story.cut(flights)
    owner._run(owner._wal.truncate(NAMES.catalog, catalog_from))
    for channel in (NAMES.cuts, NAMES.pchannel(0), NAMES.pchannel(1)):
        owner._run(owner._wal.truncate(channel, owner._run(owner._wal.latest_id(channel))))
    assert owner._wal.retain_now()
    with pytest.raises(StreamingQueryException, match=r"retention has removed .*new checkpoint.*failOnDataLoss=false"):
        collect(stream(spark, options))
    [batch] = collect(stream(spark, options, failOnDataLoss="false"))
    *_, one, other = [row for row in story.rows if number(row, "_ts") > begin]
    assert identities(batch) == identities([one, other])


def fill_segment(owner: Owner) -> None:
    """Let what was written last and what comes next lie in different segments, for retention removes whole ones."""
    if "filler" not in owner._channels:
        owner._channels.add("filler")
        owner._run(owner._wal.create_channel("filler", ChannelPolicy(retention_s=0)))
    piece = bytes(256 * 1024)
    for _ in range(SEGMENT_BYTES // len(piece) + 1):
        owner.append("filler", piece, 0)


def test_rows_of_a_later_schema_in_mid_query(spark, story: Story, options, tmp_path: Path, rng: random.Random) -> None:
    flights = story.create()
    story.play(flights, rng, batches=3)
    query = started(stream(spark, options), tmp_path)
    query.processAllAvailable()
    body = bytes(encode_rows(batch_of(FLIGHTS, [random_row(rng)])))
    story.now += 1
    story.stamped(
        NAMES.pchannel(0),
        Record(RecordType.ROWS, vchannel=flights.vchannels[0], schema_version=2, body=body),
        story.now,
    )
    story.cut(flights)
    with pytest.raises(StreamingQueryException, match=r"schema of 'flights' has changed .*restart the query"):
        query.awaitTermination(200)


@pytest.mark.long
@pytest.mark.slow
def test_the_owner_ends_under_a_query(spark, tmp_path: Path, rng: random.Random) -> None:
    owner = Owner(tmp_path / "other")
    try:
        story = Story(owner.append)
        story.play(story.create(), rng, batches=3)
        query = started(stream(spark, {"wal": owner.url, "collection": "flights"}), tmp_path)
        query.processAllAvailable()
    finally:
        owner.close()
    with pytest.raises(StreamingQueryException, match=r"start one \(tidewal run --wal rocksmq://.*/other\)"):
        query.awaitTermination(200)


def test_a_checkpoint_of_another_collection_or_log(
    spark, story: Story, options, collect, tmp_path: Path, rng: random.Random
) -> None:
    story.play(story.create(), rng, batches=3)
    collect(stream(spark, options))
    story.term += 1
    story.cut(story.create(id=9, schema=dataclasses.replace(FLIGHTS, name="trains")))
    with pytest.raises(StreamingQueryException, match="start with a new checkpoint"):
        collect(stream(spark, options | {"collection": "trains"}))
    other = Owner(tmp_path / "other")
    try:
        elsewhere = Story(other.append)
        elsewhere.now += 1_000_000  # a collection of the same name and id, made at another time
        elsewhere.play(elsewhere.create(), rng, batches=6)
        with pytest.raises(StreamingQueryException, match="start with a new checkpoint"):
            collect(stream(spark, options | {"wal": other.url}))
    finally:
        other.close()
