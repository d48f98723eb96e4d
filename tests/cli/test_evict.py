"""`tidewal evict`: it ends the lease of the member that is meant, and of no other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tests.stored_cluster import stored_node
from tidewal.cli.evict import evict_node
from tidewal.runtime.cluster.state import EVICTED
from tidewal.runtime.errors import ChannelNotFound, InvalidRequest, PreconditionFailed
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.testing.memory import MemoryWal

NAMES = Names()
BOUND_S = 20.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The directory of a log with a cluster: the node `alpha`, and two processes that are named `beta`."""

    async def fill() -> None:
        async with (
            await open_wal(f"rocksmq://{tmp_path}") as wal,
            stored_node(wal, "alpha-1", lease_ms=5_000),
            stored_node(wal, "beta-1"),
            stored_node(wal, "beta-2"),
        ):
            pass

    asyncio.run(fill())
    return tmp_path


def cluster(command: Command, log: Path) -> dict[str, Any]:
    return json.loads(command("inspect", "cluster", log, "--json").out)


def members(command: Command, log: Path) -> list[str]:
    return [each["incarnation"] for each in cluster(command, log)["members"]]


@pytest.mark.parametrize(("node", "left"), [("alpha", ["beta-1", "beta-2"]), ("beta-1", ["alpha-1", "beta-2"])])
def test_a_name_and_an_incarnation_name_a_member(command: Command, log: Path, node: str, left: list[str]) -> None:
    ended = command("evict", log, node, "--json")
    assert ended.status == 0, ended.err
    evicted = json.loads(ended.out)["incarnation"]
    assert members(command, log) == left
    assert [(each["incarnation"], each["how"]) for each in cluster(command, log)["ended"]] == [(evicted, EVICTED)]


def test_it_says_what_follows(command: Command, log: Path) -> None:
    shown = command("evict", log, "alpha").out
    assert shown.startswith("alpha-1 is evicted. It may rely on its lease for 5000 ms more: ")
    assert "once 5500 ms have passed" in shown
    told = json.loads(command("evict", log, "beta-2", "--json").out)
    assert told["evicted"] is True
    assert (told["node"], told["incarnation"]) == ("beta", "beta-2")
    assert (told["lease_ms"], told["granted_after_ms"]) == (3_000, 3_300)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("beta", "2 members are named 'beta': give the incarnation of the one that is meant: beta-1, beta-2"),
        ("alhpa", "no member 'alhpa'; the nearest known one is 'alpha'"),
        ("zzz", "no member 'zzz'; `tidewal inspect cluster` shows all"),
    ],
)
def test_who_is_not_meant_for_certain_is_not_evicted(command: Command, log: Path, node: str, said: str) -> None:
    ended = command("evict", log, node)
    assert ended.status == 2
    assert said in ended.err
    assert members(command, log) == ["alpha-1", "beta-1", "beta-2"]


def test_one_that_ended_before_is_told_so(command: Command, log: Path) -> None:
    assert command("evict", log, "alpha").status == 0
    ended = command("evict", log, "alpha-1")
    assert ended.status == 2
    assert "alpha-1 is no member any more: evicted" in ended.err


def test_a_log_without_a_cluster_gets_none(command: Command, tmp_path: Path) -> None:
    async def fill() -> None:
        async with await open_wal(f"rocksmq://{tmp_path}") as wal:
            await wal.create_channel("orders", ChannelPolicy())

    asyncio.run(fill())
    ended = command("evict", tmp_path, "alpha")
    assert ended.status == 2
    assert "there is no cluster in this log" in ended.err
    channels = json.loads(command("inspect", tmp_path, "--json").out)["channels"]
    assert [each["name"] for each in channels] == ["orders"]


async def test_the_process_learns_of_it_and_comes_back_as_a_new_incarnation_only() -> None:
    wal = MemoryWal()
    async with stored_node(wal, "alpha-1") as alpha, stored_node(wal, "beta-1") as beta:
        assert (await evict_node(wal, NAMES, "alpha")).incarnation == "alpha-1"
        async with asyncio.timeout(BOUND_S):
            await alpha.membership.until_fenced()
        assert not alpha.membership.holds()
        alpha.membership.renew()
        async with stored_node(wal, "alpha-2") as again:
            assert again.membership.fenced is None
            assert set(again.log.cluster.members) == {"alpha-2", "beta-1"}
            assert beta.membership.fenced is None
            assert (await evict_node(wal, NAMES, "alpha")).incarnation == "alpha-2", "it has the name now"


async def test_of_two_evictions_at_once_one_counts() -> None:
    wal = MemoryWal()
    async with stored_node(wal, "alpha-1"):
        results = await asyncio.gather(*(evict_node(wal, NAMES, "alpha") for _ in range(2)), return_exceptions=True)
    refused = [each for each in results if isinstance(each, BaseException)]
    assert len(refused) == 1
    assert isinstance(refused[0], PreconditionFailed | InvalidRequest)


async def test_an_incarnation_comes_before_a_name() -> None:
    """Two have the name `alpha`, which is also the incarnation of one of them."""
    wal = MemoryWal()
    async with stored_node(wal, "alpha"), stored_node(wal, "alpha-1"):
        assert (await evict_node(wal, NAMES, "alpha")).incarnation == "alpha"


async def test_without_the_channel_nothing_is_made() -> None:
    wal = MemoryWal()
    with pytest.raises(ChannelNotFound):
        await evict_node(wal, NAMES, "alpha")
    assert await wal.channels() == []
