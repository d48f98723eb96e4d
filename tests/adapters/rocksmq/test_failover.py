"""Processes that share a log go on when its owner dies, stops or leaves: each call in flight ends once, readers lose
nothing, and where no owner answers an error comes in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.adapters.rocksmq.backend import OPENING_S
from tidewal.adapters.rocksmq.client import owner_connection, shared
from tidewal.adapters.rocksmq.client.inflight import InflightAppends
from tidewal.adapters.rocksmq.journal.dedup_table import CLIENT_EXPIRY_S
from tidewal.adapters.rocksmq.owner.directory import Directory
from tidewal.runtime.clock import SystemClock
from tidewal.runtime.errors import (
    ChannelNotFound,
    Closed,
    ConfigError,
    DirectoryInUse,
    OutcomeUnknown,
    Overloaded,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.admission import PendingBytes
from tidewal.runtime.log.opening import open_wal as open_any
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.testing.clock import VirtualClock

PLAIN = ChannelPolicy()
EPHEMERAL = ChannelPolicy(ephemeral=True)
SEGMENT_BYTES = 256 * 1024

OWNER = """
import asyncio, sys
from tidewal.adapters.rocksmq import RocksMQ

async def main():
    store = await RocksMQ.open(sys.argv[1], segment_bytes=256 * 1024)
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def owner_process(directory):
    """Another process that owns the log and does nothing else."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, directory, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"open\n"
    yield child
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()


async def read_all(wal, channel="a"):
    latest = await wal.latest_id(channel)
    entries = []
    reader = wal.read(channel, From.EARLIEST)
    while latest is not None and (not entries or entries[-1].id < latest):
        entries += await anext(reader)
    await reader.aclose()
    return [bytes(entry.payload) for entry in entries]


def owner_of(directory: str) -> int:
    return int(Path(directory, "LOCK").read_text())


@pytest.mark.slow
async def test_one_of_several_takes_the_log_over_when_its_owner_is_killed(opening, owner_process, directory):
    wals = [await opening() for _ in range(3)]
    await wals[0].create_channel("a", PLAIN)
    await asyncio.gather(*(wal.append("a", b"before") for wal in wals))
    owner_process.kill()
    ids = await asyncio.gather(*(wal.append("a", b"after") for wal in wals))
    assert len(set(ids)) == 3
    assert [wal.store is not None for wal in wals].count(True) == 1
    assert owner_of(directory) == os.getpid()
    assert await read_all(wals[0]) == [b"before"] * 3 + [b"after"] * 3


@pytest.mark.slow
async def test_an_idle_process_takes_the_log_over_too(opening, owner_process, helpers):
    wal = await opening()
    owner_process.kill()
    await helpers.until(lambda: wal.store)


@pytest.mark.slow
async def test_appends_in_flight_at_a_kill_are_there_once_and_in_order(opening, owner_process):
    wals = [await opening() for _ in range(2)]
    await wals[0].create_channel("a", PLAIN)
    appends = [
        asyncio.ensure_future(wal.append("a", f"{number} {i}".encode()))
        for i in range(200)
        for number, wal in enumerate(wals)
    ]
    await appends[20]
    owner_process.kill()
    ids = await asyncio.gather(*appends)
    assert len(set(ids)) == 400
    payloads = [payload.split() for payload in await read_all(wals[0])]
    for number in (b"0", b"1"):
        assert [int(i) for name, i in payloads if name == number] == list(range(200))


async def test_what_was_durable_when_its_answer_was_lost_is_recognised_by_the_next_owner(
    opening, directory, helpers, slow_disk
):
    owner = await RocksMQ.open(directory, disk=slow_disk, segment_bytes=SEGMENT_BYTES)
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    await wal.create_channel("e", EPHEMERAL)
    slow_disk.go_on.clear()
    both = asyncio.ensure_future(wal.append_many([Append("a", b"1"), Append("e", b"1"), Append("a", b"2")]))
    await helpers.until(lambda: owner.find("e").queued)
    ephemeral = asyncio.ensure_future(wal.append("e", b"behind that"))
    await helpers.until(lambda: owner.find("e").queued == 2)
    leaving = asyncio.ensure_future(owner.close())
    await helpers.until(lambda: not os.path.exists(os.path.join(directory, "socket")))
    slow_disk.go_on.set()
    await leaving
    first, second, third = await both
    assert third == (int.from_bytes(first, "big") + 1).to_bytes(8, "big")
    assert wal.store is not None
    assert await read_all(wal) == [b"1", b"2"]
    with pytest.raises(Unavailable) as caught:
        await ephemeral
    assert caught.value.outcome_unknown is True
    assert await wal.append("e", b"new incarnation") > second


@pytest.mark.slow
async def test_readers_go_on_over_owners_without_gap_or_repetition(opening, helpers):
    owners = [await opening() for _ in range(5)]
    watcher = await opening(own=False)
    await watcher.create_channel("a", PLAIN)
    entries = []
    reading = asyncio.ensure_future(helpers.drain(watcher.read("a", From.EARLIEST), entries))
    other = owners[-1]
    local = []
    followed = asyncio.ensure_future(helpers.drain(other.read("a", From.LATEST), local))
    count = 0
    while len(owners) > 1:
        for _ in range(20):
            await watcher.append("a", str(count).encode())
            count += 1
        owner = next(wal for wal in owners if not isinstance(wal, shared.SharedRocksMQ) or wal.store is not None)
        if owner is other:
            break
        owners.remove(owner)
        await owner.close()
    await helpers.until(lambda: len(entries) == count)
    assert helpers.payloads(entries) == [str(i).encode() for i in range(count)]
    await helpers.until(lambda: local[-1].id == entries[-1].id)
    assert helpers.payloads(local) == [str(i).encode() for i in range(count)][-len(local) :]
    await watcher.close()
    await other.close()
    await asyncio.gather(reading, followed)


@pytest.mark.slow
async def test_more_readers_and_requests_than_may_wait_at_the_owner_take_turns(opening, helpers):
    await opening()
    wal = await opening()
    names = [f"c{i}" for i in range(400)]
    await asyncio.gather(*(wal.create_channel(name, PLAIN) for name in names))
    entries = []
    readers = [wal.read(name, From.EARLIEST) for name in names]
    reading = [asyncio.ensure_future(helpers.drain(reader, entries)) for reader in readers]
    await wal.append_many([Append(name, name.encode()) for name in names])
    await helpers.until(lambda: len(entries) == len(names))
    await wal.close()
    await asyncio.gather(*reading)


async def test_a_process_that_may_not_own_waits_for_an_owner_and_never_is_one(opening, helpers):
    owner = await opening()
    wal = await opening(own=False)
    await wal.create_channel("a", PLAIN)
    await owner.close()
    waiting = asyncio.ensure_future(wal.append("a", b"x"))
    await helpers.until(lambda: wal._search is not None and not wal._search.done() and len(wal._inflight))
    await opening(own=True)
    await waiting
    assert wal.store is None


@pytest.mark.slow
async def test_a_process_that_only_reads_goes_on_over_owners_and_never_is_one(opening, directory, helpers):
    with pytest.raises(ConfigError):
        await opening(own=True, read_only=True)
    with pytest.raises(Unavailable, match="there is no log"):
        await opening(read_only=True, failover_s=0)
    assert not Path(directory).exists()  # noqa: ASYNC240 -- a moment in a test
    entries = []
    owner = await opening()
    await owner.create_channel("a", PLAIN)
    wal = await open_any(f"rocksmq://{directory}", read_only=True)
    reading = asyncio.ensure_future(helpers.drain(wal.read("a", From.EARLIEST), entries))
    for count in range(1, 4):
        await owner.append("a", str(count).encode())
        await owner.close()
        described = asyncio.ensure_future(wal.describe("a"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not described.done()
        owner = await opening(own=True)  # which it could not be if the reader were
        assert (await described).name == "a"
    await helpers.until(lambda: len(entries) == 3)
    assert helpers.payloads(entries) == [b"1", b"2", b"3"]
    await wal.close()
    await reading


async def test_a_reader_is_told_at_once_that_no_process_has_the_log_open(opening, directory):
    """Although calls would wait for ever for another owner."""
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match=f"there is no log in {directory}, .*: check the URL"):
            await opening(read_only=True, failover_s=1e9)
        assert not Path(directory).exists()  # noqa: ASYNC240 -- a moment in a test
        await (await opening()).close()
        with pytest.raises(Unavailable, match=r"no process has the log in .* open.*without read_only"):
            await opening(read_only=True, failover_s=1e9)


async def test_a_process_that_must_not_own_the_log_waits_ten_seconds_for_one_that_does(opening, directory, helpers):
    """Not for as long as calls wait for another owner; and it says what there is, and what to do."""

    async def opened_in_vain() -> str:
        clock = Hand()
        waiting = asyncio.ensure_future(opening(own=False, failover_s=1e9, clock=clock))
        await helpers.until(lambda: clock.asked > 2)
        clock.now += OPENING_S - 0.1
        asked = clock.asked
        await helpers.until(lambda: clock.asked > asked + 2)
        assert not waiting.done()
        clock.now += 0.1
        with pytest.raises(Unavailable) as raised:
            await waiting
        return raised.value.message

    assert re.match(f"there is no log in {directory}, .*tidewal run.*own=False", await opened_in_vain())
    assert not Path(directory).exists()  # noqa: ASYNC240 -- a moment in a test
    await (await opening()).close()
    assert re.match(f"no process has the log in {directory} open, .*tidewal run.*own=False", await opened_in_vain())


async def test_a_reader_waits_for_an_owner_that_starts(directory, helpers):
    held = Directory(directory)  # a process that has the directory, and does not answer yet
    clock = Hand()
    opened = asyncio.ensure_future(open_wal(f"rocksmq://{directory}", read_only=True, clock=clock))
    await helpers.until(lambda: clock.asked > 2)
    clock.now += 10
    asked = clock.asked
    await helpers.until(lambda: clock.asked > asked + 4)
    assert not opened.done()
    held.close()
    with pytest.raises(Unavailable, match="no process has the log"):
        await opened


async def test_a_reader_that_was_connected_waits_for_the_next_owner(opening, directory, helpers):
    owner = await opening()
    await owner.create_channel("a", PLAIN)
    clock = Hand()
    wal = await open_wal(f"rocksmq://{directory}", read_only=True, clock=clock)
    await owner.close()
    described = asyncio.ensure_future(wal.describe("a"))
    asked = clock.asked
    await helpers.until(lambda: clock.asked > asked + 2)
    clock.now += 10
    asked = clock.asked
    await helpers.until(lambda: clock.asked > asked + 4)
    assert not described.done()
    await opening(own=True)
    assert (await described).name == "a"
    await wal.close()


class Hand(SystemClock):
    """A clock that a test puts forward; it counts how often it is asked."""

    now, asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return self.now


async def test_an_unknown_option_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="segment_byte"):
        await open_wal(f"rocksmq://{tmp_path}/log", segment_byte=1)


async def test_only_one_process_may_require_ownership(opening):
    await opening(own=True)
    with pytest.raises(DirectoryInUse):
        await opening(own=True)
    with pytest.raises(ConfigError):
        await open_wal("rocksmq://127.0.0.1:9?token_file=/none", own=True)


@pytest.mark.slow
async def test_where_no_owner_answers_everything_says_so_in_time_and_later_calls_try_again(opening):
    with pytest.raises(Unavailable):
        await opening(own=False, failover_s=0.05)
    owner = await opening()
    wal = await opening(own=False, failover_s=0.05)
    await wal.create_channel("a", PLAIN)
    reader = wal.read("a", From.EARLIEST)
    await wal.append("a", b"1")
    assert (await anext(reader))[0].payload == b"1"
    await owner.close()
    for call in (
        lambda: wal.append("a", b"2"),
        lambda: wal.append_many([Append("a", b"2")]),
        lambda: wal.channels(),
        lambda: anext(reader),
        lambda: wal.groups(),
    ):
        with pytest.raises(Unavailable) as caught:
            await call()
        assert "outcome_unknown" not in caught.value.fields
    await opening(own=True)
    await wal.append("a", b"3")
    assert [entry.payload for entry in await anext(reader)] == [b"3"]


def stopped(pid: int) -> bool:
    """Whether all threads of the process are."""
    return all(
        stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    )


@pytest.mark.slow
async def test_an_owner_that_is_stopped_ends_everything_with_an_error_in_time(
    opening, owner_process, monkeypatch, helpers
):
    monkeypatch.setattr(owner_connection, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(shared, "HELLO_S", 0.1)
    wal = await opening(failover_s=0.2)
    await wal.create_channel("a", PLAIN)
    reader = wal.read("a", From.EARLIEST)
    owner_process.send_signal(signal.SIGSTOP)
    await helpers.until(lambda: stopped(owner_process.pid))
    async with asyncio.timeout(20):
        results = await asyncio.gather(wal.append("a", b"x"), wal.describe("a"), anext(reader), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 3
    assert results[0].outcome_unknown is True
    owner_process.send_signal(signal.SIGCONT)
    await wal.append("a", b"y")
    assert await read_all(wal) in ([b"x", b"y"], [b"y"], [b"y", b"x"])


async def test_threads_submit_over_a_change_of_owners(opening):
    owner = await opening()
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    loop = asyncio.get_running_loop()
    answers: asyncio.Queue[object] = asyncio.Queue()

    def work(name: int) -> None:
        for i in range(100):
            wal.submit(
                [Append("a", f"{name} {i}".encode())], lambda got: loop.call_soon_threadsafe(answers.put_nowait, got)
            )

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    await answers.get()
    await owner.close()
    rest = [await asyncio.wait_for(answers.get(), 20) for _ in range(399)]
    for thread in threads:
        thread.join()
    assert not [answer for answer in rest if isinstance(answer, TidewalError)]
    payloads = [payload.split() for payload in await read_all(wal)]
    for name in range(4):
        assert [int(i) for appender, i in payloads if int(appender) == name] == list(range(100))


async def test_closing_finishes_what_was_submitted(opening, directory):
    await opening()
    wal = await opening()
    await wal.create_channel("a", PLAIN)
    appends = [asyncio.ensure_future(wal.append("a", b"x")) for _ in range(50)]
    await asyncio.sleep(0)
    await wal.close()
    await asyncio.gather(*appends)
    with pytest.raises(Closed):
        wal.submit([], lambda _: None)


async def test_a_port_serves_processes_with_the_secret_and_the_next_owner_may_take_it(opening, directory):
    owner = await opening(tcp_port=0)
    port = owner.tcp_port
    wal = await open_wal(f"rocksmq://127.0.0.1:{port}?token_file={directory}/token")
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"1")
    await owner.close()
    await opening(tcp_port=port)
    await wal.append("a", b"2")
    assert await read_all(wal) == [b"1", b"2"]
    assert wal.store is None
    await wal.close()


@pytest.mark.slow
async def test_a_group_member_goes_on_with_the_next_owner(opening, owner_process, helpers):
    wals = [await opening() for _ in range(2)]
    for name in ("in", "out"):
        await wals[0].create_channel(name, PLAIN)
    member = await wals[0].join("g", ["in"])
    await wals[1].append("in", b"1")
    async with asyncio.timeout(20):
        await member.acknowledge(await anext(member))
        owner_process.kill()
        await wals[1].append("in", b"2")
        delivered = await anext(member)
        assert [entry.payload for entry in delivered.entries] == [b"2"]
        with contextlib.suppress(TidewalError):  # the owner may have been lost after the delivery
            await member.commit([delivered], [Append("out", b"done")])
    await member.aclose()


# ---- appends in flight -----------------------------------------------------------------------------------------------


class Recorder:
    """An owner that answers when the test does."""

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.sent = []

    def submit_from(self, client, number, settled, entries, done):
        self.sent.append((number, settled, entries[0].payload, done))

    @property
    def numbers(self):
        return [number for number, *_ in self.sent]


@pytest.fixture
def inflight(clock):
    return InflightAppends(PendingBytes(10_000, "rocksmq://here"), clock, lambda _: None)


def submit(inflight, payload, channel="a"):
    results = []
    inflight.submit([Append(channel, payload)], results.append)
    return results


def test_what_is_in_flight_is_sent_again_in_order_and_what_is_answered_is_not(inflight):
    first, second = Recorder(1), Recorder(2)
    inflight.resume(first, set())
    results = [submit(inflight, bytes([i])) for i in range(4)]
    assert [settled for _, settled, *_ in first.sent] == [0, 0, 0, 0]
    first.sent[0][3]([b"id"])
    first.sent[2][3](ChannelNotFound("none"))
    inflight.interrupt()
    results.append(submit(inflight, b"\4"))
    inflight.resume(second, set())
    assert second.numbers == [2, 4, 5]
    assert [settled for _, settled, *_ in second.sent] == [1, 1, 1]
    second.sent[0][3]([b"id"])
    assert submit(inflight, b"\5") == []
    assert second.sent[-1][:2] == (6, 3)
    assert [bool(result) for result in results] == [True, True, True, False, False]
    first.sent[1][3]([b"late"])  # from an owner that is gone: answered once
    assert results[1] == [[b"id"]]


def test_an_ephemeral_append_is_not_sent_to_another_incarnation_but_to_the_same(inflight):
    inflight.resume(Recorder(1), set())
    sent, only = submit(inflight, b"x", "a"), submit(inflight, b"x", "e")
    inflight.interrupt()
    later = submit(inflight, b"y", "e")
    same = Recorder(1)
    inflight.resume(same, {"e"})
    assert same.numbers == [1, 2, 3]
    inflight.interrupt()
    assert inflight.sent_before(2) == {"a", "e"}
    other = Recorder(2)
    inflight.resume(other, {"e"})
    assert other.numbers == [1]
    assert sent == []
    assert only[0].outcome_unknown is True
    assert later[0].outcome_unknown is True


def test_what_is_too_old_for_owners_to_remember_is_not_sent_again(inflight, clock: VirtualClock):
    inflight.resume(Recorder(1), set())
    old = submit(inflight, b"x")
    clock.advance(CLIENT_EXPIRY_S / 2 + 1)
    new = submit(inflight, b"y")
    inflight.interrupt()
    second = Recorder(2)
    inflight.resume(second, set())
    assert second.numbers == [2]
    assert isinstance(old[0], OutcomeUnknown)
    assert new == []


def test_only_what_an_owner_got_has_an_unknown_outcome(inflight):
    waiting = submit(inflight, b"x")
    inflight.fail(Unavailable("nobody"))
    assert "outcome_unknown" not in waiting[0].fields
    inflight.resume(Recorder(1), set())
    sent = submit(inflight, b"x")
    inflight.fail(Unavailable("nobody"))
    assert sent[0].outcome_unknown is True


def test_what_is_in_flight_is_bounded_and_belongs_to_the_log(inflight):
    buffer = bytearray(b"x" * 9_000)
    submit(inflight, buffer)
    with pytest.raises(Overloaded) as caught:
        submit(inflight, bytes(9_000))
    assert caught.value.limit == "pending_bytes"
    buffer[:] = b"y" * 9_000
    owner = Recorder(1)
    inflight.resume(owner, set())
    assert owner.sent[0][2] == b"x" * 9_000
    owner.sent[0][3]([b"id"])
    submit(inflight, bytes(9_000))
