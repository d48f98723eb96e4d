"""A broker that several processes of a run share: started once, ended behind its last user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

USER = """
import sys
from pathlib import Path
from tests.brokers.sharing import SharedBroker

class Broker:
    def stop(self):
        print("stopped", flush=True)

def start():
    print("started", flush=True)
    return Broker(), {"url": "here"}

brokers = []
for name in sys.argv[2].split(","):
    brokers.append(SharedBroker(Path(sys.argv[1]), name))
    print(brokers[-1].join(start)["url"], flush=True)
    sys.stdin.readline()
for broker in brokers:
    broker.leave(failed=len(sys.argv) > 3)
for broker in brokers:
    print("failed" if broker.end() else "passed", flush=True)
"""


class User:
    """A process that uses brokers, each until it is told to go on: to the next, or to leave all."""

    def __init__(self, folder: Path, names: str, *failed: str) -> None:
        command = [sys.executable, "-c", USER, str(folder), names, *failed]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path):
    users = []

    def start_one(names: str = "kafka", *failed: str) -> User:
        users.append(User(tmp_path, names, *failed))
        return users[-1]

    yield start_one
    for user in users:
        user.end()


def test_the_first_process_starts_the_broker_and_stops_it_behind_the_others(start):
    first = start()
    assert [first.line(), first.line()] == ["started", "here"]
    second = start("kafka", "failed")
    assert second.line() == "here"
    first.go_on()
    third = start()
    assert third.line() == "here"
    second.go_on()
    assert second.line() == "failed"
    third.go_on()
    assert third.line() == "failed"
    assert [first.line(), first.line()] == ["stopped", "failed"]


def test_a_process_that_comes_when_the_broker_has_ended_starts_another(start):
    first = start()
    assert [first.line(), first.line()] == ["started", "here"]
    first.go_on()
    assert [first.line(), first.line()] == ["stopped", "passed"]
    second = start()
    assert [second.line(), second.line()] == ["started", "here"]
    second.go_on()
    assert second.line() == "stopped"


def test_a_process_that_is_killed_is_not_waited_for(start):
    first = start()
    assert [first.line(), first.line()] == ["started", "here"]
    second = start()
    assert second.line() == "here"
    second.end()
    first.go_on()
    assert first.line() == "stopped"


def test_processes_that_use_each_others_brokers_do_not_wait_for_each_other(start):
    first, second = start("kafka,pulsar"), start("pulsar,kafka")
    for user in (first, second):
        assert [user.line(), user.line()] == ["started", "here"]
    for user in (first, second):
        user.go_on()
        assert user.line() == "here"
    for user in (first, second):
        user.go_on()
    for user in (first, second):
        assert sorted(user.line() for _ in range(3)) == ["passed", "passed", "stopped"]
