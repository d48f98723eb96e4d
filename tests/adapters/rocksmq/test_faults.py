"""A disk that loses power, refuses, or takes half: what was acknowledged survives, and errors are what they say."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from functools import partial

import pytest

from tidewal.adapters.rocksmq.index.index import Index
from tidewal.runtime.errors import CorruptLog, DirectoryUnwritable, DiskFull, DiskPressure, JournalFailed, Overloaded
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.testing.disk import FaultyDisk

SMALL = 64 * 1024
PLAIN = ChannelPolicy()


@pytest.fixture(params=[True, False], ids=["on the loop", "on the thread"])
def disk(seed, request) -> FaultyDisk:
    return FaultyDisk(seed, beside=request.param)


async def ready(open_rocksmq, disk, helpers, **options):
    """A store with a channel whose maintenance has nothing left to do: the next call to the disk is a commit's."""
    store = await open_rocksmq(disk=disk, **options)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)
    return store


def submit_or_refuse(store, payload):
    try:
        store.submit([Append("a", payload)], lambda _: None)
    except Overloaded as error:
        return error
    return None


async def read_all(store, helpers, channel="a"):
    latest = await store.latest_id(channel)
    if latest is None:
        return []
    reader, entries = store.read(channel, From.EARLIEST), []
    while not entries or entries[-1].id != latest:
        entries += await anext(reader)
    await reader.aclose()
    return entries


@pytest.mark.slow
async def test_what_was_acknowledged_survives_every_loss_of_power(open_rocksmq, disk, rng, helpers):
    acknowledged: dict[bytes, bytes] = {}
    submitted: set[bytes] = set()
    number = 0
    for _incarnation in range(12):
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
        entries = await read_all(store, helpers) if "a" in await store.channels() else []
        read = {entry.id: bytes(entry.payload) for entry in entries}
        assert list(read) == sorted(read)
        assert acknowledged.items() <= read.items()
        assert set(read.values()) <= submitted
        assert len(set(read.values())) == len(read)
        await store.create_channel("a", PLAIN)
        appends = []
        for _ in range(rng.randrange(1, 40)):
            payload = f"{number} ".encode() * rng.randrange(1, 700)
            number += 1
            submitted.add(payload)
            appends.append((payload, asyncio.ensure_future(store.append("a", payload))))
            if rng.random() < 0.5:
                await asyncio.wait([appends[rng.randrange(len(appends))][1]])
        disk.cut_power()
        await asyncio.gather(*(task for _, task in appends), return_exceptions=True)
        for payload, task in appends:
            if task.exception() is None:
                assert not acknowledged or task.result() > max(acknowledged)
                acknowledged[task.result()] = payload
        await store.close()
        disk.restore_power()
    assert acknowledged


@pytest.mark.slow
async def test_an_acknowledged_batch_over_channels_is_whole_or_absent(open_rocksmq, rng, disk, helpers):
    for incarnation in range(8):
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
        for name in "ab":
            await store.create_channel(name, PLAIN)
        a, b = [await read_all(store, helpers, name) for name in "ab"]
        assert helpers.payloads(a) == helpers.payloads(b)
        tasks = []
        for i in range(10):
            payload = f"{incarnation}:{i}".encode() * 100
            tasks.append(asyncio.ensure_future(store.append_many([Append("a", payload), Append("b", payload)])))
            await asyncio.sleep(0)
        await asyncio.wait([tasks[rng.randrange(10)]])
        disk.cut_power()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()
        disk.restore_power()


async def test_a_failed_sync_poisons_until_reopened_and_is_never_tried_again(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers)
    before = await store.append("a", b"before")
    disk.fail("sync")
    with pytest.raises(JournalFailed) as caught:
        await store.append("a", b"unknown")
    assert caught.value.outcome_unknown is True
    syncs = disk.syncs
    for _ in range(3):
        with pytest.raises(JournalFailed) as caught:
            await store.append("a", b"refused")
        assert "outcome_unknown" not in caught.value.fields
    assert disk.syncs == syncs
    assert [e.id for e in await helpers.take(store, "a", From.EARLIEST, 1)] == [before]  # reads go on
    assert await store.latest_id("a") == before
    await store.close()


async def test_what_only_the_cache_holds_after_a_failed_sync_is_made_durable_by_reopening(open_rocksmq, seed, helpers):
    disk = FaultyDisk(seed, keep_chance=0.0)
    store = await ready(open_rocksmq, disk, helpers)
    disk.fail("sync")
    with pytest.raises(JournalFailed):
        await store.append("a", b"unknown")
    await store.close()
    store = await open_rocksmq(disk=disk)
    seen = helpers.payloads(await read_all(store, helpers))
    await store.append("a", b"after")
    disk.cut_power()
    await store.close()
    disk.restore_power()
    store = await open_rocksmq(disk=disk)
    assert helpers.payloads(await read_all(store, helpers)) == [*seen, b"after"]


async def test_all_pending_appends_fail_together_and_none_hangs(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers)
    disk.fail("write", times=1)
    results = await asyncio.gather(*(store.append("a", bytes(1000)) for _ in range(50)), return_exceptions=True)
    assert all(isinstance(result, JournalFailed) for result in results)


async def test_short_writes_are_completed(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    disk.write_limit = 100
    sent = [bytes([i]) * 999 for i in range(20)]
    await store.append_many([Append("a", payload) for payload in sent])
    disk.write_limit = None
    await store.close()
    store = await open_rocksmq(disk=disk)
    assert helpers.payloads(await read_all(store, helpers)) == sent


@pytest.mark.parametrize(("code", "expected"), [(errno.ENOSPC, DiskFull), (errno.EROFS, JournalFailed)])
async def test_a_write_that_fails_says_why_and_the_rest_is_there_after_reopening(
    open_rocksmq, disk, helpers, code, expected
):
    store = await ready(open_rocksmq, disk, helpers)
    await store.append("a", b"kept")
    disk.fail("write", code)
    with pytest.raises(expected):
        await store.append("a", b"lost")
    await store.close()
    store = await open_rocksmq(disk=disk)
    assert helpers.payloads(await read_all(store, helpers)) == [b"kept"]


@pytest.mark.parametrize(("code", "expected"), [(errno.ENOSPC, DiskFull), (errno.EROFS, DirectoryUnwritable)])
async def test_a_new_directory_on_a_full_or_read_only_disk(open_rocksmq, disk, code, expected):
    disk.fail("write", code, times=100)
    with pytest.raises(expected):
        await open_rocksmq(disk=disk)


async def test_no_room_for_the_next_segment_is_pressure_not_failure(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    disk.fail("open", errno.ENOSPC, times=10**6)
    results = [await asyncio.gather(store.append("a", bytes([i]) * 5000), return_exceptions=True) for i in range(40)]
    sent = next(i for i, (result,) in enumerate(results) if isinstance(result, DiskPressure))
    assert sent > 10
    assert all(isinstance(result, DiskPressure) for (result,) in results[sent:])
    disk.heal()  # space was freed
    await store.append("a", bytes([sent]) * 5000)
    expected = [bytes([i]) * 5000 for i in range(sent + 1)]
    assert helpers.payloads(await read_all(store, helpers)) == expected
    await store.close()
    store = await open_rocksmq(disk=disk)
    assert helpers.payloads(await read_all(store, helpers)) == expected


async def test_below_the_watermark_writes_are_refused_and_reads_go_on(open_rocksmq, disk, helpers):
    store = await open_rocksmq(disk=disk, free_space_bytes=1000)
    await store.create_channel("a", PLAIN)
    await store.create_channel("e", ChannelPolicy(ephemeral=True))
    await store.append("a", b"before")
    disk.free = 999
    assert not store.check_space()
    for refused in (store.append("a", b"no"), store.create_channel("b", PLAIN)):
        with pytest.raises(DiskPressure):
            await refused
    await store.append("e", b"memory is not the disk's")
    await store.truncate("a", (1).to_bytes(8, "big"))
    assert helpers.payloads(await read_all(store, helpers)) == [b"before"]
    disk.free = 1000
    assert store.check_space()
    await store.append("a", b"after")


async def test_over_the_pending_limit_submit_says_overloaded(open_rocksmq, disk, helpers):
    store = await open_rocksmq(disk=disk, pending_bytes=10_000)
    await store.create_channel("a", PLAIN)
    with disk._lock:  # no write gets through
        refused = [submit_or_refuse(store, bytes(6000)) for _ in range(3)]
    assert [error.limit for error in refused if error is not None] == ["pending_bytes"] * (3 - refused.count(None))
    assert isinstance(refused[-1], Overloaded)
    await store.append("a", b"and goes on")


async def test_many_empty_messages_in_one_go_stay_within_the_segment(open_rocksmq, disk, helpers, tmp_path):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    with disk._lock:  # all gather behind one write: their rows alone are over what a segment holds
        for _ in range(20):
            store.submit([Append("a", b"")] * 250, lambda _: None)
    await store.append("a", b"last")
    assert {path.stat().st_size for path in (tmp_path / "log" / "journal").glob("*.segment")} == {SMALL}
    await store.close()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    assert [entry.payload for entry in await read_all(store, helpers)] == [b""] * 5000 + [b"last"]


async def test_a_remount_as_read_only_ends_writing_and_reads_go_on(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL, tail_bytes=1)
    for number in range(30):
        await store.append("a", bytes([number]) * 5000)
    kept = helpers.payloads(await read_all(store, helpers))
    disk.read_only = True
    with pytest.raises(JournalFailed) as caught:
        await store.append("a", b"lost")
    assert caught.value.outcome_unknown is True
    with pytest.raises(JournalFailed) as caught:
        await store.create_channel("b", PLAIN)
    assert "outcome_unknown" not in caught.value.fields
    assert helpers.payloads(await read_all(store, helpers)) == kept
    await store.close()
    with pytest.raises(DirectoryUnwritable):
        await open_rocksmq(disk=disk, segment_bytes=SMALL)
    disk.heal()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    await store.append("a", b"after")
    assert helpers.payloads(await read_all(store, helpers)) == [*kept, b"after"]


TYPED = (DiskFull, DiskPressure, JournalFailed, DirectoryUnwritable)


async def run_once(open_rocksmq, disk, rng, acknowledged: dict[bytes, bytes]) -> None:
    """One incarnation with commits, new segments and retention, which ends where something fails."""
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    try:
        await store.create_channel("a", PLAIN)
        for _ in range(16):
            payload = rng.randbytes(9000)
            acknowledged[await store.append("a", payload)] = payload
        first_kept = sorted(acknowledged)[len(acknowledged) // 2]
        for id in [id for id in acknowledged if id < first_kept]:
            del acknowledged[id]  # also where truncation fails: it may have happened
        await store.truncate("a", first_kept)
        with contextlib.suppress(OSError):  # the maintenance thread, which does this otherwise, logs it and tries again
            store.retain_now()
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["open", "read", "write", "sync", "rename", "remove", "sync_directory"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_an_error_at_any_call_is_reported_by_type_and_loses_nothing(
    open_rocksmq, disk, rng, helpers, operation, code
):
    acknowledged: dict[bytes, bytes] = {}
    for times in (1, 10**6):
        for skip in sorted(rng.sample(range(30), 6)):
            disk.fail(operation, code, skip=skip, times=times)
            with contextlib.suppress(*TYPED):
                await run_once(open_rocksmq, disk, rng, acknowledged)
            disk.heal()
            store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
            entries = await read_all(store, helpers) if "a" in await store.channels() else []
            found = {entry.id: bytes(entry.payload) for entry in entries}
            assert acknowledged.items() <= found.items(), skip
            await store.close()


@pytest.mark.parametrize("name", [".segment", "preparing"])
async def test_a_failed_sync_of_data_poisons_one_of_zeros_does_not(open_rocksmq, disk, helpers, name):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    disk.fail("sync", name=name)
    results = [(await asyncio.gather(store.append("a", bytes(9000)), return_exceptions=True))[0] for _ in range(20)]
    failed = [result for result in results if isinstance(result, BaseException)]
    if name == "preparing":
        assert all(isinstance(error, DiskPressure) for error in failed)
        assert isinstance(results[-1], bytes)
    else:
        assert len(failed) == 20
        assert all(isinstance(error, JournalFailed) for error in failed)


async def test_a_channel_dropped_while_it_is_created_may_fail_to_be_either(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    room = store._registry._room
    disk.fail("write", errno.EIO)
    with disk._lock:  # both wait for one write
        both = [
            asyncio.ensure_future(call("b"))
            for call in (partial(store.create_channel, policy=PLAIN), store.drop_channel)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results] == [JournalFailed] * 2
    assert store._registry._room == room


async def test_a_failed_sync_of_the_directory_is_made_good_by_the_next_try(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    disk.fail("sync_directory", times=2)
    sent = []
    while len(sent) < 30:
        with contextlib.suppress(DiskPressure):
            await store.append("a", bytes([len(sent)]) * 9000)
            sent.append(bytes([len(sent)]) * 9000)
    disk.cut_power()
    await store.close()
    disk.restore_power()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    assert helpers.payloads(await read_all(store, helpers)) == sent


@pytest.mark.parametrize("operation", ["rename", "remove", "sync_directory"])
@pytest.mark.parametrize("spare_segments", [0, 4])
async def test_retention_that_fails_on_the_way_leaves_no_hole(open_rocksmq, disk, helpers, operation, spare_segments):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL, spare_segments=spare_segments)
    last = [await store.append("a", bytes([number]) * 9000) for number in range(30)][-1]
    await helpers.until(lambda: store._segments.ready)
    disk.fail(operation)
    await store.truncate("a", last)
    for _ in range(3):
        with contextlib.suppress(OSError):
            store.retain_now()
    assert len(store._segments.epochs) <= 2  # it was tried again
    await store.close()
    disk.heal()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    assert helpers.payloads(await read_all(store, helpers))[-1] == bytes([29]) * 9000


async def test_what_the_device_cannot_read_is_reported_to_its_readers_by_offset(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL, tail_bytes=1)
    for number in range(30):
        await store.append("a", bytes([number]) * 5000)
    disk.fail("read", times=10**6)
    with pytest.raises(CorruptLog) as caught:
        await read_all(store, helpers)
    assert caught.value.path.endswith(".segment")
    await store.append("a", b"writing goes on")
    disk.heal()
    assert len(await read_all(store, helpers)) == 31


async def test_a_device_that_cannot_read_at_opening_is_reported_by_type(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers)
    await store.append("a", b"x")
    await store.close()
    disk.fail("read")
    with pytest.raises(JournalFailed):
        await open_rocksmq(disk=disk)
    store = await open_rocksmq(disk=disk)
    assert helpers.payloads(await read_all(store, helpers)) == [b"x"]


@pytest.mark.parametrize("limit", [1, 7, 511, 4097])
async def test_short_writes_everywhere(open_rocksmq, disk, helpers, limit):
    store = await ready(open_rocksmq, disk, helpers, segment_bytes=SMALL)
    sent = []
    for number in range(12):
        disk.write_limit = limit if limit > 7 or number % 4 == 0 else None  # byte by byte is slow
        sent.append(bytes([number]) * (9000 if disk.write_limit != limit or limit > 7 else 900))
        await store.append("a", sent[-1])
    disk.heal()
    await store.close()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    assert helpers.payloads(await read_all(store, helpers)) == sent


@pytest.mark.slow
async def test_space_that_comes_back_is_noticed_without_a_restart(open_rocksmq, disk, helpers):
    store = await ready(open_rocksmq, disk, helpers, free_space_bytes=1000)
    disk.free = 0
    await helpers.until(lambda: store._admission.pressure)  # maintenance looks twice a second
    with pytest.raises(DiskPressure):
        await store.append("a", b"no")
    disk.free = 10**9
    await helpers.until(lambda: not store._admission.pressure)
    await store.append("a", b"yes")


def failing(step):
    """A step that does its work and fails, with what RocksDB's package raises."""

    def fail():
        step()
        raise Exception(f"IO error: {os.strerror(errno.ENOSPC)}")

    return fail


@pytest.mark.parametrize("serve", [True, False])
async def test_closing_frees_the_directory_whatever_fails_on_the_way(open_rocksmq, disk, helpers, serve):
    sent = []
    while True:
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL, serve=serve)
        await store.create_channel("a", PLAIN)
        sent.append(f"incarnation {len(sent)}".encode())
        await store.append("a", sent[-1])
        place = len(sent) - 1
        steps = len(store._undo)
        if place < steps:
            store._undo[place] = failing(store._undo[place])
        async with asyncio.timeout(20):
            await asyncio.gather(store.close(), store.close())
            await store.close()
        if place == steps:
            break
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    assert helpers.payloads(await read_all(store, helpers)) == sent


async def test_an_opening_that_fails_frees_the_directory_too(open_rocksmq, disk, monkeypatch):
    def cannot_close(index):
        close(index)
        raise Exception("Corruption")

    close = Index.close
    monkeypatch.setattr(Index, "close", cannot_close)
    disk.fail("sync", name=".segment")
    with pytest.raises(JournalFailed):
        await open_rocksmq(disk=disk)
    monkeypatch.undo()
    await open_rocksmq(disk=disk)
