"""What commands write to stderr: the fields of a line, its formats, and how little libraries say."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidewal.cli import logging_setup
from tidewal.cli.logging_setup import LibraryFilter, configure
from tidewal.runtime.actor import Actor, ActorSystem
from tidewal.runtime.errors import Unavailable

OWN = logging.getLogger("tidewal.test")
FOREIGN = logging.getLogger("aiokafka.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("tidewal")
    handlers, levels = list(root.handlers), (root.level, own.level)
    root.handlers.clear()  # pytest's own, at whose level a record would be made
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_of_text_has_time_level_logger_node_role_and_channel(capsys: pytest.CaptureFixture[str]):
    configure("info", "text", node="a-1")
    OWN.warning("it is %s", "late", extra={"role": "proxy", "channel": "doors"})
    OWN.info("plain")
    known, plain = lines(capsys)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(time + " WARN  tidewal.test node=a-1 role=proxy channel=doors: it is late", known)
    assert re.fullmatch(time + " INFO  tidewal.test node=a-1: plain", plain)


def test_what_others_wrote_begins_no_line_of_its_own(capsys: pytest.CaptureFixture[str]):
    configure("info", "text")
    OWN.warning("no channel %s", "a\n2030-01-01T00:00:00.000Z WARN  tidewal.test: forged\x1b[2J")
    (line,) = lines(capsys)
    assert line.endswith(r"no channel a\n2030-01-01T00:00:00.000Z WARN  tidewal.test: forged\x1b[2J")


def test_a_line_of_json_has_the_same_and_is_one_line_with_its_traceback(capsys: pytest.CaptureFixture[str]):
    configure("info", "json", node="a-1")
    try:
        raise ValueError("no\nnumber")
    except ValueError:
        OWN.exception("two\nlines", extra={"channel": "doors"})
    found = [json.loads(line) for line in lines(capsys)]
    assert len(found) == 1
    assert found[0].pop("time").endswith("Z")
    assert "ValueError: no\nnumber" in found[0].pop("traceback")
    assert found == [
        {"level": "error", "logger": "tidewal.test", "node": "a-1", "channel": "doors", "message": "two\nlines"}
    ]


def test_the_level_is_that_of_tidewals_own_lines(capsys: pytest.CaptureFixture[str]):
    configure("debug", "text")
    OWN.debug("own")
    FOREIGN.info("foreign")
    FOREIGN.warning("foreign, grave")
    assert [line.rpartition(": ")[2] for line in lines(capsys)] == ["own", "foreign, grave"]
    configure("fatal", "text")
    OWN.error("own")
    FOREIGN.error("foreign")
    assert lines(capsys) == []


def test_configuring_again_writes_no_line_twice(capsys: pytest.CaptureFixture[str]):
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    for _ in range(3):
        configure("info", "text")
    OWN.info("once")
    assert len(lines(capsys)) == 1
    assert other in logging.getLogger().handlers


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_typed_error_is_one_line_and_a_defect_has_its_traceback(capsys: pytest.CaptureFixture[str], form: str):
    configure("info", form)
    OWN.error("it stops", exc_info=Unavailable("the broker is away"))
    (line,) = lines(capsys)
    assert "it stops: Unavailable: the broker is away" in line
    OWN.error("it stops", exc_info=ZeroDivisionError("by nought"))
    assert "ZeroDivisionError: by nought" in capsys.readouterr().err
    configure("debug", form)
    OWN.error("it stops", exc_info=Unavailable("the broker is away"))
    assert "errors.Unavailable: the broker is away" in capsys.readouterr().err, "debug shows where it came from"


def test_a_librarys_line_appears_once_a_minute_and_says_how_often_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now_s = 1000.0
    monkeypatch.setattr(logging_setup.time, "monotonic", lambda: now_s)
    configure("info", "text")
    for number in range(3):
        FOREIGN.warning("lost %d", number)
        logging.getLogger("pulsar").warning("lost %d", number)
        OWN.warning("own %d", number)
    assert [line.rpartition(": ")[2] for line in lines(capsys)] == ["lost 0", "lost 0", "own 0", "own 1", "own 2"]
    now_s += logging_setup.REPEATED_S
    FOREIGN.warning("lost %d", 5)
    FOREIGN.warning("lost %d", 6)
    (line,) = lines(capsys)
    assert line.endswith("lost 5 (and 2 more such lines)")


def test_what_a_library_repeats_of_a_broker_that_is_away_is_not_written(capsys: pytest.CaptureFixture[str]):
    configure("debug", "text")
    FOREIGN.error('Unable connect to "%s:%s": %s', "127.0.0.1", 1, "refused")
    FOREIGN.error("Unable connect to node with id %s: %s", 0, "refused")
    FOREIGN.error("something else")
    assert [line.rpartition(": ")[2] for line in lines(capsys)] == ["something else"]


def test_the_lines_that_are_remembered_are_bounded():
    kept = LibraryFilter()
    for number in range(3 * logging_setup.TEMPLATES_MAX):
        record = logging.LogRecord("library", logging.WARNING, "", 0, f"line {number}", (), None)
        assert kept.filter(record)
    assert len(kept._written) <= logging_setup.TEMPLATES_MAX


class Crashing(Actor):
    async def on_message(self, message: object) -> object:
        OWN.warning("in the handler")
        await asyncio.gather(asyncio.to_thread(OWN.warning, "in a thread"), self.helper())
        raise Unavailable("away")

    async def helper(self) -> None:
        OWN.warning("in a task")


async def test_the_lines_of_an_actor_and_of_what_it_starts_name_it(capsys: pytest.CaptureFixture[str]):
    configure("info", "json")
    async with ActorSystem() as system:
        ref = await system.spawn(Crashing(), name="proxy")
        ref.tell("go")
        await system.failed
        OWN.warning("outside")
    found = {each["message"]: each.get("role") for each in map(json.loads, lines(capsys))}
    assert found == {
        "in the handler": "proxy",
        "in a thread": "proxy",
        "in a task": "proxy",
        "proxy crashed and gives up: Unavailable: away": "proxy",
        "outside": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("url", ["kafka://127.0.0.1:1/x", "pulsar://127.0.0.1:1?web_url=http://127.0.0.1:1"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_broker_that_is_not_there_is_told_in_one_line_with_its_address(url: str, form: str, tmp_path: object):
    short = f"{url}{'&' if '?' in url else '?'}connect_timeout_s=0.5"
    program = "from tidewal.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "run", "--data", f"{tmp_path}/data", "--wal", short, "--log-format", form],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if "waiting for" not in line]  # said on a busy machine
    (line,) = lines
    told = json.loads(line)["message"] if form == "json" else line
    assert "Unavailable" in told
    assert "127.0.0.1:1" in told


def test_nothing_but_a_command_configures_logging():
    program = """
import logging, asyncio, tempfile, tidewal
async def work():
    with tempfile.TemporaryDirectory() as home:
        async with tidewal.standalone(home) as node, node.client() as client:
            await client.ready()
asyncio.run(work())
assert logging.getLogger().handlers == []
names = [n for n in logging.root.manager.loggerDict if n.partition('.')[0] == 'tidewal']
assert names and all(logging.getLogger(n).level == logging.NOTSET and not logging.getLogger(n).handlers for n in names)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
