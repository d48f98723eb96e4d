"""A log that several nodes write to is migrated while they run: nodes and clients go on with the new one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.nodes import Traffic
from tests.actors.shared_logs import NEW, OLD, SharedNodes
from tests.actors.test_online_migration import KEYS, Reader, send_all, until_done
from tidewal.actors.cluster_member import ClusterMember
from tidewal.actors.followed_log import FollowedLog
from tidewal.actors.proxy.proxy import Proxy
from tidewal.actors.shared_log_migration import SWITCHING, SharedLogMigration
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import Fenced, Moved, Unavailable
from tidewal.runtime.groups.local_coordinator_client import LocalCoordinatorClient
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.log.following import FollowingWal
from tidewal.runtime.log.migration_state import (
    MIGRATION_CHANNEL,
    MigrationPhase,
    MigrationState,
    change_migration_state,
    migration_state,
)
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.migration.group_positions import SESSION_S
from tidewal.runtime.migration.lease_watch import LeaseWatch
from tidewal.runtime.migration.node_log import NodeLog
from tidewal.runtime.testing.clock import until

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


@pytest.fixture
async def nodes(home, tmp_path: Path, rng: random.Random) -> AsyncIterator[SharedNodes]:
    nodes = SharedNodes(tmp_path, rng)
    yield nodes
    await nodes.stop()


async def test_nodes_and_clients_go_on_with_the_new_log(nodes: SharedNodes) -> None:
    for name in "abc":
        await nodes.start(name)
    before = {name: each.node.node.incarnation for name, each in nodes.running.items()}
    traffic, said = Traffic(nodes), list[str]()
    async with traffic.running():
        await asyncio.sleep(2)
        await nodes.migrate(said)
        acknowledged, asked = traffic.acknowledged, traffic.questions
        await asyncio.sleep(5)
        assert traffic.acknowledged > acknowledged + 20
        assert traffic.questions > asked + 5
    print(said, traffic.longest_s, traffic.longest_question_s)
    assert await nodes.phase() is MigrationPhase.MIGRATED
    assert len(set(nodes.owners().values())) == 3
    for name, each in nodes.running.items():
        assert each.error is None
        assert each.node.node.incarnation != before[name]
        assert each.node.health().ok
    await traffic.check()
    at = {url: {name: channel.end for name, channel in nodes.logs[url].channels.items()} for url in (OLD, NEW)}
    await asyncio.sleep(10)
    assert at[OLD] == {name: channel.end for name, channel in nodes.logs[OLD].channels.items()}


async def test_a_node_that_does_not_leave_keeps_all_on_the_old_log(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an earlier version does, which looks at nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(SharedLogMigration, "begin", lambda _: None)
        await nodes.start("a")
    await nodes.start("b")
    traffic = Traffic(nodes)
    async with traffic.running():
        await asyncio.sleep(1)
        with pytest.raises(
            Unavailable, match=r"nodes belong to the cluster of this log: a-\w+, and have not left it\. .* 20 s"
        ):
            await nodes.migrate(leave_s=20)
        assert await nodes.phase() is MigrationPhase.PREPARING
        acknowledged = traffic.acknowledged
        await asyncio.sleep(5)
        assert traffic.acknowledged > acknowledged + 20
        await nodes.cancel()
        assert await nodes.phase() is MigrationPhase.OPEN
        assert not nodes.logs[NEW].channels
    await traffic.check()


async def test_a_node_that_is_killed_before_it_has_left_is_evicted_and_waited_for(nodes: SharedNodes) -> None:
    for name in "abc":
        await nodes.start(name)
    traffic, said = Traffic(nodes), list[str]()
    async with traffic.running():
        await asyncio.sleep(1)
        nodes.running["b"].process.paused = True  # it renews nothing, and says nothing
        await asyncio.sleep(0.5)
        migrating = asyncio.create_task(nodes.migrate(said))
        await until(lambda: any("nodes belong" in line for line in said))
        await nodes.kill("b")
        await migrating
        await asyncio.sleep(5)
    await traffic.check()
    assert any("b-" in line for line in said), said


async def test_a_node_whose_new_log_fails_for_a_moment_starts_its_roles_again(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.start("a")
    begin, failed = ClusterMember.open, list[None]()

    async def flaky(self: ClusterMember, *args: Any, **options: Any) -> None:
        if len(failed) < 2 and nodes.logs.get(NEW) is not None:
            failed.append(None)
            raise Unavailable("the broker does not answer")
        await begin(self, *args, **options)

    monkeypatch.setattr(ClusterMember, "open", flaky)
    traffic = Traffic(nodes)
    async with traffic.running():
        await asyncio.sleep(1)
        await nodes.migrate()
        await asyncio.sleep(10)
    await traffic.check()
    assert len(failed) == 2
    assert nodes.running["a"].error is None


async def test_a_node_that_is_started_meanwhile_waits(nodes: SharedNodes) -> None:
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1, 2))
        migrating = asyncio.create_task(nodes.migrate())
        while await nodes.phase() is not MigrationPhase.MIGRATING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        late = await nodes.start("late", wait=False)
        await migrating
        await asyncio.wait_for(late.ready.wait(), 60)
        assert late.error is None
        assert await client.count("people", consistency="strong") == 2
        await until(lambda: {each.node.wal.log for each in nodes.running.values()} == {nodes.logs[NEW]})


async def test_a_node_that_waits_for_others_as_it_starts_leaves_with_them(nodes: SharedNodes) -> None:
    """A door is ready once another node is: that one does not come any more in a log that is in use no more."""
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))
    await nodes.end("a")
    door = await nodes.start("door", roles=["proxy"], wait=False)
    await asyncio.sleep(3)
    await nodes.migrate(leave_s=20)
    await nodes.start("a")
    await asyncio.wait_for(door.ready.wait(), 60)
    assert door.node.wal.log is nodes.logs[NEW]
    async with nodes.client() as client:
        assert await client.count("people", consistency="strong") == 1


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_node_that_joins_as_the_log_is_left_takes_nothing(
    nodes: SharedNodes, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was in use when the node opened it: it must not work on a log that the command finds unused."""
    await nodes.start("a")
    opening = ClusterMember.open
    joining, go = asyncio.Event(), asyncio.Event()

    async def open_late(self: ClusterMember, *args: Any, **options: Any) -> None:
        if self.incarnation.startswith("late") and not go.is_set():
            if not behind:
                joining.set()
                await go.wait()
                await opening(self, *args, **options)
            else:
                await opening(self, *args, **options)
                joining.set()
                await go.wait()
        else:
            await opening(self, *args, **options)

    monkeypatch.setattr(ClusterMember, "open", open_late)
    late = await nodes.start("late", wait=False)
    await joining.wait()
    migrating = asyncio.create_task(nodes.migrate())
    done = MigrationPhase.MIGRATING if behind else MigrationPhase.MIGRATED
    while await nodes.phase() is not done:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    go.set()
    await migrating
    await asyncio.wait_for(late.ready.wait(), 60)
    assert late.node.wal.log is nodes.logs[NEW]
    assert not any(channel.owner.startswith("late") for channel in await catalog_of_old(nodes))


async def test_a_door_that_starts_as_the_others_leave_holds_nothing_up(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw the log in use, and its role waits for something of those that are gone."""
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))
    preparing, is_waiting = Proxy.prepare, asyncio.Event()

    async def prepare(self: Proxy) -> None:
        if self.node.wal.log is nodes.logs[OLD]:
            is_waiting.set()
            await asyncio.Future()
        await preparing(self)

    monkeypatch.setattr(Proxy, "prepare", prepare)
    door = await nodes.start("door", roles=["proxy"], wait=False)
    await is_waiting.wait()
    await nodes.migrate(leave_s=20)
    await asyncio.wait_for(door.ready.wait(), 60)
    assert door.node.wal.log is nodes.logs[NEW]


async def catalog_of_old(nodes: SharedNodes) -> list[Any]:
    """The channels of the catalog of the old log, as it was left."""
    found = await NodeLog.read_states(await nodes.opener.open_alone(OLD))
    assert found is not None
    return [*found.states[next(name for name in found.states if name.endswith("schema"))].state.channels.values()]


async def test_who_has_no_settings_for_the_new_log_ends_or_says_so(nodes: SharedNodes) -> None:
    nodes.unknown["b"] = {NEW}
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client, nodes.client(unknown={NEW}) as other:
        await client.create_collection(PEOPLE)
        await nodes.migrate()
        await asyncio.wait_for(nodes.running["b"].ended.wait(), 60)
        error = nodes.running["b"].error
        assert isinstance(error, Moved)
        assert error.url == NEW
        assert "set wal to that log. It cannot be opened here (no credentials for memory://new)" in error.message
        await client.insert("people", people(1))
        with pytest.raises(Moved, match="no credentials for memory://new"):
            await other.insert("people", people(2))
        assert await client.count("people", consistency="strong") == 1


async def test_members_of_groups_leave_and_go_on_in_order(nodes: SharedNodes) -> None:
    for name in "abc":
        await nodes.start(name)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(3)]
        await clients[0].create_topic("orders", 4)
        stopped, ended = asyncio.Event(), asyncio.Event()
        done: dict[str, list[int]] = {}
        late: list[Exception] = []
        readers = [asyncio.create_task(Reader(client, done, late).run(ended)) for client in clients[:2]]
        sending = asyncio.create_task(send_all(clients[2], stopped))
        await asyncio.sleep(1)
        await nodes.migrate()
        await asyncio.sleep(2)
        stopped.set()
        sent = await sending
        await until_done(done, sent)
        await asyncio.sleep(2)
        ended.set()
        await asyncio.gather(*readers)
    assert done == {f"{key}": [*range(sent)] for key in range(KEYS)}


async def left(wal: Wal) -> None:
    """Have the log say that it is in use no more."""
    state = MigrationState(MigrationPhase.PREPARING, "m", NEW)
    await change_migration_state(wal, state)
    await change_migration_state(wal, replace(state, phase=MigrationPhase.MIGRATING))


async def test_a_member_that_joins_again_in_a_log_that_is_left_gets_nothing_there(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose client was stopped for longer than its session, and has not looked yet."""
    monkeypatch.setattr(FollowedLog, "_watch", lambda *_: None)  # of the one client alone
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "1")
        async with await client.subscribe("orders", "billing") as member:
            pack = await anext(member)
            wal = await nodes.opener.open_alone(OLD)
            await left(wal)
            await member._member._coordinator.leave("billing", member._member.id)  # its session is over
            again = asyncio.create_task(anext(member))
            await asyncio.sleep(5)
            assert not again.done()
            with pytest.raises(Fenced):
                await member.acknowledge(pack)
            await change_migration_state(wal, MigrationState(MigrationPhase.PREPARING, "m", NEW))
            assert [bytes(message.body) for message in (await again).messages] == [b"1"]


async def test_a_client_that_joins_a_group_as_the_log_is_left_is_no_member_of_it(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FollowedLog, "_watch", lambda *_: None)
    await nodes.start("a")
    wal = await nodes.opener.open_alone(OLD)
    async with nodes.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "1")
        joining = FollowingWal.join

        async def join(*args: Any, **options: Any) -> Any:
            if await nodes.phase() is MigrationPhase.OPEN:
                await left(wal)
            return await joining(*args, **options)

        monkeypatch.setattr(FollowingWal, "join", join)
        subscribing = asyncio.create_task(client.subscribe("orders", "billing"))
        await until(lambda: MIGRATION_CHANNEL in nodes.log.channels)
        seen = list[int]()
        for _ in range(500):  # it joins for a moment now and then, until it has looked
            await asyncio.sleep(0.01)
            seen += [len(group.members) for group in await wal.groups() if group.name == "billing"]
        assert seen.count(0) > 400
        await change_migration_state(wal, MigrationState(MigrationPhase.PREPARING, "m", NEW))
        async with await subscribing as member:
            assert [bytes(message.body) for message in (await anext(member)).messages] == [b"1"]


async def test_a_command_that_is_interrupted_in_the_switch_lets_all_go_on(nodes: SharedNodes) -> None:
    await nodes.start("a")
    await nodes.start("b")
    traffic = Traffic(nodes)
    async with traffic.running():
        migrating = asyncio.create_task(nodes.migrate())
        while await nodes.phase() is not MigrationPhase.MIGRATING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        migrating.cancel()
        await asyncio.gather(migrating, return_exceptions=True)
        assert await nodes.phase() is MigrationPhase.PREPARING
        acknowledged = traffic.acknowledged
        await asyncio.sleep(10)
        assert traffic.acknowledged > acknowledged + 20
        await nodes.migrate()
    await traffic.check()


async def test_a_migration_that_is_taken_back_beside_its_command_is_not_begun_again(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits for leases meanwhile, and no node has come back yet."""
    await nodes.start("a")
    over = LeaseWatch.over
    calls: list[int] = []

    async def over_slowly(self: LeaseWatch) -> None:
        await over(self)
        calls.append(len(calls))
        if len(calls) == 2:  # all have left
            await nodes.cancel()

    monkeypatch.setattr(LeaseWatch, "over", over_slowly)
    with pytest.raises(Fenced, match="was taken back"):
        await nodes.migrate()
    assert len(calls) == 2
    assert await nodes.phase() is MigrationPhase.OPEN
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))


async def test_of_two_commands_at_once_the_later_one_ends_what_the_earlier_one_began(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one stands still in the midst of the switch, and finds that it was overtaken."""
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))
        read, claims = NodeLog.read, dict[str, asyncio.Event]()

        async def read_late(old: Any, tables: Any, *, in_use: bool = False) -> NodeLog | None:
            found, run = await read(old, tables, in_use=in_use), (await migration_state(old)).run
            if run and run not in claims and await nodes.phase() is MigrationPhase.MIGRATING:
                claims[run] = asyncio.Event()
                await claims[run].wait()
            return found

        monkeypatch.setattr(NodeLog, "read", read_late)
        earlier = asyncio.create_task(nodes.migrate())
        while len(claims) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        later = asyncio.create_task(nodes.migrate())
        while len(claims) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for claim, migrating in zip(claims.values(), (earlier, later), strict=True):
            claim.set()
            await asyncio.wait([migrating])
        with pytest.raises(Fenced):
            await earlier
        await later
        assert await nodes.phase() is MigrationPhase.MIGRATED
        assert await client.count("people", consistency="strong") == 1


async def test_a_node_that_is_stopped_while_it_waits_ends(nodes: SharedNodes) -> None:
    await nodes.start("a")
    await nodes.start("b")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))
        migrating = asyncio.create_task(nodes.migrate())
        ended = nodes.running["b"]
        while ended.node.health() != SWITCHING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await nodes.end("b")
        assert ended.error is None
        await migrating
        assert await client.count("people", consistency="strong") == 1


async def test_a_group_that_the_new_log_does_not_take_at_once_is_processed_on(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As brokers to which no group has come before."""
    join, failed = LocalCoordinatorClient.join, list[None]()

    async def flaky(self: LocalCoordinatorClient, *args: Any) -> None:
        log = nodes.logs.get(NEW)
        is_new = log is not None and self._coordinator is log.groups.coordinator
        if len(failed) < 3 and is_new and args[-1] != SESSION_S:  # that is the command's own member
            failed.append(None)
            raise Unavailable("the coordinator is not there yet")
        await join(self, *args)

    await nodes.start("a")
    handled: list[bytes] = []

    async def handle(pack: TopicPack) -> None:
        handled.extend(bytes(message.body) for message in pack.messages)

    async with nodes.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "before")
        async with await client.subscribe("orders", "billing") as member:
            processing = asyncio.create_task(process(member.wal, member, handle, Semantics.AT_LEAST_ONCE))
            await asyncio.sleep(1)
            monkeypatch.setattr(LocalCoordinatorClient, "join", flaky)
            await nodes.migrate()
            await client.send("orders", "behind")
            await asyncio.sleep(10)
        await processing
    assert (handled, len(failed)) == ([b"before", b"behind"], 3)


async def test_a_member_that_is_closed_while_it_joins_in_the_new_log_has_left(
    nodes: SharedNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, joining, released = LocalCoordinatorClient.join, asyncio.Event(), asyncio.Event()

    async def late(self: LocalCoordinatorClient, *args: Any) -> None:
        if args[-1] != SESSION_S:
            joining.set()
            await released.wait()
        await join(self, *args)

    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "1")
        member = await client.subscribe("orders", "billing")
        await member.acknowledge(await anext(member))
        following = asyncio.create_task(anext(member, None))
        monkeypatch.setattr(LocalCoordinatorClient, "join", late)
        await nodes.migrate()
        await joining.wait()
        await member.aclose()
        released.set()
        assert await following is None
        assert [(group.name, len(group.members)) for group in await client._wal.groups()] == [("billing", 0)]
