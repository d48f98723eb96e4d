"""`tidewal inspect cluster`: what it says of a cluster's nodes and channels, and of what is not as it should be."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.versions import NEW
from tests.commands import Command
from tests.stored_cluster import ALL_ROLES, LIMIT, UNTIL, stored_node
from tidewal.actors.standalone import ROLES
from tidewal.cli.inspect_cluster import ENDED_SHOWN, described
from tidewal.cli.stored_cluster import StoredCluster, cluster_of
from tidewal.runtime.catalog.placement_wishes import PlacementWishes
from tidewal.runtime.clock import physical_ms
from tidewal.runtime.cluster.identity import found_or_check
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.cluster.version import THIS_VERSION
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.testing.memory import MemoryWal

NOW_MS = 1_900_000_000_000
P0, P1, P2 = (Names().pchannel(number) for number in range(3))


def over(directory: Path, work: Callable[[Wal], Awaitable[None]]) -> None:
    async def run() -> None:
        async with await open_wal(f"rocksmq://{directory}") as wal:
            await work(wal)

    asyncio.run(run())


async def a_cluster(wal: Wal) -> None:
    """Two nodes, of which one leads and owns; a third was evicted."""
    async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1", roles=["querynode"]), stored_node(wal, "c-1"):
        await found_or_check(a.log, "production", "s3cret")
        await a.grant(P0)
        await a.grant(P1, fenced=False)
        await a.create(1, P0, P1)
        await a.create(2, P1)
        a.membership.renew()
        await a.log.propose({"kind": "evict", "incarnation": "c-1"})


def inspected(command: Command, directory: Path) -> dict[str, Any]:
    ended = command("inspect", "cluster", directory, "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


def test_a_cluster_that_is_well(command: Command, tmp_path: Path) -> None:
    over(tmp_path, a_cluster)
    told = inspected(command, tmp_path)
    assert told["cluster"] == "production"
    assert told["leader"] == {"node": "a", "incarnation": "a-1", "term": 1}
    a, b = told["members"]
    assert (a["node"], a["incarnation"], a["roles"]) == ("a", "a-1", list(ALL_ROLES))
    assert (a["lease_ms"], a["level"], a["host"], a["address"]) == (3_000, 2, "box", "127.0.0.1:7")
    assert (a["since"], a["report"]) == ("2023-11-14T22:13:20.000Z", {"load": 0.5})
    assert (b["node"], b["roles"], b["report"]) == ("b", ["querynode"], {})
    assert 0 <= a["age_s"] < 60
    assert a["renewed"] >= b["renewed"] > "2024"
    (c,) = told["ended"]
    assert (c["incarnation"], c["how"], c["lease_ms"]) == ("c-1", "evicted", 3_000)
    assert c["time"] > "2024"
    first, second = told["pchannels"]
    assert first == {
        "channel": P0,
        "node": "a",
        "owner": "a-1",
        "term": 1,
        "active": True,
        "limit": LIMIT,
        "until": UNTIL,
        "moves_to": None,
        "pinned_to": None,
        "collections": ["c1"],
    }
    assert (second["channel"], second["active"], second["collections"]) == (P1, False, ["c1", "c2"])
    assert told["balance"] is True
    assert told["level"] == {"present": 2, "held": False, "known": 2, "waits_for": []}
    assert (a["version"], a["min_level"]) == (THIS_VERSION.number, 1)
    assert told["conditions"] == []
    assert "s3cret" not in json.dumps(told)


def test_as_tables(command: Command, tmp_path: Path) -> None:
    over(tmp_path, a_cluster)
    ended = command("inspect", "cluster", tmp_path)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[:2] == ["cluster  production", "level    2"]
    roles, version = r"mixcoord, streamingnode, proxy, datanode, querynode", re.escape(THIS_VERSION.number)
    assert re.search(rf"a +a-1 +- +{roles} +{version} +1 to 2 +3000 +box +127", ended.out)
    assert re.search(r"c-1 +evicted +20", ended.out)
    assert re.search(rf"dml_0 +a +1 +yes +{UNTIL} +- +- +c1", ended.out)
    assert re.search(r"dml_1 +a +1 +no +\S+ +- +- +c1, c2", ended.out)
    assert ended.out.endswith("conditions\n  none\n")


async def told_of(work: Callable[[Wal], Awaitable[None]]) -> tuple[StoredCluster, dict[str, Any]]:
    wal = MemoryWal()
    await work(wal)
    found = await cluster_of(wal, Names())
    return found, described(found, NOW_MS)


async def test_a_channel_without_an_owner_and_one_whose_owner_was_evicted() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1") as b:
            await a.grant(P0, P1)
            await a.create(1, P2)
            released = {P1: (1, LIMIT, b"")}
            await a.catalog.append({"kind": "released", "node": "a-1", "channels": released})
            await b.log.propose({"kind": "evict", "incarnation": "a-1"})

    _, told = await told_of(work)
    assert told["conditions"] == [
        "the leader a-1 is no member (evicted): no node decides until another one leads",
        f"the owner a-1 is no member (evicted), and has: {P0}",
        f"no node owns: {P1}, {P2}",
    ]
    assert told["leader"] == {"node": None, "incarnation": "a-1", "term": 1}
    assert [(each["owner"], each["node"], each["active"]) for each in told["pchannels"]] == [
        ("a-1", None, True),
        (None, None, False),
        (None, None, False),
    ]


async def test_an_upgrade_that_waits_and_one_that_is_held() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1", version=NEW):
            await a.grant(P0)

    async def held(wal: Wal) -> None:
        async with stored_node(wal, "b-1", version=NEW) as b:
            await b.grant(P0)
            await b.log.propose({"kind": "hold", "held": True})

    _, told = await told_of(work)
    old = THIS_VERSION.number
    assert told["level"] == {"present": 2, "held": False, "known": 3, "waits_for": [f"a ({old}, which knows 1 to 2)"]}
    assert [(each["version"], each["min_level"], each["level"]) for each in told["members"]] == [
        (old, 1, 2),
        (NEW.number, 1, 3),
    ]
    assert told["conditions"] == [
        f"members have 2 versions of Tidewal: {old}: a; {NEW.number}: b",
        f"the feature level is 2; it rises to 3 once these are upgraded or have ended: a ({old}, which knows 1 to 2)",
    ]
    _, told = await told_of(held)
    assert told["conditions"] == [
        "the feature level is held at 1, and all members know 3: `tidewal level URL raise` lets it rise"
    ]


async def test_what_operators_want_and_what_moves() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1"):
            await a.grant(P0, P1)
            wishes = PlacementWishes(balance=False).with_node("b", "cordoned").with_pin(P1, "c")
            await a.catalog.append({"kind": "place", "wishes": wishes.to_wire()})
            await a.catalog.append({"kind": "move", "channels": {P0: (1, "b-1")}, "at_ms": 7})

    _, told = await told_of(work)
    assert told["balance"] is False
    assert [each["state"] for each in told["members"]] == [None, "cordoned"]
    assert [(each["moves_to"], each["pinned_to"]) for each in told["pchannels"]] == [("b", None), (None, "c")]
    assert told["conditions"] == [f"{P1} is pinned to c, which is no member"]


@pytest.mark.parametrize(("ahead_s", "said"), [(600, "600 s ahead of"), (-600, "600 s behind"), (5, "")])
async def test_a_clock_that_is_far_from_the_others(ahead_s: int, said: str) -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1") as b:
            await a.grant(P0)
            for number, (node, clock_ms) in enumerate(((a, NOW_MS), (b, NOW_MS + 1000 * ahead_s)), 7):
                report = {"clock_ms": clock_ms}
                name = node.membership.member.incarnation
                await a.log.propose({"kind": "renew", "incarnation": name, "number": number, "report": report})

    _, told = await told_of(work)
    assert told["conditions"] == [f"the clock of b is {said} the others': set it, or use NTP"] * bool(said)


async def test_tables_that_a_node_cannot_read() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            await a.grant(P0)
            report = {"unreadable": ["orders", "people"]}
            await a.log.propose({"kind": "renew", "incarnation": "a-1", "number": 7, "report": report})

    _, told = await told_of(work)
    assert told["conditions"] == ["a cannot read or write the tables of: orders, people; `tidewal status` says why"]


async def test_limits_that_slow_writes_down_and_refuse_them() -> None:
    refused = {"limit": "queryNode.memoryLimitBytes", "value": 97, "low": 85, "high": 95, "factor": 0.0, "node": "q"}
    slowed = {"limit": "later.limit", "value": 9, "low": 8, "high": 10, "factor": 0.5, "collection": "people"}
    some = {**refused, "collections": 3}
    throttled = [refused, slowed, some, "of a later version", {}]

    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            await a.grant(P0)
            report = {"throttled": throttled}
            await a.log.propose({"kind": "renew", "incarnation": "a-1", "number": 7, "report": report})

    _, told = await told_of(work)
    assert told["conditions"][:3] == [
        "at a all writes are refused: 97 bytes are used of queryNode.memoryLimitBytes at q, until fewer than 85 are; "
        "deletes pass",
        "at a writes to people are slowed down to 0.5 of the full rate: 9 bytes are used of later.limit, "
        "at 10 they are refused",
        "at a writes to the collections of q are refused: 97 bytes are used of queryNode.memoryLimitBytes at q, until "
        "fewer than 85 are; deletes pass",
    ]
    assert len(told["conditions"]) == 4, "what cannot be read is no reason to end"


async def test_addresses_that_a_node_cannot_reach() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            await a.grant(P0)
            report = {"unreachable": {"b": "b.example:7400: connection refused"}}
            await a.log.propose({"kind": "renew", "incarnation": "a-1", "number": 7, "report": report})

    _, told = await told_of(work)
    why = "b.example:7400: connection refused"
    assert told["conditions"] == [f"a cannot connect to b at {why}; its requests to it go through the log"]


async def test_no_leader_two_of_one_name_and_a_role_that_no_member_offers() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1", roles=ROLE_NAMES[:3]), stored_node(wal, "a-2", roles=ROLE_NAMES[2:4]):
            pass

    _, told = await told_of(work)
    assert told["cluster"] is None
    assert told["leader"] is None
    assert told["conditions"] == [
        "no node leads: none has claimed leadership in this log",
        "2 members are named a: a-1, a-2; one hangs, or two nodes have one name",
        "no member offers the role querynode",
    ]


async def test_how_those_ended_that_are_no_members_any_more() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1"), stored_node(wal, "a-2", replaces="a-1") as again:
            await again.membership.leave()

    _, told = await told_of(work)
    assert [(each["incarnation"], each["how"]) for each in told["ended"]] == [("a-2", "left"), ("a-1", "replaced")]
    assert all(each["time"] > "2024" for each in told["ended"])
    assert told["conditions"] == [
        "no node leads: none has claimed leadership in this log",
        "the cluster has no members",
    ]


async def test_of_what_only_a_snapshot_tells_the_time_is_unknown() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1") as b, stored_node(wal, "c-1"):
            await a.log.propose({"kind": "evict", "incarnation": "c-1"})
            await a.log.snapshot()
            b.membership.renew()
            await b.log.catch_up()

    found, told = await told_of(work)
    a, b = told["members"]
    assert (a["renewed"], a["age_s"]) == (None, None)
    assert b["age_s"] == pytest.approx((1_900_000_000_000 - physical_ms(found.heard["b-1"])) / 1000, abs=0.1)
    assert [each["time"] for each in told["ended"]] == [None]


async def test_a_report_of_any_types_is_shown() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            report = {"id": b"\x01", 7: [1.5, float("nan"), None, True], "of": {b"k": {"x": 1}}}
            await a.log.propose({"kind": "renew", "incarnation": "a-1", "number": 9, "report": report})

    _, told = await told_of(work)
    shown = {"id": "01", "7": [1.5, "nan", None, True], "of": {"b'k'": {"x": 1}}}
    assert told["members"][0]["report"] == shown
    assert json.loads(json.dumps(told, allow_nan=False))["members"][0]["report"] == shown


def test_a_name_of_others_commands_no_terminal_and_the_oldest_ends_are_counted(
    command: Command, tmp_path: Path
) -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            await found_or_check(a.log, "red\x1b[31m", "")
            for number in range(ENDED_SHOWN + 2):
                async with stored_node(wal, f"x\x1b[31m-{number:02}") as ended:
                    await ended.membership.leave()
            async with stored_node(wal, "x\x1b[31m-a"), stored_node(wal, "x\x1b[31m-b"):
                pass

    over(tmp_path, work)
    out = command("inspect", "cluster", tmp_path).out
    assert "\x1b" not in out
    assert "and 2 before" in out
    assert f"-{ENDED_SHOWN + 1:02} " in out, "the last ones are shown"
    assert len(inspected(command, tmp_path)["ended"]) == ENDED_SHOWN + 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_log_without_a_cluster(command: Command, tmp_path: Path, options: tuple[str, ...]) -> None:
    over(tmp_path, lambda wal: wal.create_channel("orders", ChannelPolicy()))
    ended = command("inspect", "cluster", tmp_path, *options)
    assert ended.status == 2
    assert "there is no cluster in this log" in ended.err
    assert ended.out == ""


def test_a_prefix_of_another_cluster(command: Command, tmp_path: Path) -> None:
    over(tmp_path, a_cluster)
    ended = command("inspect", "cluster", tmp_path, "--prefix", "other")
    assert ended.status == 2
    assert "other-cluster" in ended.err


def test_looking_writes_nothing(command: Command, tmp_path: Path) -> None:
    over(tmp_path, a_cluster)
    before = json.loads(command("inspect", tmp_path, "--json").out)["channels"]
    inspected(command, tmp_path)
    assert json.loads(command("inspect", tmp_path, "--json").out)["channels"] == before


def test_a_log_is_still_inspected_without_a_name(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    over(tmp_path / "cluster", lambda wal: wal.create_channel("orders", ChannelPolicy()))
    monkeypatch.chdir(tmp_path)
    for arguments in (("./cluster",), ("--no-count", "./cluster"), ("content", "./cluster")):
        ended = command("inspect", *arguments, "--json")
        assert ended.status == 0, ended.err
        assert [each["name"] for each in json.loads(ended.out)["channels"]] == ["orders"]
    assert "Missing argument" in command("inspect").err
    assert "cluster" in command("inspect", "--help").out


def test_the_roles_are_those_of_nodes() -> None:
    assert tuple(role.role for role in ROLES) == ROLE_NAMES


async def test_which_query_nodes_are_to_have_which_vchannels() -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a, stored_node(wal, "b-1"):
            await a.grant(P0, P1)
            for id in (1, 2, 3):
                await a.create(id, P0)
            await a.catalog.append({"kind": "load", "id": 2, "replicas": 3})
            await a.catalog.append({"kind": "load", "id": 3, "replicas": 0})

    _, told = await told_of(work)
    has = {each["collection"]: (each["replicas"], sorted(each["querynodes"])) for each in told["replicas"]}
    assert has == {"c1": (2, ["a", "b"]), "c2": (3, ["a", "b"]), "c3": (0, [])}
    assert "c2 is to have 3 replicas, and there are 2 QueryNodes" in told["conditions"]
    assert [each["ready"] for each in told["replicas"]] == [[], [], []], "nobody has said anything"


@pytest.mark.parametrize(
    ("ready", "waiting", "named", "state", "ends"),
    [
        (1, 0, {}, "ready", ""),
        (0, 1, {"V": [1_700_000_000_000, "loading"]}, "loading", "not yet: V (loading since 2023-11-14T22:13:20.000Z)"),
        (7, 3, {"v": [0, "CorruptLog"]}, "unknown", "not yet: v (CorruptLog since -), and 2 more"),
        (7, 1, {"v": [0, "CorruptLog"]}, "ready", "not yet: v (CorruptLog since -)"),
        (1, "0", {}, "unknown", ""),
        (1, 1, {"v": 5}, "unknown", ""),
    ],
)
async def test_what_query_nodes_can_be_asked_for(
    ready: int, waiting: object, named: dict[str, object], state: str, ends: str
) -> None:
    async def work(wal: Wal) -> None:
        async with stored_node(wal, "a-1") as a:
            await a.grant(P0)
            await a.create(1, P0)
            [vchannel] = a.catalog.catalog.collections["c1"].vchannels
            said = {vchannel if name == "V" else name: why for name, why in named.items()}
            rows = {"ready": ready, "waiting": waiting, "since_ms": 1_700_000_000_000, "vchannels": said}
            await a.log.propose({"kind": "renew", "incarnation": "a-1", "number": 7, "report": {"rows": rows}})

    _, told = await told_of(work)
    [replica] = told["replicas"]
    assert (replica["states"][0]["state"], replica["ready"]) == (state, ["a"] if state == "ready" else [])
    [found, *_] = [*(each for each in told["conditions"] if "vchannels ready" in each), ""]
    assert found == (f"a has {ready} vchannels ready, and {ends.replace('V', replica['vchannel'])}" if ends else "")
    rows = told["members"][0]["rows"]
    assert rows is None or rows == {"ready": ready, "waiting": waiting, "since": "2023-11-14T22:13:20.000Z"}
    assert (rows is None) == (state == "unknown" and not ends)
