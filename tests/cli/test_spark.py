"""`tidewal spark`: what is wrong is said before Java starts, and the pipelines work on what a node has written."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from urllib.request import urlopen

import pytest
import typer

pytest.importorskip("pyspark")

from tests.brokers.processes import free_ports
from tests.commands import said, tracebacks
from tidewal.actors.standalone import standalone
from tidewal.cli import spark_pipelines, spark_running
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.spark_bridge.helpers import spark_session
from tidewal.spark_bridge.helpers.jdk import Java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIELDS = (Field("id", "int64"), Field("name", "varchar", nullable=True), Field("place", "float_vector", dim=2))
THINGS = CollectionSchema("things", FIELDS, "id")
COPIES = CollectionSchema("copies", FIELDS, "id")


# ---- without Spark ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tail", "ftp://x", "things"), "option wal is 'ftp://x'"),
        (("tail", "rocksmq:///x", "things", "-o", "colection=x"), "unknown option 'colection'"),
        (("tail", "rocksmq:///x", "things", "-o", "maxRowsPerTrigger"), "--option is NAME=VALUE"),
        (("tail", "rocksmq:///x", "things", "-o", "maxRowsPerTrigger=0"), "whole number of 1 or more"),
        (("tail", "rocksmq:///x", "things", "-o", "endingOffsets=latest"), "is for spark.read only"),
        (("tail", "rocksmq:///x", "things", "--conf", "=1"), "--conf is NAME=VALUE"),
        (("count", "rocksmq:///x", "things", "-o", "maxRowsPerTrigger=5"), "is for spark.readStream only"),
        (("copy", "rocksmq:///x", "things", "--checkpoint", "/x"), "--to-collection or --to-topic"),
        (("copy", "rocksmq:///x", "t", "--topic", "--to-collection", "c", "--checkpoint", "/x"), "by themselves"),
    ],
)
def test_wrong_arguments_are_told_before_java_starts(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(spark_running, "session", lambda *_, **__: pytest.fail("Spark was started"))
    ended = command("spark", *arguments)
    assert ended.status == 2
    assert said in ended.err


def test_what_is_missing_is_named(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = "rocksmq:///x"
    old = Java(tmp_path / "java", tmp_path, "11.0.2")
    monkeypatch.setattr(spark_running, "find_java", lambda: old)
    assert "JDK 17 or newer, found only 11.0.2" in command("spark", "count", log, "things").err
    monkeypatch.setattr(spark_running, "find_java", lambda: None)
    monkeypatch.setattr(spark_session.shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "Java is missing: install a JDK 17" in command("spark", "count", log, "things").err
    monkeypatch.setattr(spark_session, "find_spec", lambda _: None)
    assert "PySpark is missing: pip install 'tidewal[spark]'" in command("spark", "count", log, "things").err


@pytest.mark.parametrize(
    ("ends", "printed"),
    [(RuntimeError("no"), ""), (typer.Exit(130), "0 rows in 0 micro-batches\n"), (None, "0 rows in 0 micro-batches\n")],
)
def test_a_pipeline_that_fails_prints_no_totals(
    ends: Exception | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    query, spark = Mock(), Mock()
    query.awaitTermination.side_effect = ends
    query.awaitTermination.return_value = True
    writer = Mock()
    writer.trigger.return_value.start.return_value = query
    monkeypatch.setattr(spark_pipelines, "LAST_PROGRESS_WITHIN_S", 0.0)
    with pytest.raises(type(ends)) if ends else nullcontext():
        spark_pipelines._run(spark, writer, spark_pipelines.Running(once=True, every="", metrics_port=0, as_json=False))
    assert capsys.readouterr().out == printed
    spark.streams.removeListener.assert_called_once()


# ---- with it ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> str:
    """The log of a node that runs as a process of its own, with 8 things of which one is deleted, no copies and no
    messages."""

    async def fill() -> None:
        async with standalone(tmp_path / "data") as node, node.client() as client:
            for schema in (THINGS, COPIES):
                await client.create_collection(schema)
            for channel in ("messages", "more"):
                await node.node.wal.create_channel(channel, ChannelPolicy())
            rows = [{"id": number, "name": f"thing {number}", "place": [number, 0.5]} for number in range(8)]
            await client.insert("things", rows)
            await client.delete("things", [3])
            await client.cut("things")

    asyncio.run(fill())
    process = start("run", "--data", tmp_path / "data", "--json")
    return str(said(process)["wal"])


def lines(ended: Any) -> list[dict[str, Any]]:
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_the_pipelines(command: Callable[..., Any], spark: SparkSession, url: str, tmp_path: Path) -> None:
    counted = lines(command("spark", "count", url, "things", "--window", "1 day", "--json"))
    assert {row["_op"]: row["rows"] for row in counted} == {"insert": 8, "delete": 1}
    shown = lines(command("spark", "tail", url, "things", "--from", "earliest", "--once", "--json"))
    assert [row["id"] for row in shown if row["_op"] == "insert"] != []
    assert {row["id"]: row["place"] for row in shown if row["_op"] == "insert"} == {
        number: [number, 0.5] for number in range(8)
    }
    text = command("spark", "tail", url, "things", "--from", "earliest", "--once", "--rows", 2).out.splitlines()
    assert (text[0], len(text), text[-1].strip()) == ("micro-batch 0", 4, "…")

    where = tmp_path / "files"
    for rows in (9, 0):  # the second time there is nothing new
        told = lines(command("spark", "export", url, "things", where, "--once", "--json"))
        assert told[-1]["rows"] == rows
    assert spark.read.parquet(str(where)).groupBy("_op").count().orderBy("_op").collect() == [
        ("delete", 1),
        ("insert", 8),
    ]

    copy = ("spark", "copy", url, "things", "--once", "--json")
    assert lines(command(*copy, "--to-collection", "copies", "--checkpoint", tmp_path / "c1"))[-1]["rows"] == 9
    assert lines(command(*copy, "--to-topic", "messages", "--checkpoint", tmp_path / "c2"))[-1]["rows"] == 9
    again = ("spark", "copy", url, "messages", "--topic", "--once", "--json", "--to-topic", "more")
    assert lines(command(*again, "--checkpoint", tmp_path / "c3"))[-1]["rows"] == 9
    messages = lines(command("spark", "tail", url, "more", "--topic", "--from", "earliest", "--once", "--json"))
    assert len(messages) == 9

    failed = command("spark", "count", url, "thinks")
    assert failed.status == 2
    assert "tidewal: CollectionNotFound: no collection 'thinks'" in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_a_pipeline_runs_until_it_is_told_to_stop(start: Callable[..., Any], url: str, tmp_path: Path) -> None:
    [port] = free_ports(1)
    arguments = ("spark", "export", url, "things", tmp_path / "files", "--every", "100 milliseconds", "--json")
    process = start(*arguments, "--metrics-port", port)
    told = said(process)
    assert told["rows"] == 9
    page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    assert "tidewal_spark_query_num" in page
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 130
    assert '{"rows": 9, "batches": 1}' in rest
    assert not tracebacks(rest)
