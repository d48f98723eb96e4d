"""The broker dies, stops or refuses: what was acknowledged is there, once and in order, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from tests.adapters.pulsar.conftest import Web
from tests.brokers.fixtures import require
from tests.brokers.proxied import proxied_pulsar
from tests.brokers.pulsar import PulsarStandalone
from tidewal.adapters.pulsar import open_wal as open_wal_at
from tidewal.adapters.pulsar.client import message
from tidewal.adapters.pulsar.ids import decode, next_id
from tidewal.runtime.errors import MessageTooLarge, Overloaded, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.metrics.metrics import Metrics

pytestmark = pytest.mark.broker

PLAIN = ChannelPolicy()
MIB = 1024 * 1024
BOUND_S = 60


@pytest.fixture
def pulsar(own_pulsar):
    """Tests kill and pause it."""
    return own_pulsar


async def append_numbers(wal, channel, worker, count, acknowledged):
    """Append one by one, several on the way at a time; note the ids as they are acknowledged."""
    slots = asyncio.Semaphore(50)

    async def one(i):
        async with slots:
            acknowledged[f"{worker}:{i}".encode()] = await wal.append(channel, f"{worker}:{i}".encode(), i)

    await asyncio.gather(*(one(i) for i in range(count)))


def before(id):
    place = decode(id)
    return place.just_before


async def everything(wal, channel):
    """All entries that are there now."""
    latest = await wal.latest_id(channel)
    entries = []
    async with asyncio.timeout(BOUND_S):
        reader = wal.read(channel, From.EARLIEST)
        while not entries or entries[-1].id < latest:
            entries += await anext(reader)
        await reader.aclose()
    return entries


@pytest.mark.long
async def test_a_kill_during_appends_loses_nothing_and_doubles_nothing(open_wal, pulsar, helpers):
    wal, reading = await open_wal(), await open_wal()
    await wal.create_channel("a", PLAIN)
    read = []
    reader = asyncio.create_task(helpers.drain(reading.read("a", From.EARLIEST), read))
    acknowledged: dict[bytes, bytes] = {}
    writers = [asyncio.create_task(append_numbers(wal, "a", worker, 2000, acknowledged)) for worker in range(4)]
    for part in (1, 2):
        await helpers.until(lambda part=part: len(acknowledged) > part * 2000)
        await asyncio.to_thread(pulsar.kill)
        await asyncio.to_thread(pulsar.restart)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*writers)
        stored = await everything(wal, "a")
        await helpers.until(lambda: len(read) >= len(stored))
    assert {bytes(entry.payload): entry.id for entry in stored} == acknowledged
    assert len(stored) == 8000
    for worker in range(4):
        numbers = [int(bytes(entry.payload)[2:]) for entry in stored if entry.payload.startswith(b"%d:" % worker)]
        assert numbers == sorted(numbers)
    assert read == stored  # this reader has been through both kills
    reader.cancel()


async def test_what_is_stored_already_is_acknowledged_with_the_id_it_has(open_wal, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    first = wal._open_producer("a")
    answers: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def send(producer, numbers):
        for i in numbers:
            entry = Append("a", str(i).encode())
            producer.send(entry, i, lambda *answer: loop.call_soon_threadsafe(answers.put_nowait, answer))
        producer.flush()

    send(first, range(3))
    ids = dict([await answers.get() for _ in range(3)])
    await wal.append("a", b"of somebody else")
    first.close()
    wal._producer_names = iter([first._name])
    again = wal._open_producer("a")  # under the same name, so the broker has seen these numbers
    again._known = 0, before(ids[0])
    send(again, range(3))  # one batch, as it was
    send(again, [3])
    async with asyncio.timeout(BOUND_S):
        repeated = dict([await answers.get() for _ in range(4)])
    again.close()
    assert {i: repeated[i] for i in range(3)} == ids
    assert [bytes(e.payload) for e in await everything(wal, "a")] == [b"0", b"1", b"2", b"of somebody else", b"3"]


async def test_a_broker_that_stands_still_is_an_error_in_time_and_works_again_afterwards(open_wal, pulsar, caplog):
    metrics = Metrics("test")
    wal = await open_wal(request_timeout_s=2, metrics=metrics)
    await wal.create_channel("a", PLAIN)
    await wal.create_channel("new", PLAIN)
    before = await wal.append("a", b"before")
    pulsar.pause()
    began = time.monotonic()
    results = await asyncio.gather(
        *(wal.append("a", f"maybe {i}".encode()) for i in range(3)),
        wal.append("new", b"never sent"),
        wal.latest_id("a"),
        return_exceptions=True,
    )
    assert time.monotonic() - began < 60
    assert all(type(result) is Unavailable for result in results)
    assert [result.fields.get("outcome_unknown", False) for result in results] == [True, True, True, False, False]
    assert metrics.value("wal_backend_outcome_unknown_total", channel_name="a") == 3
    assert metrics.value("wal_backend_stall_total", channel_name="a", operation="append") == 1
    assert "appending to a stalls" in caplog.text
    pulsar.resume()
    after: list[bytes] = []
    async with asyncio.timeout(BOUND_S):
        while not after:
            with suppress(Unavailable):  # while connections are made anew
                after.append(await wal.append("a", b"after"))
    after.append(await wal.append("a", b"after that"))
    entries = await everything(wal, "a")
    sure = [entry.id for entry in entries if not entry.payload.startswith(b"maybe")]
    assert sure == [before, *after]
    maybe = [bytes(entry.payload) for entry in entries if entry.payload.startswith(b"maybe")]
    assert maybe == sorted(set(maybe))
    assert await wal.append("new", b"now") is not None


async def test_a_message_that_the_broker_refuses_spoils_nothing(open_wal):
    wal = await open_wal()
    await wal.create_channel("a", ChannelPolicy(max_message_bytes=8 * MIB))
    results = await asyncio.gather(
        wal.append("a", b"1"), wal.append("a", bytes(6 * MIB)), wal.append("a", b"2"), return_exceptions=True
    )
    assert isinstance(results[1], MessageTooLarge)
    last = await wal.append("a", b"3")
    entries = await everything(wal, "a")
    assert [(entry.id, bytes(entry.payload)) for entry in entries] == [
        (results[0], b"1"),
        (results[2], b"2"),
        (last, b"3"),
    ]


async def test_a_message_of_5_mib_passes(open_wal):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    payload = bytes(range(256)) * (5 * MIB // 256)
    id = await wal.append("a", payload, 1)
    [entry] = await everything(wal, "a")
    assert entry.id == id
    assert entry.payload == payload


async def test_what_waits_for_the_broker_is_bounded(open_wal, pulsar):
    wal = await open_wal(request_timeout_s=1, pending_bytes=100_000)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"x")
    pulsar.pause()
    waiting = [asyncio.create_task(wal.append("a", bytes(40_000))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        wal.submit([Append("a", bytes(40_000))], print)
    assert caught.value.limit == "pending_bytes"
    assert all(isinstance(error, Unavailable) for error in await asyncio.gather(*waiting, return_exceptions=True))
    wal.submit([Append("a", bytes(40_000))], lambda _: None)  # what failed waits no more
    pulsar.resume()


async def test_closing_does_not_wait_for_a_broker_for_ever(open_wal, pulsar):
    wal = await open_wal(request_timeout_s=1)
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"x")
    reader = wal.read("a", From.LATEST)
    waiting = asyncio.ensure_future(anext(reader, None))
    pulsar.pause()
    append = asyncio.ensure_future(wal.append("a", b"y"))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await wal.close()
    assert isinstance((await asyncio.gather(append, return_exceptions=True))[0], Unavailable)
    assert waiting.done()
    pulsar.resume()


@pytest.mark.long
async def test_an_append_that_lands_after_its_time_out_is_harmless(proxied):
    wal, proxy = proxied
    await wal.create_channel("a", PLAIN)
    before = await wal.append("a", b"before")
    reader = wal.read("a", From.EARLIEST)
    entries = list(await anext(reader))
    proxy.hold()
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(wal.append("a", b"late"), 60)
    assert caught.value.outcome_unknown
    proxy.pass_new()
    after: list[bytes] = []
    async with asyncio.timeout(BOUND_S):
        while len(after) < 3:
            with suppress(Unavailable):  # until the silent connection is given up
                after.append(await wal.append("a", b"after"))
        while entries[-1].id != after[-1]:  # the reader's connection is silent for ever, the reader is not
            entries += await anext(reader)
        proxy.release()
        while not any(entry.payload == b"late" for entry in entries):
            entries += await anext(reader)
        after.append(await wal.append("a", b"after"))
        while entries[-1].id != after[-1]:
            entries += await anext(reader)
    await reader.aclose()
    assert [entry.id for entry in entries if entry.payload != b"late"] == [before, *after]
    assert [entry.payload for entry in entries].count(b"late") == 1


@pytest.mark.long
async def test_an_append_that_a_full_quota_answers_after_it_was_stored_is_not_called_refused(tmp_path):
    """The library answers all that is under way with the quota's error when it connects again."""
    async with proxied_pulsar(tmp_path) as found:
        wal = await open_wal_at(found.url, request_timeout_s=20)
        await wal.create_channel("a", PLAIN)
        first = await wal.append("a", bytes(1000))
        await wal.hold("a", "somebody", first)
        for _ in range(20):
            last = await wal.append("a", bytes(1000))
        stored_next = next_id(last)
        quota = {"limitSize": 1000, "limitTime": -1, "policy": "producer_exception"}
        web = Web(found.brokers, "public/default")
        await asyncio.to_thread(web.call, "POST", "/a/backlogQuota?backlogQuotaType=destination_storage", quota)
        found.proxy.lose_answers()
        append = asyncio.ensure_future(wal.append("a", b"stored"))
        async with asyncio.timeout(BOUND_S):
            while await wal.latest_id("a") < stored_next:
                pass
        found.proxy.cut()
        with pytest.raises(Unavailable) as caught:
            await asyncio.wait_for(append, BOUND_S)
        assert caught.value.outcome_unknown
        with pytest.raises(Overloaded) as refused:  # a new producer is refused, which stores nothing
            await asyncio.wait_for(wal.append("a", b"refused"), BOUND_S)
        assert "outcome_unknown" not in refused.value.fields
        payloads = [bytes(entry.payload) for entry in await everything(wal, "a")]
        assert payloads.count(b"stored") == 1
        assert b"refused" not in payloads
        await wal.close()


async def test_a_wait_that_is_cancelled_takes_nothing(open_wal):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    reader = wal.read("a", From.EARLIEST)
    ids, read = [], []
    async with asyncio.timeout(BOUND_S):
        for number in range(20):
            waiting = asyncio.ensure_future(anext(reader))
            append = asyncio.ensure_future(wal.append("a", b"%d" % number))
            if number % 2:
                ids.append(await append)
            waiting.cancel()
            [result] = await asyncio.gather(waiting, return_exceptions=True)
            read += [] if isinstance(result, BaseException) else result
            if not number % 2:
                ids.append(await append)
        while len(read) < len(ids):
            read += await anext(reader)
    await reader.aclose()
    assert [entry.id for entry in read] == ids


async def test_a_reader_at_the_end_misses_nothing_over_a_restart(open_wal, pulsar, helpers):
    wal = await open_wal()
    await wal.create_channel("a", PLAIN)
    await wal.append("a", b"before")
    read = []
    reader = asyncio.create_task(helpers.drain(wal.read("a", From.LATEST), read))
    async with asyncio.timeout(BOUND_S):
        while not read:  # until it has begun
            await wal.append("a", b"begun?")
        await asyncio.to_thread(pulsar.kill)
        await asyncio.to_thread(pulsar.restart)
        ids = [await wal.append("a", b"after %d" % number) for number in range(5)]
        await helpers.until(lambda: read[-1].id == ids[-1])
    assert [entry.id for entry in read if entry.payload.startswith(b"after")] == ids
    reader.cancel()


@pytest.mark.long
async def test_what_is_sent_again_is_stored_once_where_brokers_remove_no_duplicates(tmp_path):
    require("pulsar")
    with PulsarStandalone(tmp_path, deduplication=False) as broker:
        wal = await open_wal_at(f"{broker.url}/public/x", web_url=broker.web_url)
        await wal.create_channel("a", PLAIN)
        answers: asyncio.Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def answered(result, id):
            loop.call_soon_threadsafe(answers.put_nowait, (result.name, id.ledger_id() >= 0))

        def send():
            producer = wal.publisher("a", "somebody", batches=False)
            closed = threading.Event()
            for number in (1, 2):
                producer.send_async(message(str(number).encode(), 0, number), answered)
            flushed = threading.Event()
            producer.flush_async(lambda _: flushed.set())
            assert flushed.wait(BOUND_S)
            producer.close_async(lambda _: closed.set())
            assert closed.wait(BOUND_S)

        await asyncio.to_thread(send)
        await asyncio.to_thread(send)
        found = [await answers.get() for _ in range(4)]
        assert [result for result, _ in found] == ["Ok"] * 4  # with the id or without: the library promises neither
        assert [bytes(entry.payload) for entry in await everything(wal, "a")] == [b"1", b"2"]
        await wal.close()
