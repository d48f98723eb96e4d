"""An operator: run it, see that it is well, have it scraped, kill it, and know that nothing is lost."""

from __future__ import annotations

import json
import re
import signal
import socket

import pytest

from tests.first_hour.stranger import Stranger

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.in_turn(2, 3)]

ROWS = 25_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(page: str, metric: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", page, re.MULTILINE))


def test_a_node_is_watched_killed_and_whole(stranger: Stranger) -> None:
    stranger.reads("README.md", "Tidewal", "Run it")
    stranger.installs("'tidewal[node]'")
    assert "missing" not in stranger.types("tidewal doctor")
    port = free_port()
    node = f"tidewal run --data data --metrics-port {port}"
    first = stranger.starts(node)
    first.until("running")
    assert "healthy" in stranger.types("tidewal status data/log")
    assert json.loads(stranger.types(f"curl --silent --fail http://127.0.0.1:{port}/healthz"))["ok"]

    stranger.reads("docs/cli.md", "Collections", "Status")
    stranger.types("tidewal create data/log events --field id:int64 --field text:varchar --primary-key id")
    rows = "".join(f'{{"id": {number}, "text": "event {number}"}}\n' for number in range(ROWS))
    stranger.writes("events.jsonl", rows, typed=False)
    assert f"{ROWS:,}" in stranger.types("tidewal insert data/log events events.jsonl")
    page = stranger.types(f"curl --silent --fail http://127.0.0.1:{port}/metrics")
    assert scraped(page, "tidewal_proxy_insert_vectors_total") == ROWS
    assert scraped(page, "tidewal_wal_dead_letter_message_total") == 0

    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert "start one with `tidewal run`" in stranger.types("tidewal status data/log", status=1)
    stranger.reads("docs/rocksmq.md", "What happens on opening", "Tools")
    assert "intact" in stranger.types("tidewal verify journal data/log")
    stranger.types("tidewal verify tables data/tables")

    second = stranger.starts(node)
    second.until("running")
    assert stranger.types("tidewal query data/log events --count").strip() == str(ROWS)
    shown = json.loads(stranger.types("tidewal status data/log --json"))
    assert shown["healthy"]
    assert [each["rows"] for each in shown["node"]["collections"]] == [ROWS]
    stranger.types("tidewal compact data/log events")
    assert second.end() == 0
    assert "drained" in second.printed()
    assert "intact" in stranger.types("tidewal verify journal data/log")
    checked = stranger.types("tidewal verify tables data/tables")
    assert "intact" in checked
    assert f"{2 * ROWS:,} rows" in checked  # of `log` and of `current`
