"""Groups between processes, without the socket between them: requests, hostile requests, sessions."""

from __future__ import annotations

import asyncio
import sys
import threading

import msgpack
import pytest

from tidewal.adapters.rocksmq.client.socket_coordinator_client import SocketCoordinatorClient
from tidewal.adapters.rocksmq.journal.channels import encode_id
from tidewal.adapters.rocksmq.owner.group_service import GroupService
from tidewal.runtime.errors import ChannelNotFound, Fenced, InvalidRequest, PositionLost, from_wire, to_wire
from tidewal.runtime.groups.coordinator import MAX_SINGLE_ACKS
from tidewal.runtime.groups.coordinator_client import Ack
from tidewal.runtime.groups.group_consumer import start_member
from tidewal.runtime.groups.local_coordinator_client import LocalCoordinatorClient
from tidewal.runtime.groups.request_client import SessionHeartbeat
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId

PLAIN = ChannelPolicy()
ME, OTHER = b"m" * 16, b"o" * 16


def carried(value):
    """As it is on the other side of a socket."""
    return msgpack.unpackb(msgpack.packb(value))


class Pair:
    """A client and the service, with msgpack between."""

    def __init__(self, store, *, client=ME, connection=1, service=None):
        self.service = service or GroupService(store._coordinator, return_s=0)
        self.connection, self.beats = connection, threading.Semaphore(0)
        self.service.connected(connection, client)
        self.loop = asyncio.get_running_loop()

    async def ask(self, method, *arguments, wait_s=0.0):
        entries = arguments[-1] if arguments and _are_entries(arguments[-1]) else None
        plain = carried(arguments[:-1] if entries else arguments)
        try:
            return carried(await self.service.answer(self.connection, method, [*plain, entries] if entries else plain))
        except Exception as error:
            raise from_wire(carried(to_wire(error))) from None

    def notify(self, method, *arguments):
        answer = self.service.answer(self.connection, method, carried(arguments))
        asyncio.run_coroutine_threadsafe(answer, self.loop)
        self.beats.release()


def _are_entries(argument):
    return isinstance(argument, list) and bool(argument) and isinstance(argument[0], Append)


@pytest.fixture
async def store(open_rocksmq, clock):
    store = await open_rocksmq(clock=clock)
    await store.create_channel("a", PLAIN)
    await store.create_channel("b", PLAIN)
    return store


@pytest.fixture
async def connect():
    """Make a coordinator client; all are closed at the end."""
    clients = []

    def make(pair):
        clients.append(SocketCoordinatorClient(pair))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


async def fill(store, channel, count):
    return [await store.append(channel, bytes([i])) for i in range(count)]


async def members(store):
    return {name: held for info in await store.groups() for name, held in info.members.items()}


# ---- what members do -------------------------------------------------------------------------------------------------


async def test_a_member_does_everything_over_the_socket(store, connect, helpers):
    remote = connect(Pair(store))
    ids = await fill(store, "a", 10)
    member = await start_member(store, remote, "g", ["a"])
    delivered = await anext(member)
    assert [entry.id for entry in delivered.entries] == ids
    await member.acknowledge(delivered, [*ids[:3], ids[5]])
    assert store.find("a").groups["g"].acked == {ids[5]}
    await member.seek("a", FromId(ids[2]))
    delivered = await anext(member)
    assert [entry.id for entry in delivered.entries] == ids[3:]
    (output,) = await member.commit([delivered], [Append("b", b"result", 7)])
    assert helpers.payloads(await helpers.take(store, "b", FromId(output, inclusive=True), 1)) == [b"result"]
    (info,) = await remote.groups()
    assert (info.name, info.positions, info.members) == ("g", {"a": ids[-1]}, {member.id: frozenset({"a"})})
    with pytest.raises(InvalidRequest):
        await remote.drop_group("g")
    await member.aclose()
    await remote.seek_group("g", "a", ids[4])
    assert (await remote.groups())[0].positions == {"a": ids[4]}
    again = await start_member(store, remote, "g", ["a"])
    assert [entry.id for entry in (await anext(again)).entries] == ids[5:]
    await again.aclose()
    await remote.drop_group("g")
    assert await remote.groups() == []


async def test_a_channel_goes_from_one_process_to_another(store, connect):
    service = GroupService(store._coordinator)
    one = await start_member(store, connect(Pair(store, service=service)), "g", ["a", "b"])
    assert one.channels == {"a", "b"}
    pair = Pair(store, service=service, client=OTHER, connection=2)
    other = await start_member(store, connect(pair), "g", ["a", "b"])
    async with asyncio.timeout(20):
        while not (len(one.channels) == len(other.channels) == 1):  # noqa: ASYNC110 -- members show it in no other way
            await asyncio.sleep(0)
    assert one.channels | other.channels == {"a", "b"}
    await one.aclose()
    await other.aclose()


async def test_single_ids_travel_both_ways(store, connect):
    remote = connect(Pair(store))
    ids = await fill(store, "a", 40)
    await remote.join("g", "m", ["a"], From.EARLIEST, 30.0)
    epoch = (await remote.assignment("g", "m", None, 0)).held["a"].epoch
    chosen = frozenset({ids[2], ids[3], ids[9], ids[39]})
    await remote.commit("g", "m", [Ack("a", epoch, ids[0], tuple(chosen))], [])
    assigned = (await remote.assignment("g", "m", None, 0)).held["a"]
    assert (assigned.epoch, assigned.acked_to, assigned.acked) == (epoch, ids[0], chosen)


async def test_errors_arrive_as_what_they_are(store, connect):
    remote = connect(Pair(store))
    with pytest.raises(ChannelNotFound):
        await remote.join("g", "m", ["nothing"], From.EARLIEST, 30.0)
    with pytest.raises(Fenced):
        await remote.assignment("g", "m", None, 0)
    with pytest.raises(Fenced):
        await remote.commit("g", "m", [Ack("a", 1, encode_id(1))], [])
    with pytest.raises(PositionLost):
        await store.seek_group("g", "a", FromId(encode_id(9)))
    assert threads_of(remote) == 0  # a member that could not join has no session to keep


async def test_a_question_for_changes_waits_for_one(store, connect):
    pair = Pair(store)
    remote = connect(pair)
    await remote.join("g", "m", ["a", "n*"], From.EARLIEST, 30.0)
    seen = await remote.assignment("g", "m", None, 0)
    waiting = asyncio.ensure_future(remote.assignment("g", "m", seen.version, 30))
    for _ in range(2):
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        pair.service._requests._memberships[
            "g", "m"
        ].changed.set()  # a wake that comes late: the change was seen already
    await store.create_channel("new", PLAIN)
    changed = await waiting
    assert changed.version > seen.version
    assert set(changed.held) == {"a", "new"}
    assert (await remote.assignment("g", "m", changed.version, 1e-9)).version == changed.version


# ---- sessions --------------------------------------------------------------------------------------------------------


async def test_a_silent_member_loses_its_session_and_a_beating_one_does_not(store, connect, clock):
    pair = Pair(store)
    remote = connect(pair)
    await remote.join("g", "beating", ["a", "b"], From.EARLIEST, 30.0)
    await remote.join("g", "silent", ["a", "b"], From.EARLIEST, 30.0)
    for half_seconds in range(62):  # as maintenance ticks: a jump would count as time without heartbeats
        clock.advance(0.5)
        store._tick()
        if half_seconds == 57:
            await pair.ask("beat", "g", "beating")
    assert await members(store) == {"beating": frozenset({"a", "b"})}
    with pytest.raises(Fenced):
        await remote.assignment("g", "silent", None, 0)


def test_beats_come_while_the_loop_is_blocked():
    """The loop that would send them does nothing else than wait here, for longer than three sessions last."""
    beats = threading.Semaphore(0)
    heartbeat = SessionHeartbeat(lambda *_: beats.release())

    async def blocked():
        heartbeat.add("g", "m", 0.003)
        for _ in range(10):
            assert beats.acquire(timeout=20)

    asyncio.run(blocked())
    heartbeat.remove("g", "m")


def test_the_thread_ends_with_the_last_member_and_comes_back_with_the_next():
    said = []
    beaten = threading.Event()

    def notify(*arguments):
        said.append(arguments)
        beaten.set()

    heartbeat = SessionHeartbeat(notify)
    heartbeat.add("g", "one", 1000.0)
    heartbeat.add("g", "two", 0.003)
    thread = heartbeat._heartbeat._thread
    assert beaten.wait(20)
    heartbeat.remove("g", "two")
    heartbeat.remove("g", "one")
    thread.join(20)
    assert not thread.is_alive()
    assert set(said) == {("beat", "g", "one"), ("beat", "g", "two")}
    heartbeat.add("g", "one", 1000.0)
    thread = heartbeat._heartbeat._thread
    assert thread.is_alive()
    heartbeat.stop()
    thread.join(20)
    assert not thread.is_alive()


async def test_members_of_a_process_that_died_have_left(store, connect):
    pair = Pair(store)
    await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)
    pair.service.disconnected(pair.connection)
    async with asyncio.timeout(20):
        while await members(store):  # noqa: ASYNC110 -- the service has no event for it
            await asyncio.sleep(0)
    assert pair.service._requests._memberships == pair.service._leaving == pair.service._clients == {}


async def test_a_client_that_comes_back_in_time_is_still_a_member(store, connect):
    pair = Pair(store)
    await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)
    pair.service.disconnected(pair.connection)
    back = Pair(store, service=pair.service, connection=2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert await members(store) == {"m": frozenset({"a"})}
    assert (await connect(back).assignment("g", "m", None, 0)).held


async def test_a_membership_that_another_client_took_over_outlives_the_first(store, connect):
    one = Pair(store)
    other = Pair(store, service=one.service, client=OTHER, connection=2)
    for pair in (one, other):
        await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)
    await one.ask("group.leave", "g", "m")
    assert await members(store) == {"m": frozenset({"a"})}
    one.service.disconnected(one.connection)
    await expired(one.service)
    assert await members(store) == {"m": frozenset({"a"})}
    other.service.disconnected(other.connection)
    await expired(one.service)
    assert await members(store) == one.service._requests._memberships == {}


async def test_a_member_of_the_owner_itself_outlives_the_client_that_it_follows(store, connect):
    pair = Pair(store)
    await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)
    member = await start_member(store, LocalCoordinatorClient(store._coordinator), "g", ["a"], member="m")
    pair.service.disconnected(pair.connection)
    await expired(pair.service)
    assert await members(store) == {"m": frozenset({"a"})}
    await member.aclose()


@pytest.mark.parametrize("joins", ["another client", "the member itself"])
async def test_a_refused_join_ends_no_membership(store, connect, joins):
    pair = Pair(store)
    await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)
    joining = pair if joins == "the member itself" else Pair(store, service=pair.service, client=OTHER, connection=2)
    with pytest.raises(ChannelNotFound):
        await joining.ask("group.join", "g", "m", ["nothing"], "earliest", 30.0)
    assert await members(store) == {"m": frozenset({"a"})}
    pair.service.disconnected(pair.connection)
    await expired(pair.service)
    assert await members(store) == pair.service._requests._memberships == {}


async def test_a_refused_join_does_not_silence_the_membership_there_was(store, connect):
    remote = connect(Pair(store))
    await remote.join("g", "m", ["a"], From.EARLIEST, 30.0)
    with pytest.raises(ChannelNotFound):
        await remote.join("g", "m", ["nothing"], From.EARLIEST, 20.0)
    assert remote._heartbeat._timeouts_s == {("g", "m"): 30.0}


async def expired(service):
    """Return when no client may come back any more."""
    async with asyncio.timeout(20):
        while service._leaving:  # noqa: ASYNC110 -- the service has no event for it
            await asyncio.sleep(0)


async def test_a_member_that_leaves_leaves_nothing_behind(store, connect):
    pair = Pair(store)
    remote = connect(pair)
    await remote.join("g", "m", ["a"], From.EARLIEST, 30.0)
    await remote.leave("g", "m")
    assert pair.service._requests._memberships == {}
    assert await members(store) == {}


def threads_of(remote):
    remote.close()
    thread = remote._heartbeat._heartbeat._thread
    if thread is not None:
        thread.join(20)
    return int(thread is not None and thread.is_alive())


# ---- hostile requests ------------------------------------------------------------------------------------------------

GOOD_ACK = ["a", 1, None, [], None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("group.nothing", []),
        ("beat", []),
        ("beat", ["g", 1]),
        ("group.join", ["g", "m", "a", "earliest", 30.0]),
        ("group.join", ["g", "m", [1], "earliest", 30.0]),
        ("group.join", ["g", "m", [], "earliest", 30.0]),
        ("group.join", ["g", "m", ["a"], "somewhere", 30.0]),
        ("group.join", ["g", "m", ["a"], "earliest", float("nan")]),
        ("group.join", ["g", "m", ["a"], "earliest", -1.0]),
        ("group.join", ["", "m", ["a"], "earliest", 30.0]),
        ("group.shares", ["g", "m", b"", 0]),
        ("group.commit", ["g", "m", GOOD_ACK, []]),
        ("group.commit", ["g", "m", [GOOD_ACK], ["no entry"]]),
        ("group.commit", ["g", "m", [["a", 1, "id", [], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, [1], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, [1, MAX_SINGLE_ACKS + 1], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, [1 << 63, 1], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, [1, -1], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, ["1", "1"], None]], []]),
        ("group.commit", ["g", "m", [["a", 1, None, [], "text"]], []]),
        ("group.seek", ["g", "m", "a", 1, "id"]),
        ("group.move", ["g", "a", None]),
        ("group.move", ["g", "a", b"no id of this log"]),
    ],
)
async def test_nonsense_is_refused_by_type_and_changes_nothing(store, connect, method, arguments):
    pair = Pair(store)
    with pytest.raises(InvalidRequest):
        await pair.ask(method, *arguments)
    assert await store.groups() == []
    assert pair.service._requests._memberships == {}
    await connect(pair).join("g", "m", ["a"], From.EARLIEST, 30.0)


async def test_a_client_without_an_id_cannot_join(store, connect):
    with pytest.raises(InvalidRequest):
        await connect(Pair(store, client=None)).join("g", "m", ["a"], From.EARLIEST, 30.0)


# ---- a real process --------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, sys, threading
from tidewal.adapters.rocksmq import open_wal

async def main():
    wal = await open_wal("rocksmq://" + sys.argv[1], own=False)
    members = [await wal.join("g", ["a"], session_timeout_s=1.5), await wal.join("h", ["b"], session_timeout_s=1000.0)]
    threading.Event().wait()  # a handler that never gives the loop back

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_process_that_blocks_its_loop_keeps_its_channels_until_it_dies(open_rocksmq, tmp_path):
    store = await open_rocksmq(serve=True)
    await store.create_channel("a", PLAIN)
    await store.create_channel("b", PLAIN)
    beats, enough = [], threading.Event()
    beat = store._coordinator.beat

    def counted(group, member):
        beats.append(group)
        if beats.count("g") >= 9:
            enough.set()
        beat(group, member)

    store._coordinator.beat = counted
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(tmp_path / "log"))
    try:
        assert await asyncio.to_thread(enough.wait, 30)  # three session timeouts
        assert sorted((await members(store)).values()) == [frozenset({"a"}), frozenset({"b"})]
    finally:
        child.kill()
        await child.wait()
    async with asyncio.timeout(20):
        while await members(store):  # noqa: ASYNC110 -- the service has no event for it
            await asyncio.sleep(0)
