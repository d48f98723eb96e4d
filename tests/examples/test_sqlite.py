"""An adapter in a package of its own, `examples/sqlite`, gets all that Tidewal's own adapters have."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite"
TIDEWAL = (sys.executable, "-c", "from tidewal.cli.main import main; main()")

Python = Callable[..., str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files, and beside them the folder `site` in which it is installed."""
    copied = tmp_path_factory.mktemp("example") / "sqlite"
    shutil.copytree(EXAMPLE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", sys.executable)
    install = [sys.executable, "-m", "uv", "pip", "install", *options, "--target", str(copied / "site"), str(copied)]
    subprocess.run(install, check=True)
    return copied


@pytest.fixture
def run(package: Path, tmp_path: Path) -> Python:
    """Run a command where the example is installed; what it prints."""

    def run(*command: object, directory: Path = tmp_path, **environment: str) -> str:
        variables = {**os.environ, "PYTHONPATH": str(package / "site"), **environment}
        ended = subprocess.run(
            [str(each) for each in command], cwd=directory, env=variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


WRITE = """
import asyncio, sys
from tidewal import ChannelPolicy, open_wal

async def write(url):
    async with await open_wal(url) as wal:
        await wal.create_channel("orders", ChannelPolicy())
        for number in range(10):
            await wal.append("orders", b"order %d" % number, (1_700_000_000_000 + number) << 18)

asyncio.run(write(sys.argv[1]))
"""
NODE = """
import asyncio, sys
import tidewal

PEOPLE = tidewal.CollectionSchema("people", (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar")), "id")

async def live(url, names):
    async with tidewal.standalone("data", wal=url) as node, node.client() as client:
        if "people" not in await client.list_collections():
            await client.create_collection(PEOPLE)
        await client.insert("people", [{"id": len(name), "name": name} for name in names])
        await client.flush("people")
        print(sorted((await client.query("people", consistency="strong")).table["name"].to_pylist()))

asyncio.run(live(sys.argv[1], sys.argv[2:]))
"""
SETTINGS = """
import json, pathlib, sys
from tidewal.runtime.config.loading import load_settings, wal_options, wal_url

settings = load_settings(pathlib.Path(sys.argv[1]))
given = wal_options(settings)["settings"]
print(json.dumps([wal_url(settings), given.busy_timeout_s, given.poll_s]))
"""
METRICS = """
import asyncio, sys
from tidewal import ChannelPolicy, open_wal
from tidewal.runtime.metrics.metrics import Metrics

async def write(url):
    metrics = Metrics("node")
    async with await open_wal(url, metrics=metrics) as wal:
        await wal.create_channel("orders", ChannelPolicy())
        await wal.append("orders", b"order")
    print(metrics.value("sqlite_commit_total"))

asyncio.run(write(sys.argv[1]))
"""
SPARK = """
import sys
from tidewal.spark_bridge import session

spark = session("sqlite")
frame = spark.read.format("tidewal").option("wal", sys.argv[1]).option("topic", "orders").load()
print(sorted(bytes(row["value"]).decode() for row in frame.collect()))
spark.stop()
"""


def test_the_whole_adapter_has_four_hundred_lines_at_most() -> None:
    files = sorted(EXAMPLE.rglob("*.py"))
    assert len(files) == 6
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= 400


def test_it_passes_the_suite(package: Path, run: Python) -> None:
    told = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", directory=package)
    summary = told.splitlines()[-1]
    assert " passed" in summary
    assert " failed" not in summary


def test_tools_read_it(run: Python, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/log"
    run(sys.executable, "-c", WRITE, url)
    inspected = json.loads(run(*TIDEWAL, "inspect", url, "--json"))
    (channel,) = inspected["channels"]
    assert (channel["name"], channel["entries"]) == ("orders", 10)
    assert inspected["file"]["bytes"] == (tmp_path / "log").stat().st_size
    tailed = run(*TIDEWAL, "tail", url, "orders", "--no-follow", "--json")
    assert len(tailed.splitlines()) == 10


def test_doctor_looks_at_what_it_needs(run: Python) -> None:
    checks = {check["name"]: check for check in json.loads(run(*TIDEWAL, "doctor", "--json"))}
    assert (checks["SQLite"]["status"], checks["SQLite"]["found"]) == ("ok", sqlite3.sqlite_version)


def test_a_node_lives_on_it(run: Python, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/log"
    assert run(sys.executable, "-c", NODE, url, "Ada") == "['Ada']\n"
    assert run(sys.executable, "-c", NODE, url, "Grace") == "['Ada', 'Grace']\n"


def test_its_settings_come_from_a_file_and_the_environment_and_choose_it(run: Python, tmp_path: Path) -> None:
    (tmp_path / "tidewal.yaml").write_text(f"mq: {{type: sqlite}}\nsqlite: {{path: {tmp_path}/log, pollS: 0.5}}\n")
    told = run(sys.executable, "-c", SETTINGS, tmp_path / "tidewal.yaml", TIDEWAL__SQLITE__BUSYTIMEOUTS="3")
    assert json.loads(told) == [f"sqlite://{tmp_path}/log", 3.0, 0.5]


def test_its_metrics_are_in_the_table(run: Python, tmp_path: Path) -> None:
    assert float(run(sys.executable, "-c", METRICS, f"sqlite://{tmp_path}/log")) == 1


@pytest.mark.spark
def test_spark_reads_a_topic_of_it(run: Python, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    url = f"sqlite://{tmp_path}/log"
    run(sys.executable, "-c", WRITE, url)
    assert run(sys.executable, "-c", SPARK, url) == f"{[f'order {number}' for number in range(10)]}\n"
