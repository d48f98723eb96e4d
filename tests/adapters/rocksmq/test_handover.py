"""A process that requires ownership of a directory gets it from an owner that does not: each call in flight ends once,
readers and members go on, and no other process can make the owner yield."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from tests.adapters.rocksmq.open_files import open_files
from tidewal.adapters.rocksmq import RocksMQ, SharedRocksMQ
from tidewal.adapters.rocksmq.address import Address
from tidewal.adapters.rocksmq.client.owner_connection import OwnerConnection
from tidewal.adapters.rocksmq.owner.directory import OwnershipRequest, ownership_requested
from tidewal.adapters.rocksmq.protocol import HEADER, VERSION, encode
from tidewal.runtime.errors import Closed, DirectoryInUse, InvalidRequest, Moved, TidewalError, Unavailable, from_wire
from tidewal.runtime.log.migration_state import MigrationPhase, MigrationState, change_migration_state
from tidewal.runtime.log.replication_state import ReplicationPhase, ReplicationState, ReplicationStates
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

pytestmark = pytest.mark.slow

PLAIN = ChannelPolicy(retention_s=None)
SEGMENT_BYTES = 256 * 1024
BOUND_S = 20.0  # how long a test waits for what takes a fraction of a second

NODE = """
import asyncio, sys
from tidewal.adapters.rocksmq import open_wal

async def main():
    await open_wal("rocksmq://" + sys.argv[1], own=True, segment_bytes=1024 * 1024)
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def read_all(wal, channel="a"):
    latest = await wal.latest_id(channel)
    entries = []
    reader = wal.read(channel, From.EARLIEST)
    while latest is not None and (not entries or entries[-1].id < latest):
        entries += await anext(reader)
    await reader.aclose()
    return entries


def owner_of(directory: str) -> int:
    text = Path(directory, "LOCK").read_text().strip()
    return int(text) if text else 0


# ---- the owner -------------------------------------------------------------------------------------------------------


async def test_the_first_owner_and_one_that_took_over_both_yield(opening, helpers):
    first, second = await opening(), await opening()
    assert isinstance(first, SharedRocksMQ)
    assert first.store is not None
    await first.create_channel("a", PLAIN)
    node = await opening(own=True)
    assert first.store is None
    await asyncio.gather(first.append("a", b"1"), second.append("a", b"2"))
    await node.close()
    await asyncio.gather(first.append("a", b"3"), second.append("a", b"4"))
    (owner,) = [wal for wal in (first, second) if wal.store is not None]
    async with asyncio.timeout(BOUND_S):
        node = await opening(own=True)
    assert owner.store is None
    payloads = sorted(helpers.payloads(await read_all(node)))
    assert payloads == [b"1", b"2", b"3", b"4"]


async def test_a_log_that_was_migrated_without_its_owner_is_not_taken_over(opening, directory):
    owner, other = await opening(), await opening()
    await owner.create_channel("a", PLAIN)
    node = await opening(own=True)
    for wal in (owner, other):
        await wal.append("a", b"before")
    state = MigrationState(MigrationPhase.MIGRATING, "id", "rocksmq:///new")
    await change_migration_state(node, state)
    await change_migration_state(node, replace(state, phase=MigrationPhase.MIGRATED))
    latest = await node.latest_id("a")
    await node.close()
    async with asyncio.timeout(BOUND_S):
        refused = await asyncio.gather(*(wal.append("a", b"behind") for wal in (owner, other)), return_exceptions=True)
    assert all(isinstance(error, Moved) and error.url == state.other for error in refused), refused
    assert (owner.store, other.store) == (None, None)
    node = await opening(own=True)
    assert await node.latest_id("a") == latest


@pytest.mark.parametrize("replaced_by", ["migration", "promotion"])
async def test_a_program_that_never_owns_the_log_writes_nothing_to_one_that_was_replaced(opening, replaced_by):
    owner = await opening(own=True)
    await owner.create_channel("a", PLAIN)
    program, tail = await opening(own=False), await opening(read_only=True)
    await program.append("a", b"before")
    if replaced_by == "migration":
        state = MigrationState(MigrationPhase.MIGRATING, "id", "rocksmq:///new")
        await change_migration_state(owner, state)
        await change_migration_state(owner, replace(state, phase=MigrationPhase.MIGRATED))
    else:
        state = ReplicationState(ReplicationPhase.REPLACED, other="rocksmq:///new")
        await ReplicationStates(owner).change(state)
    latest = await owner.latest_id("a")
    await owner.close()
    served = await opening(own=True)  # as `tidewal tail` does, which looks at what was migrated
    async with asyncio.timeout(BOUND_S):
        for _ in range(2):
            with pytest.raises(Moved) as raised:
                await program.append("a", b"behind")
            assert raised.value.url == state.other
        assert await served.latest_id("a") == await tail.latest_id("a") == latest


async def test_a_hand_over_is_not_held_up_by_a_close_that_fails(opening, helpers):
    first = await opening()
    await first.create_channel("a", ChannelPolicy())
    sent = [b"kept"]
    await first.append("a", sent[0])

    def broken() -> None:
        raise Exception("IO error: No space left on device")

    first.store._undo.insert(-1, broken)
    node = await opening(own=True)
    assert first.store is None
    await first.append("a", b"through the next owner")
    assert helpers.payloads(await helpers.take(node, "a", From.EARLIEST, 2)) == [*sent, b"through the next owner"]


async def test_an_owner_that_requires_ownership_does_not_yield(opening, directory):
    node = await opening(own=True)
    await node.create_channel("a", PLAIN)
    started = time.monotonic()
    with pytest.raises(DirectoryInUse) as caught:
        await opening(own=True)
    assert time.monotonic() - started < BOUND_S  # refused, not tired of waiting
    assert caught.value.pid == os.getpid()
    assert await node.append("a", b"undisturbed")
    assert not ownership_requested(directory)


async def test_waiting_is_bounded_and_leaves_no_request(opening, directory):
    async with asyncio.timeout(BOUND_S):
        silent = await RocksMQ.open(directory, segment_bytes=SEGMENT_BYTES, serve=False)
        with pytest.raises(DirectoryInUse):
            await opening(own=True, failover_s=0.05)
        waiting = asyncio.ensure_future(opening(own=True))
        while not ownership_requested(directory):  # noqa: ASYNC110 -- a lock of the file system wakes no waiter
            await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert not ownership_requested(directory)
        await silent.close()
        await opening(own=True)


async def test_while_a_process_requests_ownership_no_other_takes_the_directory(opening, directory, helpers):
    owner, other = await opening(), await opening()
    await owner.create_channel("a", PLAIN)
    request = OwnershipRequest(directory)
    request.make()
    assert ownership_requested(directory)
    await owner.close()
    waiting = asyncio.ensure_future(other.append("a", b"x"))
    await helpers.until(lambda: len(other._inflight) and other._search is not None)
    with pytest.raises(Unavailable):
        await opening(failover_s=0.05)
    assert other.store is None
    request.release()  # it has died
    await waiting
    assert other.store is not None


async def test_an_owner_yields_only_to_a_process_with_a_request(opening, directory, helpers):
    wal = await opening()
    connection = await OwnerConnection.open(directory, os.urandom(16), on_lost=print)
    await connection.ask("stand_down")
    turn = asyncio.get_running_loop().create_future()
    wal._loop.call_soon(turn.set_result, None)
    await turn
    assert wal.store is not None
    request = OwnershipRequest(directory)
    request.make()
    await connection.ask("stand_down")
    await helpers.until(lambda: wal.store is None)
    request.release()
    await helpers.until(lambda: wal.store is not None)  # no process has taken it
    await connection.close()


async def test_a_stranger_at_the_port_cannot_make_it_let_go(opening, directory, tmp_path):
    wal = await opening(tcp_port=0)
    request = OwnershipRequest(directory)
    request.make()  # all else that it takes
    (tmp_path / "token").write_bytes(bytes(32))
    with pytest.raises(InvalidRequest):
        await OwnerConnection.open(
            Address(port=wal.tcp_port, token_file=str(tmp_path / "token")), bytes(16), on_lost=print
        )
    for requests in (
        [[1, "stand_down"]],
        [[0, "stand_down"]],
        [[1, "hello", VERSION, bytes(16)], [2, "stand_down"]],
        [[1, "hello", VERSION, bytes(16), bytes(32)], [2, "stand_down"]],
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", wal.tcp_port)
        writer.write(b"".join(encode(request)[0] for request in requests))
        async with asyncio.timeout(BOUND_S):
            head_bytes, *_ = HEADER.unpack(await reader.readexactly(HEADER.size))
            _, kind, error = msgpack.unpackb(await reader.readexactly(head_bytes))
            assert (kind, type(from_wire(error))) == ("error", InvalidRequest)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
    connection = await OwnerConnection.open(
        Address(port=wal.tcp_port, token_file=f"{directory}/token"), bytes(16), on_lost=print
    )
    with pytest.raises(InvalidRequest):
        await connection.ask("stand_down", "now")
    await connection.close()
    assert wal.store is not None
    request.release()


# ---- what is in flight at a process that yields ----------------------------------------------------------------------


async def test_appends_around_a_handover_are_there_once_and_in_order(opening, helpers, slow_disk):
    wal = await opening(disk=slow_disk)
    await wal.create_channel("a", PLAIN)
    loop = asyncio.get_running_loop()
    answers: asyncio.Queue[object] = asyncio.Queue()

    def submit(i: int) -> None:
        wal.submit([Append("a", str(i).encode())], lambda got: loop.call_soon_threadsafe(answers.put_nowait, got))

    slow_disk.go_on.clear()
    before = [asyncio.ensure_future(wal.append("a", str(i).encode())) for i in range(10)]
    await asyncio.sleep(0)
    submit(10)
    owning = asyncio.ensure_future(opening(own=True))
    await helpers.until(lambda: wal.store is None)
    submit(11)
    after = [asyncio.ensure_future(wal.append("a", str(i).encode())) for i in range(12, 20)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*before, *after))
    slow_disk.go_on.set()
    async with asyncio.timeout(BOUND_S):
        node = await owning
        ids = [*await asyncio.gather(*before), *await asyncio.gather(*after)]
        got = [await answers.get(), await answers.get()]
    assert not [answer for answer in got if isinstance(answer, TidewalError)]
    entries = await read_all(node)
    assert helpers.payloads(entries) == [str(i).encode() for i in range(20)]
    assert [entries[i].id for i in (*range(10), *range(12, 20))] == ids
    assert [entries[i].id for i in (10, 11)] == [answer[0] for answer in got]


async def test_threads_submit_over_handovers(opening):
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    loop = asyncio.get_running_loop()
    answers: asyncio.Queue[object] = asyncio.Queue()
    stop = threading.Event()
    counts = [0] * 4

    def work(name: int) -> None:
        while not stop.is_set():
            settled = threading.Event()

            def done(result: object, settled: threading.Event = settled) -> None:
                settled.set()
                loop.call_soon_threadsafe(answers.put_nowait, result)

            wal.submit([Append("a", f"{name} {counts[name]}".encode())], done)
            counts[name] += 1
            if counts[name] % 8 == 0:
                settled.wait(BOUND_S)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    try:
        async with asyncio.timeout(2 * BOUND_S):
            for _ in range(3):
                await asyncio.gather(*(answers.get() for _ in range(100)))
                node = await opening(own=True)
                await asyncio.gather(*(answers.get() for _ in range(100)))
                await node.close()
                await wal.describe("a")
    finally:
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    rest = [await answers.get() for _ in range(sum(counts) - 600)]
    assert not [answer for answer in rest if isinstance(answer, TidewalError)]
    payloads = [bytes(entry.payload).split() for entry in await read_all(wal)]
    for name in range(4):
        assert [int(i) for appender, i in payloads if int(appender) == name] == list(range(counts[name]))


async def test_a_call_that_meets_a_log_just_yielded_goes_on_with_the_next_owner(opening, helpers):
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    stale = wal.store
    node = await opening(own=True)
    await wal.append("a", b"0")
    wal._store = stale  # as a thread has seen it that was interrupted there
    assert stale.closed
    assert await helpers.submitted(wal, [Append("a", b"1")])
    wal._store = stale
    assert await wal.append("a", b"2")
    wal._store = None
    asked = []

    async def latest(owner):
        asked.append(owner)
        return await (stale if len(asked) == 1 else owner).latest_id("a")

    wal.superseded = lambda owner: len(asked) == 1
    assert await wal.ask(latest)
    assert len(asked) == 2
    assert helpers.payloads(await read_all(node)) == [b"0", b"1", b"2"]


async def test_a_log_that_is_closed_says_so_after_a_handover_too(opening):
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    await opening(own=True)
    await wal.close()
    with pytest.raises(Closed):
        await wal.append("a", b"x")
    with pytest.raises(Closed):
        wal.submit([Append("a", b"x")], print)


async def test_closing_during_a_handover_finishes_what_was_submitted(opening, helpers, slow_disk):
    wal = await opening(disk=slow_disk)
    await wal.create_channel("a", PLAIN)
    slow_disk.go_on.clear()
    appends = [asyncio.ensure_future(wal.append("a", b"x"))]
    await asyncio.sleep(0)
    owning = asyncio.ensure_future(opening(own=True))
    await helpers.until(lambda: wal.store is None)
    appends.append(asyncio.ensure_future(wal.append("a", b"y")))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(wal.close())
    await asyncio.sleep(0)
    slow_disk.go_on.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*appends, closing)
        assert helpers.payloads(await read_all(await owning)) == [b"x", b"y"]


async def test_the_search_for_the_next_owner_begins_when_the_own_log_is_closed(opening, directory, helpers, slow_disk):
    wal = await opening(disk=slow_disk, failover_s=0)
    await wal.create_channel("a", PLAIN)
    slow_disk.go_on.clear()
    request = OwnershipRequest(directory)
    request.make()
    before = asyncio.ensure_future(wal.append("a", b"x"))
    await asyncio.sleep(0)
    wal.store.request_yield()
    await helpers.until(lambda: wal.store is None)
    after = asyncio.ensure_future(wal.append("a", b"y"))
    await helpers.until(lambda: not os.path.exists(f"{directory}/socket"))
    request.release()
    slow_disk.go_on.set()
    async with asyncio.timeout(BOUND_S):
        assert await before < await after
    assert helpers.payloads(await read_all(wal)) == [b"x", b"y"]


# ---- readers, requests, groups ---------------------------------------------------------------------------------------


async def test_readers_and_requests_go_on_over_handovers(opening, helpers):
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"0")
    everything, newest, entries, late = wal.read("a", From.EARLIEST), wal.read("a", From.LATEST), [], []
    assert helpers.payloads(await anext(everything)) == [b"0"]
    reading = [asyncio.ensure_future(helpers.drain(everything, entries))]
    waiting = asyncio.ensure_future(anext(newest))
    await helpers.until(lambda: newest._local is not None and newest._local.next_id)  # "latest" is behind 0 now
    idle = wal.read("a", From.EARLIEST)
    node = await opening(own=True)
    count = 1
    async with asyncio.timeout(BOUND_S):
        for _ in range(3):
            for _ in range(5):
                await asyncio.gather(
                    wal.append("a", str(count).encode()), wal.describe("a"), wal.create_channel(f"c{count}", PLAIN)
                )
                count += 1
            await node.close()
            await wal.append("a", str(count).encode())
            count += 1
            assert wal.store is not None
            node, *_ = await asyncio.gather(
                opening(own=True), wal.create_channel(f"d{count}", PLAIN), wal.groups(), wal.channels()
            )
        late += await waiting
        reading.append(asyncio.ensure_future(helpers.drain(newest, late)))
        await helpers.until(lambda: len(entries) == len(late) == count - 1)
        assert helpers.payloads(await anext(idle))[0] == b"0"
    expected = [str(i).encode() for i in range(1, count)]
    assert helpers.payloads(entries) == expected
    assert helpers.payloads(late) == expected
    await wal.close()
    await asyncio.gather(*reading)


async def test_a_reader_that_had_not_begun_begins_at_the_next_owner(opening, helpers):
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"0")
    reader = wal.read("a", From.LATEST)
    await wal.ask(reader._read)  # and nothing was read from there yet
    assert reader._local is not None
    await opening(own=True)
    waiting = asyncio.ensure_future(anext(reader))
    await helpers.until(lambda: reader._start[0] == "next")
    await wal.append("a", b"1")
    assert helpers.payloads(await waiting) == [b"1"]


async def test_a_member_in_a_process_that_lets_go_stays_in_its_group(opening):
    wal = await opening()
    for name in ("in", "out"):
        await wal.create_channel(name, PLAIN)
    member = await wal.join("g", ["in"])
    async with asyncio.timeout(BOUND_S):
        await wal.append("in", b"1")
        await member.acknowledge(await anext(member))
        await wal.append("in", b"2")
        delivered = await anext(member)
        node = await opening(own=True)
        with pytest.raises(TidewalError):  # its assignment is over: the entry comes again
            await member.commit([delivered], [Append("out", b"2")])
        again = await anext(member)
        assert [entry.payload for entry in again.entries] == [b"2"]
        await member.commit([again], [Append("out", b"2")])
        await node.close()
        await wal.append("in", b"3")
        delivered = await anext(member)
        assert [entry.payload for entry in delivered.entries] == [b"3"]
        assert (await wal.groups())[0].members
    assert len(await read_all(wal, "out")) == 1
    await member.aclose()


async def test_joining_goes_on_at_the_next_owner(opening, monkeypatch):
    wal = await opening()
    await wal.create_channel("in", PLAIN)
    await wal.append("in", b"1")
    join, nodes = wal._shared_client.join, []

    async def join_and_lose(*arguments):
        await join(*arguments)
        if not nodes:
            nodes.append(await opening(own=True))

    monkeypatch.setattr(wal._shared_client, "join", join_and_lose)
    async with asyncio.timeout(BOUND_S):
        member = await wal.join("g", ["in"])
        assert [entry.payload for entry in (await anext(member)).entries] == [b"1"]
    assert nodes
    await member.aclose()


# ---- what is left behind ---------------------------------------------------------------------------------------------


async def test_no_file_stays_open(opening, directory, spawn):
    await (await opening()).close()  # what is loaded once is loaded now
    process = await start_node(spawn, directory)
    before = open_files()
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"x")
    await asyncio.to_thread(lambda: asyncio.run(elsewhere(wal)))
    assert not open_files() <= before
    await wal.close()
    assert open_files() <= before
    process.kill()
    await process.communicate()  # to the end of its pipe, which is a file of this process, too
    before = open_files()
    stand_in = await opening()
    await stand_in.append("a", b"y")
    node = await opening(own=True)
    await stand_in.append("a", b"z")
    await stand_in.close()
    await node.close()
    assert open_files() <= before


async def elsewhere(wal: SharedRocksMQ) -> None:
    """Append from another loop, which ends then."""
    await wal.append("a", b"from another loop")


# ---- processes -------------------------------------------------------------------------------------------------------


class Appending:
    """A process that appends without end, and what was acknowledged to it: (channel, id) → (name, count)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.acknowledged: dict[tuple[str, bytes], tuple[str, int]] = {}
        self.errors: list[str] = []
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for line in self.process.stdout:
            first, *words = line.decode().split()
            if first == "error":
                self.errors.append(line.decode())
                continue
            for word in words[1:]:
                channel, count, id = word.split(":")
                self.acknowledged[channel, bytes.fromhex(id)] = self.name, int(count)


@pytest.fixture
async def spawn():
    started = []

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def consume(member, consumed: set[tuple[str, bytes]]) -> None:
    acknowledged = set()
    async for delivered in member:
        keys = {(delivered.channel, entry.id) for entry in delivered.entries}
        assert not keys & acknowledged
        consumed |= keys
        with contextlib.suppress(TidewalError):  # the owner went: it is delivered again, unless it was durable
            await member.acknowledge(delivered)
            acknowledged |= keys


async def start_node(spawn, directory: str) -> asyncio.subprocess.Process:
    node = await spawn("-c", NODE, directory)
    assert await asyncio.wait_for(node.stdout.readline(), BOUND_S) == b"open\n"
    return node


async def test_a_node_that_comes_back_gets_its_directory(spawn, directory, opening, helpers, seed):
    script = str(Path(__file__).with_name("crash_client.py"))
    node = await start_node(spawn, directory)
    clients = [
        Appending(name, await spawn(script, directory, name, str(seed + i))) for i, name in enumerate(("p0", "p1"))
    ]
    watcher = await opening(own=False)
    await helpers.until(lambda: all(len(client.acknowledged) > 20 for client in clients))
    consumed, read = set(), []
    member = await watcher.join("g", ["c0"], session_timeout_s=5.0)
    consuming = asyncio.ensure_future(consume(member, consumed))
    reading = asyncio.ensure_future(helpers.drain(watcher.read("c0", From.EARLIEST), read))
    pids = {client.process.pid for client in clients}
    for _ in range(2):
        node.kill()
        await node.wait()
        await helpers.until(lambda: owner_of(directory) in pids)
        seen = len(consumed)
        await helpers.until(lambda seen=seen: len(consumed) > seen)
        node = await start_node(spawn, directory)
        assert owner_of(directory) == node.pid
        before = [len(client.acknowledged) for client in clients]
        await helpers.until(
            lambda before=before: all(len(each.acknowledged) > n for each, n in zip(clients, before, strict=True))
        )
    for client in clients:
        client.process.terminate()
    for client in clients:
        assert await asyncio.wait_for(client.process.wait(), BOUND_S) == 0
        await client.reading
        assert client.errors == []
    for channel in ("c0", "c1", "c2"):
        entries = await read_all(watcher, channel)
        got = {}
        for entry in entries:
            name, count, _ = bytes(entry.payload).decode().split()
            got[channel, entry.id] = name, int(count)
        for client in clients:
            mine = {key: value for key, value in client.acknowledged.items() if key[0] == channel}
            assert mine.items() <= got.items()
            assert sorted(count for name, count in got.values() if name == client.name) == [*range(1, len(mine) + 1)]
        if channel == "c0":
            async with asyncio.timeout(BOUND_S):
                await helpers.until(lambda entries=entries: len(read) >= len(entries))
                await helpers.until(lambda got=got: consuming.done() or consumed == got.keys())
            assert [entry.id for entry in read] == [entry.id for entry in entries]
            assert consumed == got.keys()
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    await member.aclose()
    await watcher.close()
    await reading
