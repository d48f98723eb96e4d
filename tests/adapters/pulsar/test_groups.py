"""Groups whose members are processes: killed, stopped and cut off; and what of them can be seen in Pulsar itself.

`TIDEWAL_CRASH_KILLS_PULSAR` says how often the pipeline is killed (5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.adapters.pulsar.group_steps import BOUND_S, PLAIN, append, create, one, payloads
from tidewal.adapters.pulsar.topics import HOLD_CURSOR, group_topic
from tidewal.runtime.errors import Fenced, InvalidRequest, Unavailable
from tidewal.runtime.groups import group_log
from tidewal.runtime.groups.commands import Join
from tidewal.runtime.log.wal import Append, From

pytestmark = pytest.mark.broker

KILLS = int(os.environ.get("TIDEWAL_CRASH_KILLS_PULSAR", "5"))
SOON_S = 15  # less than the session timeout of 30 s


class Child:
    """A process of `group_child.py`."""

    def __init__(self, process) -> None:
        self._process = process
        self.send = process.send_signal

    async def line(self, bound_s=BOUND_S) -> list[str]:
        async with asyncio.timeout(bound_s):
            line = await self._process.stdout.readline()
        assert line, "the process ended by itself"
        return line.decode().split()

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


@pytest.fixture
async def start(pulsar, namespace):
    """Start a child that does this; all are ended with the test."""
    children = []
    url = f"{pulsar.url}/{namespace}?web_url={pulsar.web_url}"

    async def start_one(what: str) -> Child:
        script = str(Path(__file__).with_name("group_child.py"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, what, url, stdout=asyncio.subprocess.PIPE
        )
        children.append(Child(process))
        return children[-1]

    yield start_one
    for child in children:
        await child.end()


async def test_the_channels_of_a_killed_process_go_to_the_others_before_its_session_ends(open_wal, start):
    wal = await open_wal()
    await create(wal, "c0")
    await append(wal, "c0", 1, 2, 3)
    child = await start("take")
    assert await child.line() == ["has", "1", "2", "3"]
    member = await wal.join("g", ["c*"])
    assert member.channels == set()
    child.send(signal.SIGKILL)
    delivered = await one(member, SOON_S)
    assert payloads(delivered) == ["1", "2", "3"]
    await member.acknowledge(delivered)


async def test_a_stopped_process_loses_its_channels_and_its_late_acknowledgement_counts_for_nothing(open_wal, start):
    wal = await open_wal()
    await create(wal, "c0")
    ids = await append(wal, "c0", 1, 2, 3)
    child = await start("late")
    assert await child.line() == ["has", "1", "2", "3"]
    member = await wal.join("g", ["c*"], session_timeout_s=3.0)
    child.send(signal.SIGSTOP)
    delivered = await one(member)
    assert payloads(delivered) == ["1", "2", "3"]
    await member.acknowledge(delivered, ids[:1])
    child.send(signal.SIGUSR1)
    child.send(signal.SIGCONT)
    assert await child.line() == ["fenced"]
    (info,) = await wal.groups()
    assert info.positions == {"c0": ids[0]}
    await member.acknowledge(delivered)


@pytest.mark.long
async def test_a_process_that_computes_keeps_its_channels(open_wal, start):
    wal = await open_wal()
    await create(wal, "c0")
    await append(wal, "c0", 1)
    child = await start("busy")
    assert await child.line() == ["has", "1"]
    member = await wal.join("g", ["c*"], session_timeout_s=3.0)
    assert await child.line() == ["acknowledged"]
    assert member.channels == set()


async def test_a_channel_that_is_being_revoked_goes_after_the_session_timeout_at_the_latest(open_wal):
    wal, other = await open_wal(), await open_wal()
    await create(wal, "c0", "c1")
    ids = {channel: await append(wal, channel, 1, 2) for channel in ("c0", "c1")}
    first = await wal.join("g", ["c*"], session_timeout_s=1.5)
    kept = [await one(first), await one(first)]
    second = await other.join("g", ["c*"], session_timeout_s=1.5)
    delivered = await one(second)
    assert [entry.id for entry in delivered.entries] == ids[delivered.channel]
    await second.acknowledge(delivered)
    (gone,) = [each for each in kept if each.channel == delivered.channel]
    with pytest.raises(Fenced):
        await first.acknowledge(gone)
    kept.remove(gone)
    await first.acknowledge(*kept)
    (info,) = await wal.groups()
    assert info.positions == {channel: each[-1] for channel, each in ids.items()}


async def test_a_channel_that_another_process_makes_is_found(open_wal):
    wal, other = await open_wal(), await open_wal()
    await create(wal, "c0")
    member = await wal.join("g", ["c*"], start=From.LATEST)
    await create(other, "c1", "d1")
    await append(other, "c1", 1, 2)
    delivered = await one(member)
    assert (delivered.channel, payloads(delivered)) == ("c1", ["1", "2"])
    await member.acknowledge(delivered)
    await other.drop_channel("c1")
    await create(other, "c1")
    await append(other, "c1", 3)
    delivered = await one(member)
    assert (delivered.channel, payloads(delivered)) == ("c1", ["3"])
    assert member.channels == {"c0", "c1"}


async def test_outputs_of_a_process_killed_between_deciding_and_appending_are_appended_by_others(
    open_wal, start, helpers
):
    wal = await open_wal()
    await create(wal, "c0", "out-c0")
    member = await wal.join("copiers", ["d*", "c*"])
    await member.aclose()
    ids = await append(wal, "c0", *range(10))
    child = await start("half")
    with contextlib.suppress(AssertionError):
        await child.line()
    member = await wal.join("copiers", ["c*"])  # the next member finds the rest
    entries = await helpers.take(wal, "out-c0", From.EARLIEST, 10)
    assert helpers.payloads(entries) == [str(number).encode() for number in range(10)]
    (info,) = await wal.groups()
    assert info.positions == {"c0": ids[-1]}
    await append(wal, "c0", "more")
    assert payloads(await one(member)) == ["more"]
    assert await wal.latest_id("out-c0") == entries[-1].id


async def test_more_outputs_than_fit_into_one_record_are_committed_together(open_wal, helpers):
    wal = await open_wal()
    await create(wal, "c0", "out")
    await append(wal, "c0", 1)
    member = await wal.join("g", ["c0"])
    outputs = [Append("out", bytes([n]) * 600_000, n + 1) for n in range(5)]
    ids = await member.commit([await one(member)], outputs)
    entries = await helpers.take(wal, "out", From.EARLIEST, 5)
    assert [entry.id for entry in entries] == ids
    assert [(entry.payload, entry.timestamp) for entry in entries] == [(o.payload, o.timestamp) for o in outputs]


async def test_the_log_of_a_group_stays_short(open_wal, monkeypatch):
    monkeypatch.setattr(group_log, "RECORDS_PER_SNAPSHOT", 20)
    wal, other = await open_wal(), await open_wal()
    await create(wal, "c0", "c1")
    member = await wal.join("g", ["c*"])
    begin = (await asyncio.to_thread(wal.contents, group_topic("g"))).first
    for number in range(70):
        await append(wal, f"c{number % 2}", number)
        await member.acknowledge(await one(member))
    async with asyncio.timeout(BOUND_S):
        while (await asyncio.to_thread(wal.contents, group_topic("g"))).first <= begin:
            pass
    positions = {channel: await wal.latest_id(channel) for channel in ("c0", "c1")}
    (info,) = await other.groups()  # which begins to read at the snapshot
    assert (info.positions, set(info.members)) == (positions, {member.id})
    second = await other.join("g", ["c*"])
    await append(wal, "c0", "x")
    await append(wal, "c1", "x")
    assert payloads(await one(second)) == ["x"]
    assert payloads(await one(member)) == ["x"]


async def test_nothing_is_left_behind_but_the_position_of_the_group(open_wal, web):
    wal = await open_wal()
    await create(wal, "c0", "out")
    await append(wal, "c0", 1)
    member = await wal.join("g", ["c0"])
    await member.commit([await one(member)], [Append("out", b"1")])
    assert web.subscriptions("c0")
    await wal.close()
    async with asyncio.timeout(BOUND_S):
        while web.subscriptions("c0") or web.subscriptions("out"):  # noqa: ASYNC110 -- the broker has no event for it
            await asyncio.sleep(0)
        while len(web.subscriptions(group_topic("g"))) > 1:  # noqa: ASYNC110 -- likewise
            await asyncio.sleep(0)
    assert web.subscriptions(group_topic("g")) == [f"{HOLD_CURSOR}group"]
    wal, other = await open_wal(), await open_wal()
    assert await wal.channels() == ["c0", "out"]
    member = await other.join("g", ["c0"])
    with pytest.raises(InvalidRequest):
        await wal.drop_group("g")
    await member.aclose()
    await wal.drop_group("g")
    assert sorted(name.rpartition("/")[2] for name in web.call("GET", "")) == ["c0", "out"]


async def test_a_group_that_is_dropped_elsewhere_is_made_again_by_who_joins(open_wal):
    wal, other = await open_wal(), await open_wal()
    await create(wal, "c0")
    for _ in range(3):
        await append(wal, "c0", 1)
        member = await wal.join("g", ["c0"])
        await member.acknowledge(await one(member))
        await member.aclose()
        await other.drop_group("g")
    assert await wal.groups() == []


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.timeout(600 + 15 * KILLS)
async def test_a_pipeline_that_is_killed_again_and_again_copies_everything_once(open_wal, start, rng):
    wal = await open_wal()
    channels = [f"c{n}" for n in range(3)]
    await create(wal, *channels, *(f"out-{channel}" for channel in channels))
    written = {channel: [] for channel in channels}
    copied = {channel: [] for channel in channels}
    progress = asyncio.Event()

    async def read(channel):
        async for entries in wal.read(f"out-{channel}", From.EARLIEST):
            copied[channel] += [bytes(entry.payload) for entry in entries]
            progress.set()

    async def copied_but(count):
        async with asyncio.timeout(BOUND_S):
            while sum(map(len, copied.values())) < sum(map(len, written.values())) - count:
                progress.clear()
                await progress.wait()

    readers = [asyncio.create_task(read(channel)) for channel in channels]
    children = [await start("copy") for _ in range(2)]
    number = 0
    for _ in range(KILLS):
        for _ in range(rng.randrange(5, 60)):
            for channel in channels:
                numbers = range(number, number + rng.randrange(1, 6))
                await append(wal, channel, *numbers)
                written[channel] += [str(each).encode() for each in numbers]
                number = numbers.stop
            await copied_but(30)
        victim = children.pop(rng.randrange(2))
        await victim.end()
        children.append(await start("copy"))
    await copied_but(0)
    latest = {channel: await wal.latest_id(channel) for channel in channels}
    async with asyncio.timeout(BOUND_S):
        while (await wal.groups())[0].positions != latest:
            pass
    for child in children:
        await child.end()
    last = [await append(wal, f"out-{channel}", "last") for channel in channels]
    await copied_but(-len(last))  # so nothing else came before these
    assert copied == {channel: [*payloads, b"last"] for channel, payloads in written.items()}
    for reader in readers:
        reader.cancel()


async def test_a_member_that_gave_up_joining_keeps_no_channel_while_its_process_goes_on(open_wal, monkeypatch):
    """Its joining is in the log all the same, and its process beats for another member."""
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    first = await wal.join("g", ["a"])
    asked = group_log.GroupLog.ask

    async def lost(self, *commands, token=None):
        await asked(self, *commands, token=token)
        if isinstance(commands[0], Join):
            raise Unavailable("the answer was lost", outcome_unknown=True)

    with monkeypatch.context() as patched:
        patched.setattr(group_log.GroupLog, "ask", lost)
        with pytest.raises(Unavailable):
            await wal.join("g", ["a"])
    second = await wal.join("g", ["a"])
    await first.aclose()
    async with asyncio.timeout(SOON_S):
        while (await wal.groups())[0].members != {second.id: frozenset({"a"})}:  # noqa: ASYNC110 -- others decide
            await asyncio.sleep(0)
