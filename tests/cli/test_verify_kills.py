"""`tidewal verify kills`: processes that are killed lose nothing, and what it says where something is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from tests.commands import Command, Start
from tests.kill_demo import descendants, still_there
from tests.turns import cases_in_turn
from tidewal.actors.client import Client
from tidewal.cli.kills import kill_run
from tidewal.cli.kills.checked_client import read_keys
from tidewal.cli.kills.final_state import FinalState, read_final_state
from tidewal.cli.kills.topic_work import TopicWork
from tidewal.cli.main import FAILED
from tidewal.cli.verify_kills import VIOLATED
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.signals import INTERRUPTED
from tidewal.runtime.tables.object_options import client_of, storage_options
from tidewal.runtime.tables.table_store import TableStore
from tidewal.runtime.testing.histories import history_checks
from tidewal.runtime.testing.histories.client_history import ClientCall

BOUND_S = 300.0
MESSAGE_COUNTS = ("messages", "messages_later", "messages_cancelled", "messages_copied", "transactions")


def verdict_of(ended: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = ended.communicate(timeout=BOUND_S)
    assert ended.returncode == 0, out
    return json.loads(out.splitlines()[-1])


async def left_in(url: str) -> tuple[list[str], list[str]]:
    """Channels and groups that are there."""
    async with await open_wal(url, read_only=True) as wal:
        return await wal.channels(), [group.name for group in await wal.groups()]


@pytest.mark.kills
def test_processes_of_one_machine_are_killed(start: Start, tmp_path: Path, seed: int) -> None:
    home = tmp_path / "run"
    verdict = verdict_of(start("verify", "kills", "--kills", 10, "--seed", seed, "--data", home, "--json"))
    assert verdict["held"]
    assert sum(verdict["faults"].values()) == 10
    assert verdict["acknowledged"] > 100
    assert verdict["reads"] > 100


@pytest.mark.kills
@pytest.mark.in_turn(0, 2)
def test_processes_that_serve_topics_are_killed(start: Start, tmp_path: Path, seed: int) -> None:
    of_run = ["--topics", "--kills", 5, "--seed", seed, "--data", tmp_path / "run"]
    verdict = verdict_of(start("verify", "kills", *of_run, "--json"))
    assert verdict["held"]
    assert sum(verdict["faults"].values()) == 5
    assert min(verdict[kind] for kind in MESSAGE_COUNTS) > 0


@pytest.mark.kills
@pytest.mark.in_turn(1, 2)
def test_processes_with_tables_in_a_bucket_are_killed(start: Start, bucket: str, seed: int) -> None:
    tables = f"{bucket}/below"
    verdict = verdict_of(start("verify", "kills", "--kills", 5, "--seed", seed, "--tables", tables, "--json"))
    assert verdict["held"]
    assert verdict["flushes"] > 0
    [left] = [each["path"] for page in client_of(bucket, storage_options(bucket)).list() for each in page]
    assert left.endswith("/.store"), "nothing but the id of the tables, which are removed"


@pytest.mark.kills
@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.parametrize("broker_url", cases_in_turn(("kafka", "pulsar")), indirect=True)
def test_nodes_on_brokers_are_killed_beside_spark(start: Start, broker_url: str, seed: int) -> None:
    of_run = ["--log", broker_url, "--kills", 10, "--seed", seed]
    verdict = verdict_of(start("verify", "kills", *of_run, "--spark", "--json"))
    assert verdict["held"]
    assert sum(verdict["faults"].values()) == 10
    assert verdict["acknowledged"] > 100
    assert asyncio.run(left_in(broker_url)) == ([], [])


@pytest.mark.slow
def test_a_row_that_is_lost_is_found_and_all_is_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_less(client: Client, tables: TableStore, owners: Sequence[str]) -> FinalState:
        found = await read_final_state(client, tables, owners)
        return replace(found, ids=found.ids[1:])

    monkeypatch.setattr(kill_run, "read_final_state", one_less)
    status, out, err = command("verify", "kills", "--minutes", "0", "--data", tmp_path / "run")
    assert status == VIOLATED
    assert "a strong read: row 0 was acknowledged and is lost" in out
    assert f"see {tmp_path / 'run'}" in out
    assert "violated; 0 faults" in out
    assert "seed " in err
    assert (tmp_path / "run" / "client-1.jsonl").exists()


@pytest.mark.slow
def test_a_message_that_was_copied_twice_is_found(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = TopicWork._copies

    async def one_more(work: TopicWork) -> history_checks.Content:
        found = await reading(work)
        return [*found, *found[:1]]

    monkeypatch.setattr(TopicWork, "_copies", one_more)
    monkeypatch.setattr(kill_run, "SETTLED_WITHIN_S", 5.0)
    status, out, _ = command("verify", "kills", "--topics", "--minutes", "0", "--data", tmp_path / "run")
    assert status == VIOLATED
    assert "is there 1 times too often" in out
    assert "transactions; " in out


async def test_a_key_that_a_strong_read_has_twice_is_found() -> None:
    class Doubled:
        async def query(self, *_: object, **__: object) -> SimpleNamespace:
            return SimpleNamespace(table=pa.table({"id": ["a/k", "a/l", "a/k"], "version": [1, 1, 2]}))

    rows = await read_keys(cast("Client", Doubled()), "a", "strong", 1.0)
    calls = [
        ClientCall("a", "set", {"values": {"a/k": 1, "a/l": 1}}, 1, 2, "ok"),
        ClientCall("a", "set", {"values": {"a/k": 2}}, 3, 4, "ok"),
        ClientCall("b", "read", {"owner": "a", "consistency": "strong"}, 5, 6, "ok", {"rows": rows}),
    ]
    [found] = history_checks.keys(calls)
    assert "says a/k is [1, 2]" in found


@pytest.mark.slow
def test_ctrl_c_ends_all_that_it_has_started(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = start("verify", "kills", "--seed", "1")
    assert run.stdout is not None
    assert any(" is " in line for line in run.stdout), "no fault has happened"
    assert list(tmp_path.glob("tidewal-kills-*"))
    started = descendants(run.pid)
    assert started
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=BOUND_S)
    assert run.returncode == INTERRUPTED
    assert still_there(started) == set()
    assert list(tmp_path.glob("tidewal-kills-*")) == []


def test_a_directory_that_is_not_empty_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _, err = command("verify", "kills", "--data", tmp_path)
    assert status == FAILED
    assert "is not empty" in err
