"""Processes that end for certain; no broker needed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import BrokerFailed, Process, free_ports, listening_child

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = 60.0
SLEEPER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]


@pytest.fixture
def sleeper(tmp_path: Path):
    process = Process(SLEEPER, tmp_path / "log")
    process.start()
    process.until(lambda: "up" in process.log.read_text(), GONE_WITHIN_S, "up")
    yield process
    process.kill()


def test_a_killed_process_is_gone_and_can_be_started_again(sleeper: Process):
    first = sleeper.pid
    sleeper.kill()
    assert not sleeper.running
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    sleeper.start()
    assert sleeper.running
    assert sleeper.pid != first


def test_a_paused_process_is_stopped_and_killed_all_the_same(sleeper: Process):
    sleeper.pause()
    assert sleeper.paused
    sleeper.stop(GONE_WITHIN_S)
    assert not sleeper.running
    sleeper.start()
    sleeper.pause()
    sleeper.kill()
    assert not sleeper.running


def test_a_process_that_ends_early_or_is_never_ready_is_an_error_with_its_log(tmp_path: Path):
    broken = Process([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log")
    broken.start()
    with pytest.raises(BrokerFailed, match=r"(?s)ended before ready.*no such thing"):
        broken.until(lambda: False, GONE_WITHIN_S, "ready")
    absent = Process([str(tmp_path / "nothing")], tmp_path / "log")
    with pytest.raises(BrokerFailed, match="cannot be started"):
        absent.start()
    absent.kill()


def test_never_ready_is_an_error_too(sleeper: Process):
    with pytest.raises(BrokerFailed, match="not ready within 0 s"):
        sleeper.until(lambda: False, 0, "ready")


@pytest.mark.parametrize("victim", ["tests", "guard"])
def test_a_broker_dies_with_whoever_started_it(tmp_path: Path, victim: str):
    """The tests are killed with SIGKILL, or the guard between them and the broker is."""
    program = f"""
import os, sys
from pathlib import Path
from tests.brokers.processes import Process
process = Process({SLEEPER!r}, Path({str(tmp_path / "log")!r}))
process.start()
print(process.pid, process._guard.pid, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as tests:
        broker, guard = (int(word) for word in tests.stdout.readline().split())
        watched = os.pidfd_open(broker)
        try:
            os.kill(tests.pid if victim == "tests" else guard, signal.SIGKILL)
            assert_gone(watched)
        finally:
            os.close(watched)
            tests.kill()


def assert_gone(watched: int) -> None:
    readable, _, _ = select.select([watched], [], [], GONE_WITHIN_S)
    assert readable, "the broker lives on"


def test_free_ports_are_free_and_below_those_of_outgoing_connections():
    ports = free_ports(10)
    assert len(set(ports)) == 10
    assert all(10_000 <= port < 32_768 for port in ports)


def test_a_child_is_found_by_the_port_where_it_listens():
    (port,) = free_ports(1)
    listen = f"server = socket.create_server(('127.0.0.1', {port}))"
    program = f"import socket, sys; {listen}; print(flush=True); sys.stdin.read()"
    assert listening_child(port) is None
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        child.stdout.readline()
        assert listening_child(port) == child.pid
        child.stdin.close()
    assert listening_child(port) is None
