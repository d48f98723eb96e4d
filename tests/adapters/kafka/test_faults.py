"""One broker of Kafka killed, paused, cut off: nothing acknowledged is lost, nothing is doubled, nothing hangs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from tests.brokers.producers import Producers
from tidewal.runtime.errors import InvalidRequest, Overloaded, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

pytestmark = pytest.mark.broker

PLAIN = ChannelPolicy()
WITHIN_S = 60.0
SOON = {"request_timeout_s": 2.0, "delivery_timeout_s": 4.0}  # for tests that wait for a time-out


@pytest.fixture
def kafka(own_kafka):
    """Tests kill and pause it."""
    return own_kafka


async def test_a_broker_killed_during_appends_loses_and_doubles_nothing(kafka, opening):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    producers = Producers(wal, "a", 4)
    for _ in range(2):
        await producers.more(300)
        await asyncio.to_thread(kafka.kill)
        await asyncio.to_thread(kafka.restart)
    await producers.more(300)
    await producers.stop()
    assert producers.failed == {}
    await producers.check(await opening(kafka))


@pytest.mark.long
async def test_a_paused_broker_is_an_unknown_outcome_in_time_and_all_goes_on(kafka, opening, helpers):
    await opening(kafka)  # with patience: the broker may still come back from what an earlier test did to it
    wal = await opening(kafka, **SOON)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"before")
    reader = wal.read("a", From.EARLIEST)
    entries = list(await anext(reader))
    kafka.pause()
    began_s = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await wal.append("a", b"perhaps")
    assert caught.value.outcome_unknown
    with pytest.raises(Unavailable):
        await wal.describe("a")
    with pytest.raises(Unavailable):
        await wal.create_channel("b", PLAIN)
    assert time.monotonic() - began_s < 60
    kafka.resume()
    after = None
    async with asyncio.timeout(WITHIN_S):
        while after is None:
            with suppress(Unavailable):
                after = await wal.append("a", b"after")
        while entries[-1].id != after:
            entries += await anext(reader)
    payloads = helpers.payloads(entries)
    assert [payload for payload in payloads if payload not in (b"perhaps", b"after")] == [b"before"]
    assert payloads.count(b"perhaps") <= 1
    assert [entry.id for entry in entries] == sorted({entry.id for entry in entries})
    await reader.aclose()


async def test_while_no_broker_answers_the_backlog_is_bounded_and_closing_ends(kafka, opening):
    await opening(kafka)
    wal = await opening(kafka, **SOON, pending_bytes=10_000)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"before")
    kafka.pause()
    waiting = [asyncio.ensure_future(wal.append("a", bytes(4000))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await wal.append("a", bytes(4000))
    assert caught.value.limit == "pending_bytes"
    await asyncio.wait_for(wal.close(), 60)
    for append in waiting:
        with pytest.raises(Unavailable):
            await append


async def test_no_broker_at_all_is_told_in_time(opening):
    class Nowhere:
        url = "kafka://127.0.0.1:9"

    with pytest.raises(Unavailable):
        await asyncio.wait_for(opening(Nowhere, **SOON), 60)


async def test_a_reader_survives_a_restart_without_loss_or_repetition(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    ids = await wal.append_many([Append("a", b"%d" % i) for i in range(10)])
    reader = wal.read("a", From.EARLIEST)
    entries = list(await anext(reader))
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.to_thread(kafka.kill)
    await asyncio.to_thread(kafka.restart)
    ids += await wal.append_many([Append("a", b"%d" % i) for i in range(10, 20)])
    async with asyncio.timeout(WITHIN_S):
        entries += await waiting
        while entries[-1].id != ids[-1]:
            entries += await anext(reader)
    assert [entry.id for entry in entries] == ids
    await reader.aclose()


async def test_a_refused_record_poisons_nothing(kafka, opening, helpers):
    wal = await opening(kafka)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"before")
    channel = wal._catalog.find("a")
    await wal._call(lambda: wal._writes.configure_topic(channel.topic, {"max.message.bytes": "2000"}))
    large = 0
    with suppress(InvalidRequest):  # the broker heeds it some time after it was told
        while await wal.append("a", bytes(100_000)):
            large += 1
    small = [wal.append("a", b"%d" % i) for i in range(5)]
    refused = wal.append("a", bytes(100_000))
    answers = await asyncio.gather(
        *small, refused, *(wal.append("a", b"%d" % i) for i in range(5, 10)), return_exceptions=True
    )
    assert isinstance(answers[5], InvalidRequest)
    assert [type(answer) for answer in answers[:5] + answers[6:]] == [bytes] * 10
    found = helpers.payloads(await helpers.take(wal, "a", From.EARLIEST, large + 11))
    assert found == [b"before", *[bytes(100_000)] * large, *(b"%d" % i for i in range(10))]


async def test_an_append_that_lands_after_its_time_out_is_harmless(proxied, opening, helpers):
    proxy = proxied.proxy
    wal = await opening(proxied, **SOON)
    await wal.create_channel("a", PLAIN)
    before = await wal.append("a", b"before")
    reader = wal.read("a", From.EARLIEST)
    entries = list(await anext(reader))
    proxy.hold()
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(wal.append("a", b"late"), 60)
    assert caught.value.outcome_unknown
    proxy.pass_new()
    after = [await wal.append("a", b"after %d" % i) for i in range(3)]
    assert await wal.latest_id("a") == after[-1]
    async with asyncio.timeout(WITHIN_S):  # its connection is silent for ever, the reader is not
        while entries[-1].id != after[-1]:
            entries += await anext(reader)
    proxy.release()
    async with asyncio.timeout(WITHIN_S):
        while not any(bytes(entry.payload) == b"late" for entry in entries):
            entries += await anext(reader)
    after.append(await wal.append("a", b"after 3"))
    async with asyncio.timeout(WITHIN_S):
        while entries[-1].id != after[-1]:
            entries += await anext(reader)
    await reader.aclose()
    assert [entry.id for entry in entries if entry.payload != b"late"] == [before, *after]
    assert helpers.payloads(entries).count(b"late") == 1  # though it was sent several times
    assert helpers.payloads(entries).index(b"late") == 4  # behind what was acknowledged meanwhile
