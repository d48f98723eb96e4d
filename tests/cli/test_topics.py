"""`tidewal topics`, over a node that runs as a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Command, as_processes, said

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the log of a node."""
    home = tmp_path_factory.mktemp("node")
    with as_processes("-m", "tidewal", cwd=home) as start:
        process = start("run", "--data", home / "data", "--json", "--log-level", "warn")
        yield said(process)["wal"]


def test_a_topic_is_created_shown_written_read_and_dropped(command: Command, log: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert command("topics", "create", log, "orders", "--partitions", 3).out == "orders is there: 3 partitions\n"
    other = command("topics", "create", log, "orders", "--partitions", 3, "--keep")
    assert (other.status, "TopicExists" in other.err) == (2, True)
    (found,) = json.loads(command("topics", "list", log, "--json").out)
    assert (found["topic"], found["retention_s"], len(found["partitions"])) == ("orders", 14 * 24 * 3600.0, 3)
    assert found["partitions"]["2"] in command("topics", "describe", log, "orders").out
    sent = json.loads(command("topics", "send", log, "orders", "a", "b", "--key", "k", "--tag", "t=1", "--json").out)
    assert (sent["topic"], sent["messages"]) == ("orders", 2)
    ended = command("topics", "tail", log, "orders", "--no-follow", "--json")
    tailed = [json.loads(line) for line in ended.out.splitlines()]
    assert [(each["value"], each["key"], each["tags"]["t"]) for each in tailed] == [("a", "k", "1"), ("b", "k", "1")]
    assert {each["ts"] for each in tailed} == {sent["ts"]}
    beside = [json.loads(line) for line in command("tail", log, "orders", "--no-follow", "--json").out.splitlines()]
    assert beside == tailed
    filtered = command("topics", "tail", log, "orders", "--no-follow", "--json", "--where", '_key == "k" and t == "2"')
    assert filtered.out == ""
    for _ in range(2):
        assert command("topics", "alter", log, "orders", "--partitions", 6).out == "orders has 6 partitions\n"
    after = json.loads(command("topics", "describe", log, "orders", "--json").out)
    assert (after["epoch"], len(after["partitions"])) == (2, 6)
    assert set(after["partitions"].values()).isdisjoint(found["partitions"].values())
    command("topics", "send", log, "orders", "c", "--key", "k")
    kept = command("topics", "tail", log, "orders", "--no-follow", "--json").out.splitlines()
    assert [json.loads(line)["value"] for line in kept] == ["a", "b", "c"]
    unsure = command("topics", "drop", log, "orders")
    assert (unsure.status, "--yes" in unsure.err) == (2, True)
    assert command("topics", "drop", log, "orders", "--yes").status == 0
    assert command("topics", "list", log).out == "none\n"


def test_a_message_is_delivered_later_or_cancelled(command: Command, log: str) -> None:
    command("topics", "create", log, "later", "--partitions", 1)
    for times in (("--deliver-after", "5 minutes"), ("--deliver-at", "tomorrow")):
        ended = command("topics", "send", log, "later", "x", *times)
        assert (ended.status, "InvalidRequest" in ended.err) == (2, True), ended.err
    sent = json.loads(command("topics", "send", log, "later", "a", "--deliver-after", "2h", "--json").out)
    shown = command("topics", "send", log, "later", "b", "--deliver-at", "2020-01-31T12:00:00").out.splitlines()
    assert command("topics", "cancel", log, "later", sent["ids"][0]).out == "cancelled: it is not delivered\n"
    late = command("topics", "cancel", log, "later", shown[0], "--json")
    assert (late.status, json.loads(late.out)["cancelled"]) == (1, False)
    tailed = json.loads(command("topics", "tail", log, "later", "--limit", 1, "--json").out)
    assert tailed["value"] == "b"


@pytest.mark.parametrize(
    "arguments",
    [("describe",), ("alter", "--partitions", "2"), ("drop", "--yes"), ("send", "x"), ("tail", "--no-follow")],
)
def test_a_topic_that_is_not_there_is_an_error_that_says_so(command: Command, log: str, arguments: tuple[str]) -> None:
    ended = command("topics", arguments[0], log, "missing", *arguments[1:])
    assert (ended.status, "TopicNotFound" in ended.err) == (2, True), ended.err


def test_what_an_owner_alone_may_write_send_refuses(command: Command, log: str) -> None:
    command("topics", "create", log, "mine", "--partitions", 1)
    (found,) = [each for each in json.loads(command("topics", "list", log, "--json").out) if each["topic"] == "mine"]
    ended = command("send", log, found["partitions"]["0"], "x")
    assert (ended.status, "InvalidRequest" in ended.err) == (2, True)
