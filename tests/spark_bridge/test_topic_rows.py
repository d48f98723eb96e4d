"""Topics: what each entry gives."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import datasource as spark

from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.spark_bridge.plan.pushdown import take
from tidewal.spark_bridge.scan.scanner import scan_channel
from tidewal.spark_bridge.scan.topic_rows import topic_columns

sys.path.insert(0, str(Path(__file__).parent))
from story import ListLog, time_of
from topic_story import COLUMNS, NOON, by_channel, rows, values


def test_an_entry_is_a_row_of_kafkas_columns() -> None:
    log = ListLog()
    tags = {"source": "web", "n": 3, "late": True, "raw": b"\x00", "none": None}
    record = Record(RecordType.QUERY, NOON + 5, key=b"k", tags=tags, body=b"body")
    log.append("a", encode(record), NOON)
    log.append("a", b"plain", NOON + (7 << 18))
    log.append("a", b"no time", 0)
    log.append("a", b"TW but no record", NOON)
    log.append("a", encode(Record(RecordType.TIME_TICK, NOON)), NOON)
    log.append("b", b"", NOON)
    plan = by_channel(log)
    found = rows(log, plan, plan.begin(), plan.newest() or {})
    assert [row["value"] for row in found] == [b"body", b"plain", b"no time", b"TW but no record", b""]
    headers = [
        {"key": "source", "value": b"web"},
        {"key": "n", "value": b"3"},
        {"key": "late", "value": b"true"},
        {"key": "raw", "value": b"\x00"},
        {"key": "none", "value": None},
    ]
    assert found[0] == {
        "key": b"k",
        "value": b"body",
        "timestamp": time_of(NOON),
        "_ts": NOON + 5,
        "_time": time_of(NOON),
        "_channel": "a",
        "_id": log.entries["a"][0].id,
        "_watermark": None,
        "headers": headers,
    }
    assert (found[1]["key"], found[1]["headers"], found[1]["timestamp"]) == (None, None, time_of(NOON + (7 << 18)))
    assert (found[2]["_ts"], found[2]["timestamp"], found[2]["_time"]) == (None, None, None)
    assert list(topic_columns()) == list(COLUMNS[:-1])


def test_tags_are_columns_that_filters_reach() -> None:
    log = ListLog()
    tags = [{"source": "web", "n": 1}, {"source": "app"}, {"n": True, "source": None}, {"source": b"web"}]
    for number, each in enumerate(tags):
        log.append("a", encode(Record(RecordType.QUERY, NOON, tags=each, body=b"%d" % number)), NOON)
    log.append("a", b"plain", NOON)
    plan = by_channel(log, topics=("a",), tags=("source", "n"))
    schema = plan.schema()
    assert schema["tags"].dataType.simpleString() == "struct<source:string,n:string>"
    [task] = plan.all_tasks()
    [batch] = scan_channel(log, task, schema.names)
    assert [tuple(row["tags"].values()) for row in batch.to_pylist()] == [
        ("web", "1"),
        ("app", None),
        (None, "true"),
        ("web", None),
        (None, None),
    ]
    for asked, found in [
        ([spark.EqualTo(("tags", "source"), "web")], [b"0", b"3"]),
        ([spark.In(("tags", "source"), ("web", "app")), spark.EqualTo(("tags", "n"), "1")], [b"0"]),
        ([spark.EqualTo(("value",), b"plain")], [b"plain"]),
        ([spark.EqualTo(("_channel",), "b")], []),
    ]:
        where, left = take(asked, schema)
        assert left == []
        batches = [batch for each in plan.all_tasks(where) for batch in scan_channel(log, each, schema.names)]
        assert [row["value"] for batch in where.filtered(iter(batches)) for row in batch.to_pylist()] == found
    assert take([spark.EqualTo(("tags", "other"), "x")], schema)[1] != []
    assert plan.all_tasks(take([spark.EqualTo(("_channel",), "b")], schema)[0]) == []


def test_a_damaged_record_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    log = ListLog()
    damaged = bytearray(encode(Record(RecordType.QUERY, body=b"body")))
    damaged[-1] ^= 1
    log.append("a", bytes(damaged), NOON)
    log.append("b", b"good", NOON)
    plan = by_channel(log)
    with caplog.at_level(logging.WARNING, "tidewal.spark"):
        assert values(rows(log, plan, plan.begin(), plan.newest() or {}), "b") == [b"good"]
    assert "is skipped: checksum" in caplog.text
