"""The core without the extra `node`: streams, groups and actors run on the embedded log, and what needs the extra says
which command installs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from . import wheels

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

# None in `sys.modules`: nobody finds the package, and importing it fails.
WITHOUT_NODE = """
import sys
for name in ("deltalake", "numpy", "pandas", "pyarrow", "sklearn"):
    sys.modules[name] = None
"""

CORE = """
import asyncio
import tidewal


class Doubling(tidewal.Actor):
    async def on_message(self, message):
        return 2 * message


async def main():
    log = await tidewal.open_wal("rocksmq://./data")
    for name in ("words", "lengths"):
        await log.create_channel(name, tidewal.ChannelPolicy())
    producer = tidewal.MsgStream(log, tidewal.HybridClock())
    producer.as_producer(["words"])
    await producer.produce([tidewal.Record(tidewal.RecordType.ROWS, key=b"sea", body=b"tide")])
    consumer = tidewal.MsgStream(log, tidewal.HybridClock())
    consumer.as_consumer(["words"])
    pack = await anext(consumer)
    print([(record.key, bytes(record.body)) for record in pack.messages])
    await consumer.close()

    member = await log.join("measuring", ["words"])
    delivered = await anext(aiter(member))
    await member.commit([delivered], [tidewal.Append("lengths", b"4") for _ in delivered.entries])
    await member.aclose()
    entries = await anext(log.read("lengths", tidewal.From.EARLIEST))
    print([bytes(entry.payload) for entry in entries])

    async with tidewal.ActorSystem() as system:
        print(await (await system.spawn(Doubling(), name="doubling")).ask(21))
    print(tidewal.CollectionSchema("seas", (tidewal.Field("id", "int64"),), "id").name)
    await log.close()


asyncio.run(main())
"""

NODE = """
import tidewal

for name in ("standalone", "Client"):
    try:
        getattr(tidewal, name)
    except tidewal.errors.Unsupported as error:
        print(error.fields["capability"], error)
"""

ROWS = """
import tidewal.runtime

try:
    tidewal.runtime.encode_rows
except tidewal.errors.Unsupported as error:
    print(error.fields["capability"], error)
"""

HEAVY = ("deltalake", "numpy", "pandas", "pyarrow", "pyspark")
LOADED = f"""
import sys
print([name for name in {("lark", *HEAVY)} if name in sys.modules])
"""

COMMAND = """
import sys
from tidewal.cli.main import main

main(sys.argv[1:])
"""


def run_without_node(code: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_NODE + code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_streams_groups_and_actors_need_no_extra(tmp_path: Path):
    assert run_without_node(CORE, tmp_path).splitlines() == ["[(b'sea', b'tide')]", "[b'4']", "42", "seas"]


def test_the_core_loads_none_of_the_heavy_packages_where_they_are_installed(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-c", CORE + LOADED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["seas", "[]"]


def test_the_core_requires_none_of_them():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    required = set(wheels.closure(map(Requirement, core)))
    assert "rocksdict" in required
    assert not required & set(HEAVY)


def test_a_node_without_its_extra_names_the_command(tmp_path: Path):
    missing = "collections need deltalake, numpy, pyarrow, which are not installed: pip install 'tidewal[node]'"
    assert run_without_node(NODE, tmp_path).splitlines() == [f"node {missing}"] * 2


def test_a_name_that_needs_the_extra_names_the_command(tmp_path: Path):
    missing = "this needs numpy, which is not installed: pip install 'tidewal[node]'"
    assert run_without_node(ROWS, tmp_path).splitlines() == [f"node {missing}"]


def test_an_embedded_log_is_made_written_read_and_checked_without_an_extra(tmp_path: Path):
    def command(*arguments: str) -> str:
        code = [sys.executable, "-c", WITHOUT_NODE + COMMAND, *arguments]
        result = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run_without_node(CORE, tmp_path)
    assert command("send", "data", "words", "wave").startswith("1 messages sent to words")
    assert "wave" in command("tail", "data", "words", "--no-follow")
    assert "measuring" in command("groups", "list", "data")
    assert "intact; " in command("verify", "journal", "data")
    assert command("salvage", "data", "saved")
    assert "intact; " in command("verify", "journal", "saved")


@pytest.mark.parametrize(
    "command", [["insert", "data", "seas", "-"], ["run", "--data", "data"], ["verify", "tables", "data"]]
)
def test_a_command_that_needs_the_extra_names_the_command(tmp_path: Path, command: list[str]):
    code = [sys.executable, "-c", WITHOUT_NODE + COMMAND, *command]
    result = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'tidewal[node]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
