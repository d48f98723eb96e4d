"""Three brokers, three copies, two of them in sync: leaders and controllers killed, brokers stopped, too few copies.

`TIDEWAL_TEST_KILLS` says how many leaders are killed one after another (2 unless set; 5 makes 20,000 appends) and,
from 5 on, that a broker is stopped for 20 s instead of 5.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import pytest

from tests.brokers.producers import Producers
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.stalls import LOOK_S, STALLED_AFTER_S
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.metrics.metrics import Metrics

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PLAIN = ChannelPolicy()
WITHIN_S = 60.0
KILLS = int(os.environ.get("TIDEWAL_TEST_KILLS", "2"))
APPENDS_PER_KILL = 4000
STOPPED_S = 20.0 if KILLS >= 5 else 5.0
PRODUCERS, WINDOW = 4, 25


def leader_of(kafka3, wal, channel="a"):
    return kafka3.partition(wal._catalog.find(channel).topic).leader


def stalls_of(metrics, operation="append"):
    return metrics.value("wal_backend_stall_total", channel_name="a", operation=operation)


def tell(what, **figures):
    """Show the figures of a run, with `-s` or when it fails."""
    print(what, ", ".join(f"{name} {value}" for name, value in figures.items()))


@pytest.mark.long
@pytest.mark.timeout(600 + 60 * KILLS)
async def test_leaders_killed_one_after_another_lose_and_double_nothing(kafka3, opening, caplog):
    metrics = Metrics("test")
    wal = await opening(kafka3, metrics=metrics)
    await wal.create_channel("a", PLAIN)
    producers = Producers(wal, "a", PRODUCERS, WINDOW)
    slowest_s = []
    for _ in range(KILLS):
        await producers.more(APPENDS_PER_KILL // 2)
        stalls_before, leader = stalls_of(metrics), leader_of(kafka3, wal)
        producers.slowest_since()
        await asyncio.to_thread(kafka3.kill, leader)
        await producers.more(APPENDS_PER_KILL // 2)
        slowest_s.append(producers.slowest_since())
        reported = stalls_of(metrics) > stalls_before
        assert reported or slowest_s[-1] < STALLED_AFTER_S["append"] + 2 * LOOK_S
        await asyncio.to_thread(kafka3.restart, leader)
    await producers.stop()
    assert producers.failed == {}
    entries = await producers.check(await opening(kafka3))
    assert len(entries) >= KILLS * APPENDS_PER_KILL
    assert stalls_of(metrics) == caplog.text.count("appending to a stalls")
    assert metrics.value("wal_backend_stalled", channel_name="a", operation="append") == 0
    tell(
        "leaders killed",
        kills=KILLS,
        appended=len(entries),
        stalls=stalls_of(metrics),
        slowest_s=[round(each, 1) for each in slowest_s],
    )


@pytest.mark.long
async def test_a_controller_killed_loses_and_doubles_nothing(kafka3, opening):
    wal = await opening(kafka3)
    controller, names = kafka3.controller(), iter("abcdefgh")
    for name in names:  # one that another node leads: the channel loses no leader, only who could name one
        await wal.create_channel(name, PLAIN)
        if leader_of(kafka3, wal, name) != controller:
            break
    producers = Producers(wal, name, PRODUCERS, WINDOW)
    await producers.more(500)
    await asyncio.to_thread(kafka3.kill, controller)
    await producers.more(1000)
    await wal.create_channel("new", PLAIN)  # the next controller knows how
    await wal.append("new", b"x")
    await asyncio.to_thread(kafka3.restart, controller)
    await producers.more(500)
    await producers.stop()
    assert producers.failed == {}
    entries = await producers.check(await opening(kafka3))
    tell("a controller killed", appended=len(entries), slowest_s=round(producers.slowest_s, 1))


@pytest.mark.long
async def test_a_stopped_leader_is_passed_over_and_harmless_when_it_is_back(kafka3, opening, helpers):
    metrics = Metrics("test")
    wal = await opening(kafka3, metrics=metrics)
    for channel in ("a", "b"):
        await wal.create_channel(channel, PLAIN)
    producers = Producers(wal, "a", PRODUCERS)
    reader = wal.read("a", From.EARLIEST)
    read = []
    reading = asyncio.create_task(helpers.drain(reader, read))
    await producers.more(200)
    stopped = leader_of(kafka3, wal)
    kafka3.pause(stopped)
    await producers.more(500)
    await wal.append("b", b"others go on as well")
    await producers.go_on_for(STOPPED_S)
    kafka3.resume(stopped)
    await producers.more(500)
    await producers.stop()
    assert producers.failed == {}
    assert stalls_of(metrics) > 0
    entries = await producers.check(await opening(kafka3))
    async with asyncio.timeout(WITHIN_S):
        await helpers.until(lambda: len(read) >= len(entries))
    assert read == list(entries)
    await reader.aclose()
    await reading
    tell(
        "a leader stopped",
        for_s=STOPPED_S,
        appended=len(entries),
        stalls=stalls_of(metrics),
        slowest_s=round(producers.slowest_s, 1),
    )


@pytest.mark.long
async def test_too_few_copies_is_told_in_time_and_leaves_nothing(kafka3, opening, helpers):
    wal = await opening(kafka3, min_insync_replicas=3, delivery_timeout_s=2)
    await wal.create_channel("a", PLAIN)
    before = await wal.append("a", b"before")
    follower = leader_of(kafka3, wal) % 3 + 1
    await asyncio.to_thread(kafka3.terminate, follower)
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(wal.append("a", b"refused"), 60)
    assert caught.value.fields == {}
    await asyncio.to_thread(kafka3.restart, follower)
    after = None
    async with asyncio.timeout(WITHIN_S):
        while after is None:
            with suppress(Unavailable):
                after = await wal.append("a", b"after")
    assert [entry.id for entry in await helpers.take(wal, "a", From.EARLIEST, 2)] == [before, after]


@pytest.mark.long
async def test_with_two_of_three_gone_appends_fail_in_time_and_all_goes_on_when_they_are_back(kafka3, opening):
    metrics = Metrics("test")
    wal = await opening(kafka3, metrics=metrics, request_timeout_s=1, delivery_timeout_s=3)
    await wal.create_channel("a", PLAIN)
    producers = Producers(wal, "a", PRODUCERS)
    await producers.more(200)
    gone = [node for node in kafka3.nodes if node != leader_of(kafka3, wal)]
    for node in gone:
        await asyncio.to_thread(kafka3.kill, node)
    producers.slowest_since()
    await producers.failures(2 * PRODUCERS)
    assert producers.slowest_since() < 12
    assert all(type(error) is Unavailable and error.retryable for error in producers.failed.values())
    told_unknown = sum(error.fields.get("outcome_unknown", False) for error in producers.failed.values())
    assert metrics.value("wal_backend_outcome_unknown_total", channel_name="a") == told_unknown
    began_s = time.monotonic()
    for node in gone:
        await asyncio.to_thread(kafka3.restart, node)
    await producers.more(500)
    recovered_s = time.monotonic() - began_s
    await producers.stop()
    entries = await producers.check(await opening(kafka3))
    tell(
        "two of three gone",
        appended=len(entries),
        failed=len(producers.failed),
        unknown=told_unknown,
        stalls=stalls_of(metrics),
        recovered_s=round(recovered_s, 1),
    )
