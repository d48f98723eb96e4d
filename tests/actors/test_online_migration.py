"""The log of a node is migrated while the node runs and is written to: node and clients go on with the new one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.actors.conftest import in_place
from tests.actors.test_node_migration import FarWal
from tests.dying_wal import DyingWal, Killed
from tests.turns import writes_in_turn
from tidewal.actors import log_migration
from tidewal.actors.client import Client
from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.actors.open_logs import OpenLogs
from tidewal.actors.standalone import Standalone
from tidewal.actors.topics.member import TopicMember
from tidewal.actors.topics.messages import TopicPack
from tidewal.runtime.errors import (
    Closed,
    ConfigError,
    CorruptLog,
    Fenced,
    InvalidRequest,
    Moved,
    Unavailable,
    Unsupported,
    of_unknown_outcome,
)
from tidewal.runtime.log.migration_state import MigrationPhase, check_in_use, migration_state
from tidewal.runtime.log.wal import Append, ChannelPolicy, OnAppended, Wal
from tidewal.runtime.migration import migration, preparation
from tidewal.runtime.migration.migration import cancel_migration, migrate
from tidewal.runtime.migration.preparation import prepare, until_unused
from tidewal.runtime.migration.shared_migration import migrate_in_use
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

OLD, NEW, THIRD = "memory://old", "memory://new", "memory://third"
UNDER_WAY = ("copying", "switching")
KEYS = 7


class MemoryOpener:
    """Opens logs in memory, by URL."""

    def __init__(self) -> None:
        self.logs: dict[str, MemoryLog] = {OLD: MemoryLog()}

    async def open(self, url: str) -> Wal:
        wal = MemoryWal(self.logs[url])
        await check_in_use(wal, url)
        return wal

    async def open_alone(self, url: str) -> Wal:
        """What is copied has ids in the new log that are far above those in the old one."""
        kind = MemoryWal if url == OLD else FarWal
        return kind(self.logs.setdefault(url, MemoryLog()))

    async def look_at(self, url: str) -> Wal:
        return MemoryWal(self.logs[url])

    def owned_by_one(self, url: str) -> bool:
        return True

    def moved_by_command(self, url: str) -> bool:
        return True

    async def phase(self, url: str) -> MigrationPhase:
        return (await migration_state(MemoryWal(self.logs[url]))).phase


@asynccontextmanager
async def node_on(home: Any, opener: MemoryOpener, url: str = OLD) -> AsyncIterator[Standalone]:
    """A node whose log can be migrated while it runs."""
    loop: Any = asyncio.get_running_loop()
    logs = OpenLogs(opener, url, await opener.open(url))
    options: dict[str, Any] = {"clock": loop.clock, "threads": False, "blocking": home.in_place, "name": "node"}
    try:
        async with Standalone(logs.wal, home.tables, logs=logs, **options) as node:
            yield node
    finally:
        await logs.close()


async def migrated(client: Client, to: str = NEW) -> dict[str, Any]:
    """Ask for the migration, and wait for its end."""
    await client._rpc.call("mixcoord", "migrate", {"target": to})
    while (status := (await client._rpc.call("mixcoord", "migration")).values)["phase"] in UNDER_WAY:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return status


class DyingAlone(DyingWal):
    """A log that a migration has to itself, of which one write is the last of the process: `died` is called then."""

    def __init__(self, log: MemoryLog, left: list[int], *, behind: bool, died: Callable[[], None]) -> None:
        super().__init__(log, left, behind=behind)
        self._died = died

    @contextmanager
    def _dying(self) -> Iterator[None]:
        try:
            yield
        except Killed:
            self._died()
            raise

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        with self._dying():
            super().submit(entries, done)

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        with self._dying():
            await super().create_channel(channel, policy)

    async def drop_channel(self, channel: str) -> None:
        with self._dying():
            await super().drop_channel(channel)

    async def seek_group(self, group: str, channel: str, start: Any) -> None:
        with self._dying():
            await super().seek_group(group, channel, start)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        with self._dying():
            await super().hold(channel, holder, id)


class DyingOpener(MemoryOpener):
    """Logs of a process that is killed at a write of the migration, or in which that write fails: `left` counts down to
    it. `kept` is what a kill leaves: both logs, and the tables."""

    def __init__(self, home: Any, step: int, *, behind: bool, fails: bool = False) -> None:
        super().__init__()
        self._home, self._behind, self._fails = home, behind, fails
        self.left = [step]
        self.kept: tuple[dict[str, MemoryLog], Path] | None = None
        self.acknowledged: set[int] = set()
        self.writer: Writer | None = None

    async def open_alone(self, url: str) -> Wal:
        log = self.logs.setdefault(url, MemoryLog())
        return DyingAlone(log, self.left, behind=self._behind, died=self._died)

    def _died(self) -> None:
        if self._fails:
            raise Unavailable("this write was told to fail", outcome_unknown=True)
        tables = self._home.directory / "kept"
        shutil.copytree(self._home.tables, tables)
        self.kept = {url: copy_of(log) for url, log in self.logs.items()}, tables
        assert self.writer is not None
        self.acknowledged = set(self.writer.acknowledged)


def copy_of(log: MemoryLog) -> MemoryLog:
    copied = MemoryLog()
    for name, channel in log.channels.items():
        entries = replace(channel, entries=list(channel.entries), waiters=[], holds=dict(channel.holds))
        copied.channels[name] = replace(entries, groups=deepcopy(channel.groups))
    return copied


class Writer:
    """Inserts rows one after another until it is stopped; `acknowledged` are their keys."""

    def __init__(self, client: Client, home: Any, first: int) -> None:
        self._client, self._home, self._next = client, home, first
        self.acknowledged: list[int] = []
        self._stopped = False

    async def run(self) -> None:
        while not self._stopped:
            key = self._next
            self._next += 1
            await self._client.insert("people", self._home.people(key))
            self.acknowledged.append(key)
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._stopped = True


async def keys(client: Client) -> list[int]:
    result = await client.query("people", consistency="strong")
    return sorted(result.table["id"].to_pylist())


async def ask_all(client: Client, stopped: asyncio.Event) -> None:
    """Ask questions all the time, which wait for the present: some are under way when the roles stop."""
    while not stopped.is_set():
        await asyncio.gather(*(client.count("people", consistency="strong") for _ in range(3)))
        await asyncio.sleep(0.02)


async def test_writers_go_on_while_the_log_is_migrated(home) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client, node.client() as other:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(*range(50)))
        await client.flush("people")
        writers = [Writer(each, home, 1_000 * number) for number, each in enumerate((client, other), 1)]
        tasks = [asyncio.create_task(writer.run()) for writer in writers]
        await asyncio.sleep(1)
        asking = asyncio.create_task(ask_all(client, stopped := asyncio.Event()))
        before = [len(writer.acknowledged) for writer in writers]
        status = await migrated(client)
        assert status["phase"] == "migrated", status
        await asyncio.sleep(3)
        for writer in writers:
            writer.stop()
        stopped.set()
        await asyncio.gather(asking, *tasks)
        assert all(len(each.acknowledged) > was + 20 for was, each in zip(before, writers, strict=True))
        expected = sorted([*range(50), *(key for writer in writers for key in writer.acknowledged)])
        assert await keys(client) == expected
        await client.flush("people")
    assert await opener.phase(OLD) is MigrationPhase.MIGRATED
    with pytest.raises(Moved):
        await opener.open(OLD)
    async with node_on(home, opener, NEW) as node, node.client() as client:
        assert await keys(client) == expected


async def written_to(home: Any, opener: DyingOpener) -> list[int]:
    """A node whose log is migrated while it is written to, until the end of that or of the node. Returns the keys that
    were acknowledged."""
    with suppress(Killed):
        async with node_on(home, opener) as node, node.client() as client:
            await client.create_collection(home.PEOPLE)
            await client.insert("people", home.people(*range(5)))
            await client.flush("people")
            writer = opener.writer = Writer(client, home, 1_000)
            writing = asyncio.create_task(writer.run())
            try:
                await node.run(migrated(client))
            finally:
                writer.stop()
                writing.cancel() if opener.kept else await writing
                await asyncio.gather(writing, return_exceptions=True)
            if not opener.kept:
                expected = sorted([*range(5), *writer.acknowledged])
                assert await keys(client) == expected
                return expected
    return sorted([*range(5), *opener.acknowledged])


async def test_what_is_refused_or_fails_leaves_the_node_as_it_was(home, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = MemoryOpener()
    opener.logs["memory://full"] = full = MemoryLog()
    await MemoryWal(full).create_channel("orders", ChannelPolicy())
    async with node_on(home, opener) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        with pytest.raises(InvalidRequest, match="the new log is not empty"):
            await node.migrate("memory://full")
        with pytest.raises(ConfigError):
            await node.migrate("nothing://there")
        assert await opener.phase(OLD) is MigrationPhase.OPEN
        with monkeypatch.context() as patched:
            patched.setattr(log_migration, "begin_switch", failing)
            with pytest.raises(Unavailable, match="told to fail"):
                await node.migrate(NEW)
        assert await opener.phase(OLD) is MigrationPhase.PREPARING
        with pytest.raises(InvalidRequest, match="go on with that one"):
            await node.migrate("memory://other")
        await client.insert("people", home.people(2))
        await client._rpc.call("mixcoord", "cancel_migration", {"target": NEW})
        assert await opener.phase(OLD) is MigrationPhase.OPEN
        assert not opener.logs[NEW].channels
        await node.migrate(NEW)
        assert await keys(client) == [1, 2]
    with pytest.raises(Closed):
        await node.migrate(NEW)


async def failing(*_: object) -> None:
    raise Unavailable("told to fail")


async def test_a_node_that_was_given_its_log_open_or_is_not_alone_does_not_migrate_it(home) -> None:
    async with home.node() as node:
        with pytest.raises(Unsupported, match="was given an open log"):
            await node.migrate(NEW)
    opener = MemoryOpener()
    async with node_on(home, opener) as node:
        other = replace(next(iter(node.node.cluster.state.members.values())), incarnation="other-1", name="other")
        await node.node.cluster.log.propose({"kind": "register", **other.to_wire(), "number": 1, "replaces": ""})
        with pytest.raises(Unavailable, match=r"2 nodes use this log \(node, other\)"):
            await node.migrate(NEW)


async def test_a_node_that_is_stopped_while_it_copies_starts_again_and_goes_on(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = MemoryOpener()
    copying = asyncio.Event()

    async def slow(*_: object, **__: object) -> None:
        copying.set()
        await asyncio.sleep(1_000)

    async with node_on(home, opener) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        with monkeypatch.context() as patched:
            patched.setattr(preparation, "_round", slow)
            migrating = asyncio.create_task(node.migrate(NEW))
            await copying.wait()
            await node.close()
            with pytest.raises(Unavailable, match="has ended before its end"):
                await migrating
    assert await opener.phase(OLD) is MigrationPhase.PREPARING
    async with node_on(home, opener) as node, node.client() as client:
        await node.migrate(NEW)
        assert await keys(client) == [1]


class Held:
    """A step of a switch that has done what it does and does not return: `reached` says so, `go_on` lets it."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any) -> Any:
        result = await self._step(*args)
        self.reached.set()
        await self.go_on.wait()
        return result

    @classmethod
    def at(cls, step: str, node: Standalone, patch: pytest.MonkeyPatch) -> Held:
        """At the beginning of the switch, or where the roles have the new log and do not work yet."""
        module, name = (log_migration, "begin_switch") if step == "begins" else (node, "_ready")
        held = cls(getattr(module, name))
        patch.setattr(module, name, held)
        return held


async def held_in_switch(
    home, node: Standalone, client: Client, step: str, patch: pytest.MonkeyPatch
) -> tuple[Held, asyncio.Task[Any]]:
    """Store a row, and migrate as far as `Held.at` says: what holds it there, and the migration."""
    await client.create_collection(home.PEOPLE)
    await client.insert("people", home.people(1))
    held = Held.at(step, node, patch)
    migrating = asyncio.create_task(node.migrate(NEW))
    await held.reached.wait()
    return held, migrating


@pytest.mark.parametrize("step", ["begins", "ends"])
async def test_a_switch_is_not_taken_back_from_its_beginning_until_the_roles_work(
    home, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client:
        held, migrating = await held_in_switch(home, node, client, step, monkeypatch)
        with pytest.raises(Unavailable, match="at this moment"):
            await node._migration.cancel(NEW)
        held.go_on.set()
        await migrating
        await client.insert("people", home.people(2))
        assert await keys(client) == [1, 2]


@pytest.mark.parametrize("step", ["begins", "ends"])
async def test_a_node_that_is_closed_in_a_switch_leaves_a_log_in_use(
    home, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client:
        held, migrating = await held_in_switch(home, node, client, step, monkeypatch)
        closing = asyncio.create_task(node.close())
        await asyncio.sleep(1)
        held.go_on.set()
        await asyncio.gather(migrating, closing)
    assert await opener.phase(OLD) is MigrationPhase.MIGRATED
    async with node_on(home, opener, NEW) as node, node.client() as client:
        assert await keys(client) == [1]


class FurtherOpener(MemoryOpener):
    """The new log is one that several processes write to, and a command migrates that further as it is opened."""

    def __init__(self, tables: Path) -> None:
        super().__init__()
        self._tables = tables
        self.further: asyncio.Task[Any] | None = None

    async def open(self, url: str) -> Wal:
        wal = await super().open(url)
        if url == NEW and self.further is None:
            clock: Any = asyncio.get_running_loop()
            new, third = MemoryWal(self.logs[NEW]), await self.open_alone(THIRD)
            tables = MovedTables(open_tables(self._tables), in_place)
            self.further = asyncio.create_task(migrate_in_use(new, third, NEW, THIRD, tables=tables, clock=clock.clock))
            while (await self.phase(NEW)).in_use:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return wal

    def owned_by_one(self, url: str) -> bool:
        return url == OLD

    def written_by_several(self, url: str) -> bool:
        return url != OLD


async def test_a_node_whose_new_log_is_migrated_further_as_it_starts_goes_on_with_that(home) -> None:
    opener = FurtherOpener(home.tables)
    async with node_on(home, opener) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1, 2))
        await client.flush("people")
        await node.migrate(NEW)
        async with asyncio.timeout(60):
            assert await keys(client) == [1, 2]
        assert opener.further is not None
        await opener.further
        assert node.wal.log is opener.logs[THIRD]
        assert node.health().ok


async def test_a_table_that_changes_behind_the_point_of_no_return_leads_back_to_the_old_log(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a write would that was under way in a thread when the roles stopped."""
    opener = MemoryOpener()

    async def changed(*_: object) -> None:
        assert await opener.phase(OLD) is MigrationPhase.MIGRATED
        raise CorruptLog("the table of people is not as it was")

    async with node_on(home, opener) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        await client.insert("people", home.people(1))
        await client.flush("people")
        with monkeypatch.context() as patched:
            patched.setattr(migration, "check_tables", changed)
            with pytest.raises(CorruptLog, match="is not as it was"):
                await node.migrate(NEW)
        assert await opener.phase(OLD) is MigrationPhase.OPEN
        await client.insert("people", home.people(2))
        await node.migrate(NEW)
        assert await keys(client) == [1, 2]
    assert await opener.phase(OLD) is MigrationPhase.MIGRATED


async def test_one_that_is_being_taken_back_is_not_begun_meanwhile(home, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(log_migration, "begin_switch", failing)
            with pytest.raises(Unavailable, match="told to fail"):
                await node.migrate(NEW)
            with pytest.raises(InvalidRequest, match="migrates to"):
                await node._migration.cancel("memory://other")
            assert "memory://other" not in opener.logs
            held = Held(cancel_migration)
            patched.setattr(log_migration, "cancel_migration", lambda *args, **_: held(*args))
            cancelling = asyncio.create_task(node._migration.cancel(NEW))
            await held.reached.wait()
            with pytest.raises(Unavailable, match="is being taken back"):
                await node.migrate(NEW)
            held.go_on.set()
            await cancelling
        assert node._migration.status()["error"] is None
        await node.migrate(NEW)
        await client.create_collection(home.PEOPLE)


class SharedWal(MemoryWal):
    """A log that several nodes may use."""

    capabilities = replace(MemoryWal.capabilities, one_node=False, one_machine=False)


async def test_a_log_of_several_nodes_is_prepared_while_they_run_and_migrated_when_they_have_stopped(home) -> None:
    home.memory, new = SharedWal, MemoryLog()
    tables = MovedTables(open_tables(home.tables), home.in_place)
    said: list[str] = []
    async with home.people_client() as client:
        await client.insert("people", home.people(*range(50)))
        await client.flush("people")
        await client.create_topic("orders", 1)
        member = await client.subscribe("orders", "billing")
        compared = await prepare(SharedWal(home.log), SharedWal(new), OLD, NEW, tables=tables, on_progress=said.append)
        assert compared
        waiting = asyncio.create_task(until_unused(SharedWal(home.log), tables, said.append))
        await client.insert("people", home.people(*range(50, 60)))
        await asyncio.sleep(5)
        assert not waiting.done()
        await member.aclose()
    await waiting
    assert sum("nodes belong to the cluster of this log: node-" in line for line in said) == 1, said
    old = SharedWal(home.log)
    await migrate(old, SharedWal(new), OLD, NEW, tables=tables, compared=compared)
    home.log = new
    async with home.client() as client:
        assert await keys(client) == [*range(60)]


class Reader:
    """A member of a group that acknowledges each message, whatever happens to the log meanwhile. `done` are the bodies,
    by key, in the order in which their acknowledgements returned."""

    def __init__(self, client: Client, done: dict[str, list[int]], late: list[Exception]) -> None:
        self._client, self._done, self._late = client, done, late

    async def run(self, ended: asyncio.Event) -> None:
        async with await self._client.subscribe("orders", "billing") as member:
            closing = asyncio.create_task(self._close(member, ended))
            async for pack in member:
                await asyncio.sleep(0.02)  # handled
                for part in pack.parts():
                    try:
                        await member.acknowledge(part)
                    except Fenced as error:
                        self._late.append(error)
                        break
                    for message in part.messages:
                        self._done.setdefault(message.key.decode(), []).append(int(bytes(message.body)))
            await closing

    async def _close(self, member: TopicMember, ended: asyncio.Event) -> None:
        await ended.wait()
        await member.aclose()


async def until_done(done: dict[str, list[int]], sent: int) -> None:
    """Wait until as many of each key are done as were sent."""
    async with asyncio.timeout(60):
        while not all(len(done.get(f"{key}", ())) >= sent for key in range(KEYS)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def send_all(client: Client, ended: asyncio.Event) -> int:
    number = 0
    while not ended.is_set():
        for key in range(KEYS):
            await client.send("orders", f"{number}", key=f"{key}")
        number += 1
        await asyncio.sleep(0.03)
    return number


@pytest.mark.parametrize("to_kinds", [1, 3], ids=["once", "there and on"])
async def test_members_go_on_in_order_and_nothing_is_lost_or_done_twice(home, to_kinds: int) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(node.client()) for _ in range(4)]
        await clients[0].create_topic("orders", 4)
        stopped, ended = asyncio.Event(), asyncio.Event()
        done: dict[str, list[int]] = {}
        late: list[Exception] = []
        readers = [asyncio.create_task(Reader(client, done, late).run(ended)) for client in clients[1:3]]
        sending = asyncio.create_task(send_all(clients[3], stopped))
        for to in range(to_kinds):
            await asyncio.sleep(1)
            assert (await migrated(clients[0], f"{NEW}{to}"))["phase"] == "migrated"
        await asyncio.sleep(1)
        await clients[0].alter_topic("orders", 6)
        await asyncio.sleep(1)
        stopped.set()
        sent = await sending
        await until_done(done, sent)
        await asyncio.sleep(2)
        ended.set()
        await asyncio.gather(*readers)
    assert done == {f"{key}": [*range(sent)] for key in range(KEYS)}
    assert late, "no message was in the hands of a member when the log moved"


async def is_over(member: TopicMember, pack: TopicPack) -> None:
    """What is done with a pack changes nothing any more."""
    with pytest.raises(Fenced):
        await member.acknowledge(pack)
    with pytest.raises(Fenced):
        await member.annotate(pack, b"x")
    assert not member.is_acknowledged(pack)
    member.redeliver(pack)


async def test_what_was_delivered_before_is_not_acknowledged_behind(home) -> None:
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client:
        await client.create_topic("orders", 1)
        for number in range(3):
            await client.send("orders", f"{number}", key="k")
        async with await client.subscribe("orders", "billing") as member:
            first = await anext(member)
            await node.migrate(NEW)
            await is_over(member, first)
            again = await anext(member)  # it has joined again
            await is_over(member, first)
            assert [bytes(message.body) for message in again.messages] == [b"0", b"1", b"2"]
            await member.acknowledge(again)


async def test_an_acknowledgement_that_the_migration_cuts_off_is_over_too(home, monkeypatch) -> None:
    """The client closes the old log while the answer is under way: whether it was stored is not known."""
    opener = MemoryOpener()
    async with node_on(home, opener) as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "0", key="k")
        async with await client.subscribe("orders", "billing") as member:
            pack = await anext(member)

            async def cut_off(delivered: object, *, metadata: bytes | None = None) -> None:
                await node.migrate(NEW)
                raise of_unknown_outcome(Unavailable("the connection is closed"))

            monkeypatch.setattr(member._member, "acknowledge", cut_off)
            with pytest.raises(Fenced) as raised:
                await member.acknowledge(pack)
            assert raised.value.outcome_unknown
            await member.acknowledge(await anext(member))


@pytest.mark.parametrize("semantics", [tidewal.Semantics.AT_LEAST_ONCE, tidewal.Semantics.EXACTLY_ONCE])
async def test_what_processes_messages_goes_on_with_the_new_log(home, semantics: tidewal.Semantics) -> None:
    """Messages of a key come in order, none is missing, and outputs that go with an acknowledgement are there once."""
    opener = MemoryOpener()
    handled: dict[str, list[int]] = {}

    async def handle(pack: Any) -> list[Append]:
        await asyncio.sleep(0.02)
        bodies = [(message.key.decode(), int(bytes(message.body))) for message in pack.messages]
        for key, number in bodies:
            handled.setdefault(key, []).append(number)
        exactly = semantics is tidewal.Semantics.EXACTLY_ONCE
        return [Append("done", f"{key} {number}".encode()) for key, number in bodies] if exactly else []

    async with node_on(home, opener) as node, node.client() as client, node.client() as other:
        await client.create_topic("orders", 2)
        await node.wal.create_channel("done", ChannelPolicy())
        stopped = asyncio.Event()
        sending = asyncio.create_task(send_all(client, stopped))
        member = await other.subscribe("orders", "billing")
        retry = tidewal.RetryPolicy(attempts=3)
        processing = asyncio.create_task(tidewal.process(member.wal, member, handle, semantics, retry=retry))
        await asyncio.sleep(1)
        await node.migrate(NEW)
        await asyncio.sleep(1)
        stopped.set()
        sent = await sending
        async with asyncio.timeout(60):
            while not all(handled.get(f"{key}", [-1])[-1] == sent - 1 for key in range(KEYS)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        assert not processing.done()
        await member.aclose()
        await processing
    for numbers in handled.values():
        assert list(dict.fromkeys(numbers)) == [*range(sent)]
        assert len(numbers) < sent + 20
    if semantics is tidewal.Semantics.EXACTLY_ONCE:
        outputs = [bytes(entry.payload).decode() for entry in opener.logs[NEW].channels["done"].entries]
        assert sorted(outputs) == sorted(f"{key} {number}" for key in range(KEYS) for number in range(sent))


async def test_a_member_that_finds_the_log_moved_as_it_joins_is_of_the_new_one(
    home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own join may be the call by which a client learns that."""
    async with home.node() as node, node.client() as client:
        await client.create_topic("orders", 1)
        await client.send("orders", "1", key="k")
        wal: Any = node._following
        joining, members = wal.join, list[Any]()

        async def join(*args: Any, **options: Any) -> Any:
            members.append(await joining(*args, **options))
            wal.moves += len(members) == 1
            return members[-1]

        monkeypatch.setattr(wal, "join", join)
        async with asyncio.timeout(60), await client.subscribe("orders", "billing") as member:
            await member.acknowledge(await anext(member))
        assert len(members) == 2


@pytest.mark.long
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_node_that_is_killed_at_each_write_of_its_migration_goes_on(home, turn: int, behind: bool) -> None:
    step, phases = 0, set[MigrationPhase]()
    for step, number in writes_in_turn(turn):
        opener = DyingOpener(home, step, behind=behind)
        expected = await written_to(home, opener)
        shutil.rmtree(home.tables)
        if opener.kept is None:
            break
        after = MemoryOpener()
        after.logs, tables = opener.kept
        shutil.move(tables, home.tables)
        phase = await after.phase(OLD)
        phases.add(phase)
        await goes_on_after_a_kill(home, after, phase, expected, number)
        shutil.rmtree(home.tables)
    assert step > 60, step
    assert phases == {MigrationPhase.PREPARING, MigrationPhase.MIGRATING, MigrationPhase.MIGRATED}


async def goes_on_after_a_kill(
    home: Any, opener: MemoryOpener, phase: MigrationPhase, expected: list[int], number: int
) -> None:
    url = OLD
    if phase is not MigrationPhase.PREPARING:
        with pytest.raises((Unavailable, Moved)):
            await opener.open(OLD)
        old, new = await opener.open_alone(OLD), await opener.open_alone(NEW)
        if number % 2 and phase is MigrationPhase.MIGRATING:
            await cancel_migration(old, new, NEW)
        else:
            await migrate(old, new, OLD, NEW, tables=MovedTables(open_tables(home.tables), home.in_place))
            url = NEW
    async with node_on(home, opener, url) as node, node.client() as client:
        found = await keys(client)
        assert set(expected) <= set(found)
        assert len(found) == len(set(found))
        if url == OLD:
            assert (await migrated(client))["phase"] == "migrated"
            assert await keys(client) == found


@pytest.mark.long
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_node_goes_on_with_one_of_the_logs_whichever_write_fails(home, turn: int, behind: bool) -> None:
    step, phases = 0, set[MigrationPhase]()
    for step, _ in writes_in_turn(turn):
        opener = DyingOpener(home, step, behind=behind, fails=True)
        expected = await written_to(home, opener)
        phase = await opener.phase(OLD)
        phases.add(phase)
        url = NEW if phase is MigrationPhase.MIGRATED else OLD
        async with node_on(home, opener, url) as node, node.client() as client:
            assert await keys(client) == expected
        shutil.rmtree(home.tables)
        if opener.left[0] > 0:
            break
    assert step > 60, step
    assert phases == {MigrationPhase.PREPARING, MigrationPhase.MIGRATED}
