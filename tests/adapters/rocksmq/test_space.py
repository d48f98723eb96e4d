"""Too little space: data is refused, the system's own entries go on from a reserve, and all goes on when there is
space again."""

from __future__ import annotations

import errno
import os
from functools import partial

import pytest

from tidewal.runtime.errors import DiskPressure, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, ControlAppend, From
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.disk import FaultyDisk

SMALL = 64 * 1024
PLAIN = ChannelPolicy()
KIB_5 = bytes(5000)


@pytest.fixture(params=[True, False], ids=["on the loop", "on the thread"])
def disk(seed, request) -> FaultyDisk:
    return FaultyDisk(seed, beside=request.param)


async def full(open_rocksmq, disk, helpers, **options):
    """A store on a disk without space for another segment, that has appended all the data that it takes: it, and how
    many entries those are."""
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL, **options)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)
    disk.free = 0
    for count in range(100):
        try:
            await store.append("a", KIB_5)
        except DiskPressure:
            return store, count
    raise AssertionError("a full disk takes data without end")


async def everything(store, helpers):
    latest = await store.latest_id("a")
    reader, entries = store.read("a", From.EARLIEST), []
    while not entries or entries[-1].id != latest:
        entries += await anext(reader)
    await reader.aclose()
    return helpers.payloads(entries)


async def test_under_the_watermark_the_systems_own_entries_are_taken_alone(open_rocksmq, disk, helpers):
    metrics = Metrics()
    store = await open_rocksmq(disk=disk, free_space_bytes=1000, metrics=metrics)
    await store.create_channel("a", PLAIN)
    store.check_space()
    assert store.refusal() is None
    disk.free = 999
    assert not store.check_space()
    assert isinstance(store.refusal(), DiskPressure)
    assert metrics.value("rocksmq_disk_pressure") == 1
    (id,) = await store.append_many([ControlAppend("a", b"tick")])
    assert await store.latest_id("a") == id
    for refused in (
        store.append("a", b"data"),
        store.append_many([Append("a", b"data")]),
        store.append_many([ControlAppend("a", b"tick"), Append("a", b"data")]),
    ):
        with pytest.raises(DiskPressure) as caught:
            await refused
        assert caught.value.limit == "free_space_bytes"
    assert await everything(store, helpers) == [b"tick"]


@pytest.mark.slow
async def test_on_a_full_disk_control_goes_on_from_the_reserve_and_data_comes_back(open_rocksmq, disk, helpers):
    store, count = await full(open_rocksmq, disk, helpers, free_space_bytes=0)
    assert count > 10
    epochs = len(store._segments.epochs)
    ticks = 0
    while not store._segments.short:  # what is left of the segment in use, then the reserve
        await store.append_many([ControlAppend("a", bytes(500))])
        ticks += 1
        assert ticks < 1000
    assert len(store._segments.epochs) == epochs + 1
    for _ in range(50):
        with pytest.raises(DiskPressure):
            await store.append("a", b"small")  # though there would be room
        await store.append_many([ControlAppend("a", b"t")])
    await store.close()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL, free_space_bytes=0)  # it opens, still full
    await store.append_many([ControlAppend("a", b"reopened")])
    await helpers.until(lambda: store._admission.pressure)
    with pytest.raises(DiskPressure):
        await store.append("a", b"small")
    disk.free = None
    disk.heal()
    await helpers.until(lambda: store._segments.ready and not store._admission.pressure)
    await store.append("a", b"data again")
    expected = [KIB_5] * count + [bytes(500)] * ticks + [b"t"] * 50 + [b"reopened", b"data again"]
    assert await everything(store, helpers) == expected


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
async def test_a_reserve_that_cannot_be_made_is_reported_as_what_it_is(open_rocksmq, disk, helpers, caplog, error):
    disk.fail("rename", error, times=1000, name=f"{os.sep}reserve")
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL, free_space_bytes=0)
    await helpers.until(lambda: store._admission.pressure)
    await helpers.until(lambda: os.strerror(error) in caplog.text)
    for _ in range(3):
        store.check_space()
        with pytest.raises(DiskPressure) as caught:
            await store.create_channel("a", PLAIN)
        space = error in (errno.ENOSPC, errno.EDQUOT)
        assert caught.value.limit == ("free_space_bytes" if space else "disk")
        assert ("no space" in caught.value.message) == space
        assert space or os.strerror(error) in caught.value.message
    disk.heal()
    await helpers.until(lambda: not store._admission.pressure)
    await store.create_channel("a", PLAIN)
    await store.append("a", b"data")


async def test_what_shares_a_commit_with_data_is_not_refused_with_it(open_rocksmq, disk, helpers):
    store, count = await full(open_rocksmq, disk, helpers, free_space_bytes=0)
    answers: dict[str, list[bytes] | TidewalError] = {}

    def submit(name, *entries):
        store.submit(entries, lambda result: answers.update({name: result}))

    rounds = 0
    while not store._segments.short:
        with disk._lock:  # the first may be on its way, all others gather behind it
            for name in ("one", "two"):
                submit(f"data {name}", Append("a", KIB_5))
                submit(f"control {name}", ControlAppend("a", bytes(400)), ControlAppend("a", bytes(400)))
        await helpers.until(lambda: len(answers) == 4)
        assert all(isinstance(result, list) == name.startswith("control") for name, result in answers.items()), answers
        answers.clear()
        rounds += 1
        assert rounds < 1000
    assert await everything(store, helpers) == [KIB_5] * count + [bytes(400)] * 4 * rounds


@pytest.mark.slow
async def test_acknowledgements_and_drops_go_on_when_no_segment_can_be_made(open_rocksmq, disk, helpers):
    store, _ = await full(open_rocksmq, disk, helpers, free_space_bytes=0)
    member = await store.join("group", ["a"])
    await member.acknowledge(await anext(member))
    await member.aclose()
    await store.drop_channel("a")
    store.retain_now()
    await helpers.until(lambda: store._segments.ready)  # what went is used again
    await store.create_channel("b", PLAIN)
    await store.append("b", b"data")


@pytest.mark.slow
async def test_the_reserve_survives_loss_of_power_at_any_moment(open_rocksmq, disk, helpers, rng):
    sent = 0
    for _ in range(12):
        disk.free, disk.read_only = None, False
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL, free_space_bytes=0)
        await store.create_channel("a", PLAIN)
        await helpers.until(partial(getattr, store._segments, "ready"))
        disk.free = 0
        for _ in range(rng.randrange(120)):
            await store.append_many([ControlAppend("a", sent.to_bytes(900, "big"))])
            sent += 1
        disk.cut_power()
        await store.close()
        disk.restore_power()
    disk.free = None
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    if sent:
        assert await everything(store, helpers) == [number.to_bytes(900, "big") for number in range(sent)]
