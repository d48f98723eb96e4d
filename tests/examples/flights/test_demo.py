"""The demo as a whole: it agrees, resumes, is interrupted and refuses, and says so with its exit status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.flights import expectation, flights, requirements
from examples.flights.place import place_of
from tests.commands import tracebacks
from tests.turns import cases_in_turn
from tidewal.actors.standalone import standalone
from tidewal.runtime.log.opening import open_wal

ROOT = Path(__file__).parents[3]
READERS = ["QueryNode", "Delta"]


@pytest.fixture
def demo(command: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def run(*arguments: object, spark: bool = False) -> Any:
        options = [] if spark else ["--no-spark"]
        return command("--keep", tmp_path / "data", "--events", *arguments, *options)

    return run


@pytest.mark.slow
def test_everything_agrees_and_the_story_is_plain_text(demo: Callable[..., Any], tmp_path: Path):
    ended = demo(3000)
    assert ended.status == 0, ended.out + ended.err
    assert "everything agreed" in ended.out
    assert "in the air out of JFK" in ended.out
    assert "\x1b" not in ended.out
    assert "\r" not in ended.out
    assert (tmp_path / "data" / "picture.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "data" / "demo.json").read_text())
    assert told["write"]["events"] == 3000
    assert sum(told["agreement"]["versions"].values()) == 3000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wal", "log"),
    [((), "rocksmq://"), pytest.param(("--wal", "s3://logs"), "s3://logs/tidewal-demo-", marks=pytest.mark.long)],
)
def test_tables_and_log_may_lie_in_a_store_that_the_demo_starts(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: tuple[str, ...], log: str
):
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ALLOW_HTTP"):
        monkeypatch.setenv(f"AWS_{name}", "")  # the demo sets them: they are brought back
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = ["--no-spark", "--events", "1000", "--picture", tmp_path / "picture.png"]
    ended = command(*options, "--store", "moto", *wal)
    assert ended.status == 0, ended.out + ended.err
    assert f"log     {log}" in ended.out
    assert "still in" not in ended.out
    assert "tables  s3://tidewal-demo/tidewal-demo-" in ended.out
    assert "everything agreed" in ended.out
    kept = command(*options, "--store", "moto", "--keep", tmp_path / "data")
    assert (kept.status, (tmp_path / "data").exists()) == (2, False)


@pytest.mark.long
@pytest.mark.slow
def test_resumes_behind_what_the_log_has(demo: Callable[..., Any]):
    assert demo(2500).status == 0
    ended = demo(4000)
    assert ended.status == 0, ended.out
    assert "2,500 events are in the log already" in ended.out
    assert "1,500 events in" in ended.out
    again = demo(4000, "--json")
    assert again.status == 0
    assert json.loads(again.out)["write"]["events"] == 0
    assert "everything agreed" in again.err
    fewer = demo(1000)
    assert fewer.status == 2
    assert "--events 4000" in fewer.err


async def write_one_more(directory: Path) -> None:
    events = flights.events(flights.load(), 2)
    async with standalone(directory) as node, node.client() as client:
        await client.apply(flights.COLLECTION, events.slice(0, 1).to_batches()[0])


@pytest.mark.long
@pytest.mark.slow
def test_rows_of_somebody_else_are_noticed(demo: Callable[..., Any], tmp_path: Path):
    assert demo(1000).status == 0
    asyncio.run(write_one_more(tmp_path / "data"))
    ended = demo(2000)
    assert ended.status == 2
    assert "something else wrote into it" in ended.err


@pytest.mark.slow
def test_a_disagreement_is_named_and_fails(demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    truth = expectation.expect
    monkeypatch.setattr(expectation, "expect", lambda limit: replace(truth(limit), checksum=1, current_rows=17))
    ended = demo(1000)
    assert ended.status == 1
    assert "NOT everything agreed" in ended.out
    for reader in READERS:
        assert f"{reader}, current rows: " in ended.out
        assert f"{reader}, their checksum: " in ended.out
        assert f"{reader}, inserts" not in ended.out


def test_a_missing_jdk_is_named_before_anything_starts(
    demo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(requirements, "find_java", lambda: None)
    ended = demo(1000, spark=True)
    assert ended.status == 2
    assert "JDK 17" in ended.err
    assert "--no-spark" in ended.err
    assert not (tmp_path / "data").exists()


def test_other_logs_are_refused(command: Callable[..., Any]):
    ended = command("--no-spark", "--wal", "memory://")
    assert ended.status == 2
    assert "rocksmq://, kafka://, pulsar://" in ended.err


@pytest.fixture
def brokers(request: pytest.FixtureRequest) -> Any:
    """The brokers of the backend that the test is run over."""
    return request.getfixturevalue(request.param)


def url_at(brokers: Any) -> str:
    """Where the demo is sent: it chooses a place of its own there."""
    return f"{brokers.url}?web_url={brokers.web_url}" if hasattr(brokers, "web_url") else brokers.url


async def channels_at(url: str, directory: Path) -> list[str]:
    wal = await open_wal(place_of(directory, url)[0])
    try:
        return await wal.channels()
    finally:
        await wal.close()


OVER_BROKERS = pytest.mark.parametrize("brokers", cases_in_turn(("kafka", "pulsar")), indirect=True)


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.slow
@OVER_BROKERS
def test_everything_agrees_over_brokers_and_goes_on_there(demo: Callable[..., Any], tmp_path: Path, brokers: Any):
    url = url_at(brokers)
    for events in (20_000, 30_000):
        ended = demo(events, "--wal", url, "--json")
        assert ended.status == 0, ended.out + ended.err
        told = json.loads(ended.out)
        assert told["agreement"]["agreed"]
        assert sum(told["agreement"]["versions"].values()) == events
    assert told["write"]["events"] == 10_000
    assert not (tmp_path / "data" / "log").exists()
    assert any("dml" in channel for channel in asyncio.run(channels_at(url, tmp_path / "data")))


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.slow
@OVER_BROKERS
def test_nothing_is_left_on_brokers_of_what_is_not_kept(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brokers: Any
):
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(directory))
    ended = command("--no-spark", "--events", 1000, "--wal", url_at(brokers), "--picture", tmp_path / "p.png")
    assert ended.status == 0, ended.out + ended.err
    assert not directory.exists()
    assert asyncio.run(channels_at(url_at(brokers), directory)) == []


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.slow
@OVER_BROKERS
def test_spark_agrees_over_brokers(start: Callable[..., subprocess.Popen[str]], tmp_path: Path, brokers: Any):
    process = start("--keep", tmp_path / "data", "--events", 20_000, "--wal", url_at(brokers))
    assert process.stdout is not None
    out = process.stdout.read()
    assert process.wait(10) == 0, out
    assert "everything agreed" in out
    assert "from spark.readStream" in out


@pytest.mark.slow
def test_ctrl_c_drains_and_leaves_a_directory_that_resumes(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], tmp_path: Path
):
    process = start("--no-spark", "--keep", tmp_path / "data", "--events", 120_000)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("2. Replay"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 130, rest
    assert f'make demo ARGS="--keep {tmp_path}/data"' in rest
    assert "Traceback" not in rest
    ended = command("--no-spark", "--keep", tmp_path / "data", "--events", 120_000)
    assert ended.status == 0, ended.out + ended.err


@pytest.mark.long
@pytest.mark.spark
def test_spark_agrees_and_goes_on_from_its_checkpoint(start: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    """In processes of their own: one Python process has one Spark, with one set of settings, for its whole life."""
    for events in (20_000, 30_000):
        process = start("--keep", tmp_path / "data", "--events", events)
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait(10) == 0, out
        assert "everything agreed" in out
        assert "1 micro-batches in this run" in out
    stored = sorted((tmp_path / "data" / "spark" / "windows").glob("*.parquet"))
    assert sum(pa.parquet.read_table(path).num_rows > 0 for path in stored) == 2


@pytest.mark.long
@pytest.mark.spark
def test_ctrl_c_ends_spark_too(start: Callable[..., subprocess.Popen[str]], tmp_path: Path):
    process = start("--keep", tmp_path / "data", "--events", 5000)
    assert process.stdout is not None
    for line in process.stdout:
        if "Spark:" in line:
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(60) == 130, rest
    assert not tracebacks(rest)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_three_kills(seed: int, tmp_path: Path):
    script = [sys.executable, str(ROOT / "tests" / "kill_demo.py"), "--kills", "3", "--spark-kills", "1"]
    ended = subprocess.run(
        [*script, "--events", "60000", "--seed", str(seed)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
