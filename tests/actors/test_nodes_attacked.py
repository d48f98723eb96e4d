"""What attacks on several nodes of one log have found."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.actors.conftest import PEOPLE, error_of
from tests.actors.nodes import LEASE_S, NUMBERS, Nodes, role_of
from tests.actors.test_nodes import three  # noqa: F401 -- a fixture
from tidewal.actors.client import Client
from tidewal.actors.local_owner import WritePart
from tidewal.actors.streamingnode.granted_channels import GrantedChannels
from tidewal.runtime.catalog.catalog import Collection
from tidewal.runtime.cluster.roles import PROXY, ROLE_NAMES
from tidewal.runtime.errors import DeadlineExceeded, Overloaded, TidewalError
from tidewal.runtime.ownership import Appended
from tidewal.runtime.tables.table_store import LOG
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal
from tidewal.runtime.testing.simulation.wal import SimulatedWal

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.slow]


async def test_no_two_lives_of_a_node_have_names_in_common(three: Nodes) -> None:  # noqa: F811
    """A name that a client had before gets the replies to what that one asked: to a question an old answer, to a write
    that it was appended."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=3)
        await three.kill(three.leader())
        await client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(20)])
    # From here on the log's time is ahead of the wall clocks, as far as a lost owner might have promised.
    names = list[str]()
    for _ in range(4):
        await three.start("d")
        node = three.running["d"].node
        assert node is not None
        names += [role_of(node, role).rpc.name for role in ROLE_NAMES]
        names.append(node.client()._rpc.name)
        await three.kill("d")
    assert len(set(names)) == len(names)


async def test_what_a_channel_owed_is_told_when_another_node_gets_it(three: Nodes) -> None:  # noqa: F811
    """The outcome of an append is unknown, and the channel goes to another node: the one that had it never learns the
    outcome, and says so, for a door waits for its answer."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(6)]  # at each of the doors
        await clients[0].create_collection(PEOPLE, shards=3)
        for name in "bc":
            await three.end(name)
        for name in "bc":
            await three.start(name)  # all channels stay where they are
        assert set(three.owners().values()) == {"a"}
        wal = three.running["a"].node.wal
        assert isinstance(wal, MemoryWal)
        wal.faults = FaultPlan(1, Rates(lost=1), channels="rootcoord-dml_0")

        async def write(client: Client, number: int) -> None:
            for n in range(10):
                row = {"id": 10 * number + n, "name": "x", "height": 1.0}
                await client.insert("people", [row], deadline_s=20)

        await asyncio.gather(*itertools.starmap(write, zip(clients, range(6), strict=True)))
        assert three.owners()["by-dev-rootcoord-dml_0"] != "a"
        assert await clients[0].count("people", consistency="strong") == 60
        assert role_of(three.running["a"].node, "streamingnode")._owner.inflight_bytes == 0


async def test_a_write_that_the_owner_at_the_door_refuses_is_written_by_no_other(three: Nodes) -> None:  # noqa: F811
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(12)]  # at each of the doors
        await clients[0].create_collection(PEOPLE, shards=3)
        assert set(three.owners().values()) == set("abc")

        class Full:
            """The owner as the doors of its process find it."""

            def append(self, part: WritePart) -> asyncio.Future[Appended]:
                raise Overloaded("no room; retry", limit="room")

        owners = [three.running[name].node.node.local_owner for name in "abc"]
        real = [each._owner for each in owners]
        for each in owners:
            each._owner = Full()
        rows = [{"id": n, "name": "x", "height": 1.0} for n in range(50)]  # for each of the channels
        for client in clients:
            error = await error_of(client.insert("people", rows))
            assert isinstance(error, Overloaded)
            assert not error.fields.get("outcome_unknown")
        for each, owner in zip(owners, real, strict=True):
            each._owner = owner
        assert await clients[0].count("people", consistency="strong") == 0


async def test_an_owner_that_reads_its_own_fence_late_says_of_no_collection_that_it_is_gone(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may read in the catalog that a channel is open before its owner does: they ask again."""
    propose = GrantedChannels.propose

    async def read_late(self: GrantedChannels, kind: str, channels: dict[str, Any]) -> None:
        await propose(self, kind, channels)
        if kind == "fenced":
            await asyncio.sleep(1)

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(6)]  # at each of the doors
        await clients[0].create_collection(PEOPLE, shards=1)
        monkeypatch.setattr(GrantedChannels, "propose", read_late)
        await three.kill(*three.owners().values())
        rows = ([{"id": n, "name": "x", "height": 1.0}] for n in range(6))
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.count("people", consistency="strong"))
                tasks.create_task(client.insert("people", next(rows)))
        assert await clients[0].count("people", consistency="strong") == 6


async def test_first_writes_of_a_client_keep_their_order_whatever_order_it_learns_of_the_collection_in(
    three: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe = Client.describe_collection
    waits = iter([0.3, 0.2, 0.1, 0.0])

    async def slow(self: Client, collection: str, **options: float) -> Collection:
        await asyncio.sleep(next(waits))  # the questions of the writes are answered from last to first
        return await describe(self, collection, **options)

    async with three.client() as prepare, three.client() as client:
        await prepare.create_collection(NUMBERS, shards=1)
        monkeypatch.setattr(Client, "describe_collection", slow)
        writes = [client.upsert("numbers", [{"id": 1, "value": value}]) for value in range(4)]
        await asyncio.gather(*writes)
        rows = (await client.get("numbers", [1], consistency="strong")).table
        assert rows["value"].to_pylist() == [3]


async def test_a_door_that_was_passed_over_delivers_nothing_behind_later_writes(three: Nodes) -> None:  # noqa: F811
    """A door stands still, with a write before it whose client gives up; the next write of that client goes through
    another one. When it goes on, it does not hear at once that it is no member any more."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(12)]
        await clients[0].create_collection(NUMBERS, shards=1)
        owner = three.owners()["by-dev-rootcoord-dml_0"]
        for key, client in enumerate(clients):
            await client.upsert("numbers", [{"id": key, "value": 0}])
        door = three.running[next(name for name in "abc" if name != owner)]
        door.process.pause()
        first = [
            client.upsert("numbers", [{"id": key, "value": 1}], deadline_s=2) for key, client in enumerate(clients)
        ]
        outcomes = await asyncio.gather(*first, return_exceptions=True)
        assert any(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
        await asyncio.gather(
            *(client.upsert("numbers", [{"id": key, "value": 2}]) for key, client in enumerate(clients))
        )
        door.deaf.add(door.node.node.names.cluster)
        door.process.resume()
        await asyncio.sleep(3)
        rows = (await clients[0].get("numbers", list(range(12)), consistency="strong")).table
        assert rows["value"].to_pylist() == [2] * 12


async def test_a_datanode_that_was_passed_over_stores_nothing_in_the_next_collection_of_the_name(
    three: Nodes,  # noqa: F811
) -> None:
    """It stood still with rows of a collection that was dropped meanwhile, and does not hear of that at once. Its table
    is another collection's by now, with nothing of its shards: as it was when this one began."""
    async with three.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        await client.insert("people", [{"id": n, "name": "old", "height": 1.0} for n in range(9)])
        await client.count("people", consistency="strong")
        [(victim, pipeline)] = [
            (each, found) for each in three.running.values() for found in each.role("datanode")._pipelines.values()
        ]
        victim.process.pause()
        await asyncio.sleep(1.2 * LEASE_S + 1)
        await client.drop_collection("people", deadline_s=60)
        await client.create_collection(PEOPLE, shards=2)
        await client.insert("people", [{"id": 1, "name": "new", "height": 1.0}])
        await client.flush("people")
        records, positions = pipeline._buffer.records, pipeline._positions
        assert records
        end = max(position.timestamp for position in positions.values())
        victim.deaf.update((victim.node.node.names.cluster, victim.node.node.names.catalog))
        victim.process.resume()
        with contextlib.suppress(TimeoutError, TidewalError):
            await asyncio.wait_for(pipeline._store(records, end, positions), 1)
        assert (await client.compact("people"))["rows"] == 1
        table = DeltaTable(three.running[victim.name].node.node.tables.table("people", LOG).uri)
        assert table.to_pyarrow_table()["name"].to_pylist() == ["new"]


class Refusing:
    """Refuses at one owner the batches that have rows, as a limit does that only this owner has reached."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self._pressure: Any = role_of(nodes.running[name].node, "streamingnode")._pressure
        self._check = self._pressure.check

    def begin(self) -> None:
        self._pressure.check = self._refuse

    def end(self) -> None:
        self._pressure.check = self._check

    def _refuse(self, collection: Collection, records: Any) -> Any:
        if any("insert" in record.tags for _, record in records):
            raise Overloaded("too much is unflushed", limit="streamingNode.maxUnflushedBytes")
        return self._check(collection, records)


async def test_what_one_owner_refuses_for_now_lands_behind_no_later_write_of_its_client(three: Nodes) -> None:  # noqa: F811
    """Other owners have taken their parts, so it is repeated: before the deletes that were sent behind it."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(three.client()) for _ in range(12)]  # at each of the doors
        await clients[0].create_collection(PEOPLE, shards=3)
        assert set(three.owners().values()) == set("abc")
        refusing = Refusing(three, "b")
        refusing.begin()
        writes = list[asyncio.Future[Any]]()
        for number, client in enumerate(clients):
            keys = list(range(100 * number, 100 * number + 50))  # for each of the channels
            rows = [{"id": n, "name": "x", "height": 1.0} for n in keys]
            writes.append(asyncio.ensure_future(client.insert("people", rows)))
            writes.append(asyncio.ensure_future(client.delete("people", keys)))
        await asyncio.sleep(3)
        refusing.end()
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert not any(isinstance(answer, BaseException) for answer in answers[1::2])
        assert {type(answer).__name__ for answer in answers[::2]} == {"WriteResult", "Overloaded"}
        assert await clients[0].count("people", consistency="strong") == 0


async def test_what_all_owners_refuse_is_refused_at_once_and_written_by_none(home, tmp_path, rng) -> None:
    nodes = Nodes(tmp_path, rng, SimulatedWal)
    for name in "ab":
        await nodes.start(name, [role for role in ROLE_NAMES if role != PROXY])
    await nodes.start("door", [PROXY])
    async with nodes.client() as client:
        await client.create_collection(PEOPLE, shards=2)
        assert set(nodes.owners().values()) == set("ab")
        for name in "ab":
            Refusing(nodes, name).begin()
        began_s = nodes.now_s()
        error = await error_of(client.insert("people", [{"id": n, "name": "x", "height": 1.0} for n in range(50)]))
        assert isinstance(error, Overloaded)
        assert not error.fields.get("outcome_unknown")
        assert nodes.now_s() - began_s < 1
    await nodes.stop()
