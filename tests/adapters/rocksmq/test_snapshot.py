"""The snapshot that begins each segment is bounded, fits, and never prevents opening."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.rocksmq.journal import channels as records
from tidewal.adapters.rocksmq.journal.channels import ChannelTable, JournalledChannel, encode_id
from tidewal.adapters.rocksmq.journal.segment_stats import COUNT_FRAMES, SegmentStats
from tidewal.adapters.rocksmq.journal.segments import Segment
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.groups.progress import MAX_METADATA_BYTES, Change
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

MIB = 1024 * 1024
SMALL = 64 * 1024

numbers, ids, names = st.integers(1, 4), st.integers(1, 40), st.sampled_from(["g", "group-2", "h" * 40])
record = st.one_of(
    st.builds(lambda number, name: records.create(JournalledChannel(number, name, ChannelPolicy())), numbers, names),
    st.builds(records.drop, numbers),
    st.builds(records.hold, numbers, names, st.one_of(st.none(), ids)),
    st.builds(
        lambda number, group, upto, single, reset, metadata: records.acked(
            number,
            Change(
                group, "", None if upto is None else encode_id(upto), tuple(map(encode_id, single)), reset, metadata
            ),
        ),
        numbers,
        names,
        st.one_of(st.none(), ids),
        st.lists(ids, max_size=20),
        st.booleans(),
        st.one_of(st.none(), st.sampled_from([b"", b"x", bytes(300), bytes(MAX_METADATA_BYTES)])),
    ),
    st.builds(records.forget, names),
)


@pytest.mark.slow
@given(st.lists(record, max_size=60))
def test_what_a_snapshot_takes_is_counted(steps):
    table = ChannelTable()
    empty = len(table.snapshot(0))
    for step in steps:
        table.apply(step)
        assert table.size == sum(state.size for state in table.by_number.values())
    policies = 200
    assert len(table.snapshot(0)) <= empty + policies + table.size
    again = ChannelTable()
    again.apply(table.snapshot(0))
    assert again.size == table.size
    assert {n: state.groups for n, state in again.by_number.items()} == {
        n: state.groups for n, state in table.by_number.items()
    }


async def limit_of(steps: Iterable[Callable[[], Awaitable[object]]]) -> str | None:
    """The limit with which one of them is refused."""
    try:
        for step in steps:
            await step()
    except Overloaded as error:
        return error.limit
    return None


async def fill(store) -> list[str | None]:
    """Channels, positions and single acknowledgements until each is refused, as the documented limits allow them."""
    refused = [await limit_of(partial(store.create_channel, f"channel-{n}", ChannelPolicy()) for n in range(10_000))]
    channels = [name for name in await store.channels() if name.startswith("channel")]
    ids = [id for _ in range(10) for id in await store.append_many([Append(channels[0], b"")] * 1000)]
    groups = store._coordinator._backend

    def commit(*changes: Change) -> asyncio.Future[object]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()
        groups.commit([], changes, lambda result: loop.call_soon_threadsafe(done.set_result, result))
        return done

    await commit(Change("singles", channels[0], None, tuple(ids[1::2])))
    joins = (partial(commit, *(Change(f"g{n}", name, encode_id(0), ()) for name in channels)) for n in range(1000))
    refused.append(await limit_of(joins))
    refused.append(await limit_of([partial(commit, Change("singles", channels[0], None, (ids[2],)))]))
    refused.append(await limit_of([partial(commit, Change("singles", channels[0], None, metadata=b"more"))]))
    refused.append(await limit_of([partial(store.hold, channels[0], "holder", ids[0])]))
    await commit(Change("singles", channels[0], ids[0], ()))  # a position that moves on adds nothing
    return refused


@pytest.mark.parametrize("segment_bytes", [SMALL, pytest.param(MIB, marks=pytest.mark.slow)])
async def test_at_every_limit_the_log_takes_writes_and_opens(open_rocksmq, segment_bytes):
    """Positions, channels, single acknowledgements and holds up to what is refused: whatever does not add goes on."""
    store = await open_rocksmq(segment_bytes=segment_bytes)
    assert await fill(store) == ["channels", *["snapshot_bytes"] * 4]
    largest = store._segments.capacity - 1000
    for size in (1, largest, 100, largest, largest):
        await store.append("channel-1", bytes(size))
    await store.close()
    store = await open_rocksmq(segment_bytes=segment_bytes)
    await store.append("channel-1", bytes(largest))
    await store.drop_channel("channel-2")
    for group in ("singles", *(f"g{n}" for n in range(3))):
        await store.drop_group(group)
    await store.hold("channel-3", "holder", encode_id(1))
    await store.close()


@pytest.mark.long
async def test_what_is_known_of_clients_may_be_larger_than_a_segment(open_rocksmq, helpers, tmp_path):
    """It cannot be refused: it recognises appends that are sent again. The segment is larger, then."""
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    loop, sent = asyncio.get_running_loop(), 6000
    for client in (bytes(16), bytes([1]) * 16):
        done = [loop.create_future() for _ in range(sent)]
        for number, one in enumerate(done, 1):
            tell = partial(loop.call_soon_threadsafe, one.set_result)
            store.submit_from(client, number, 0, [Append("a", b"x")], tell)
        assert not [result for result in await asyncio.gather(*done) if not isinstance(result, list)]
    assert len(store._journal.table.snapshot(0)) > SMALL
    for n in range(200):
        await store.append("a", bytes([n]) * 3000)
    await store.close()
    shutil.rmtree(tmp_path / "log" / "index")
    store = await open_rocksmq(segment_bytes=SMALL, tail_bytes=1)
    entries = await helpers.take(store, "a", From.EARLIEST, 2 * sent + 200)
    assert helpers.payloads(entries[-200:]) == [bytes([n]) * 3000 for n in range(200)]
    assert len({entry.id for entry in entries}) == len(entries)


async def test_a_segment_made_ready_for_smaller_ones_is_replaced_by_one_with_room(open_rocksmq, helpers, tmp_path):
    """What is written behind the end that a segment's header states would be lost with the index."""
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    await helpers.until(lambda: not store._segments.wants_spare)
    await store.close()
    store = await open_rocksmq(segment_bytes=MIB)
    for n in range(3):
        await store.append("a", bytes([n]) * (MIB // 2))
    await store.close()
    shutil.rmtree(tmp_path / "log" / "index")
    store = await open_rocksmq(segment_bytes=MIB)
    entries = await helpers.take(store, "a", From.EARLIEST, 3)
    assert helpers.payloads(entries) == [bytes([n]) * (MIB // 2) for n in range(3)]


async def test_a_spare_that_cannot_be_replaced_stays(open_rocksmq, helpers, monkeypatch):
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    await helpers.until(lambda: not store._segments.wants_spare)
    segments = store._segments
    with monkeypatch.context() as failing:
        failing.setattr(segments, "_fill", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert segments.take_spare(2 * SMALL) is None
        with contextlib.suppress(OSError):
            segments.prepare_spare()
    assert segments.take_spare(SMALL) is not None


async def test_no_append_pays_for_thousands(open_rocksmq, monkeypatch):
    """What commits leave uncounted is a few frames, so that none of them counts what many left."""
    counted: list[int] = []

    def count(stats: SegmentStats, segment: Segment) -> None:
        counted.append(len(stats._frames))
        really_count(stats, segment)

    really_count = SegmentStats.count
    store = await open_rocksmq(segment_bytes=MIB)
    await store.create_channel("a", ChannelPolicy())
    monkeypatch.setattr(SegmentStats, "count", count)
    for _ in range(5 * COUNT_FRAMES):
        await store.append("a", b"x")
    assert len(counted) >= 4
    assert max(counted) <= COUNT_FRAMES
