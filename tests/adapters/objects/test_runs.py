"""Runs: the entries of many blocks in one object, joined by channel, under the ids that they had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.objects.processes import QUICK, Process, Processes, virtual
from tests.adapters.objects.simulated_store import StoreRates
from tidewal.adapters.objects.block import (
    BlockHeader,
    BlockKind,
    StoredEntry,
    check_section,
    decode_section,
    encode_block,
    join_block,
    join_sections,
)
from tidewal.adapters.objects.block import Section as BlockSection
from tidewal.adapters.objects.compactor import _pieces
from tidewal.adapters.objects.control import Compacted, Control
from tidewal.adapters.objects.log_objects import run_key
from tidewal.adapters.objects.stored_channel import Piece, StoredChannel, StoredSection, encode_id
from tidewal.runtime.errors import CorruptLog, PositionLost, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId, FromTime
from tidewal.runtime.testing.clock import elapse, run_virtual

CHANNELS = ("a", "b", "c")


@pytest.fixture
def processes() -> Processes:
    return Processes(pace=QUICK)


def runs(processes: Processes) -> list[str]:
    return [key for key in processes.objects.bodies if key.startswith("run/")]


async def write_rounds(owner: Process, numbers: range) -> list[dict[str, bytes]]:
    """One block for each number, with an entry of each channel; their ids by channel."""
    written: list[dict[str, bytes]] = []
    for at in numbers:
        entries = [Append(channel, b"%s%d" % (channel.encode(), at), timestamp=1000 + at) for channel in CHANNELS]
        written.append(dict(zip(CHANNELS, await owner.wal.append_many(entries), strict=True)))
    return written


async def all_of(process: Process, channel: str, count: int) -> list[Entry]:
    found: list[Entry] = []
    reader = process.wal.read(channel, From.EARLIEST)
    while len(found) < count:
        found += await anext(reader)
    return found


@virtual
async def test_ids_times_and_order_survive_in_runs(processes: Processes) -> None:
    owner = await processes.owner(*CHANNELS)
    follower = await processes.open()
    written = await write_rounds(owner, range(200))
    await elapse(3 * QUICK.grace_s)
    assert processes.blocks(1)[0] > 150
    for process in (owner, follower, await processes.open()):
        for channel in CHANNELS:
            entries = await all_of(process, channel, 200)
            assert [entry.id for entry in entries] == [ids[channel] for ids in written]
            assert [bytes(entry.payload) for entry in entries] == [
                b"%s%d" % (channel.encode(), at) for at in range(200)
            ]
            assert len(process.wal._state.names[channel].sections) < 80
            for at in (0, 57, 133, 199):
                start = await anext(process.wal.read(channel, FromId(written[at][channel], inclusive=True)))
                assert start[0].id == written[at][channel]
                assert await process.wal.id_at(channel, 1000 + at) == written[at][channel]
                timed = await anext(process.wal.read(channel, FromTime(1000 + at)))
                assert timed[0].id == written[at][channel]
        with pytest.raises(PositionLost):
            await anext(process.wal.read("a", FromId(written[57]["b"])))


@virtual
async def test_a_truncation_inside_a_joined_section_is_exact(processes: Processes) -> None:
    owner = await processes.owner(*CHANNELS)
    written = await write_rounds(owner, range(100))
    await elapse(5)
    await owner.wal.truncate("b", written[33]["b"])
    for process in (owner, await processes.open()):
        assert (await process.wal.describe("b")).first_id == written[33]["b"]
        assert [entry.id for entry in await all_of(process, "b", 67)] == [ids["b"] for ids in written[33:]]
        with pytest.raises(PositionLost):
            await anext(process.wal.read("b", FromId(written[20]["b"])))


@virtual
async def test_a_channel_is_read_by_few_requests(processes: Processes) -> None:
    owner = await processes.owner(*CHANNELS)
    await write_rounds(owner, range(400))
    await elapse(5)
    reader = await processes.open()
    before = processes.objects.requests["get"]
    await all_of(reader, "a", 400)
    assert processes.objects.requests["get"] - before < 80  # instead of 400


@virtual
async def test_a_channel_that_keeps_all_does_not_keep_the_others(processes: Processes) -> None:
    """A few bytes of it are in every block."""
    owner = await processes.owner(*CHANNELS)
    written: list[dict[str, bytes]] = []
    for at in range(20):
        written += await write_rounds(owner, range(at * 20, at * 20 + 20))
        for channel in ("b", "c"):
            await owner.wal.truncate(channel, written[-1][channel])
        await elapse(10)
    await elapse(3 * QUICK.grace_s)
    stored = sum(len(processes.objects.bodies[key]) for key in runs(processes))
    kept = sum(section.row.length for section in owner.wal._state.names["a"].sections)
    assert stored < 4 * kept
    assert processes.blocks(1)[0] > 350
    assert len(await all_of(await processes.open(), "a", 400)) == 400


@virtual
async def test_of_a_compactor_that_slept_nothing_counts_and_nothing_is_lost(processes: Processes) -> None:
    """Schedule 11: it has stored a run, and wakes when its successor has deleted that and what it was made of."""
    zombie = await processes.owner(*CHANNELS)
    awake = asyncio.Event()

    async def sleep(controls: Sequence[Control]) -> None:
        await awake.wait()
        await zombie.wal._commit(controls)

    zombie.wal._maintenance._compactor._commit = sleep
    written = await write_rounds(zombie, range(40))
    await elapse(2)
    zombie.store.stop()
    awake.set()
    (orphan,) = runs(processes)
    successor = await processes.open()
    while successor.wal._state.epoch < 2 or not successor.wal._owns():
        await elapse(1)
        try:
            written += await write_rounds(successor, range(40, 41))
        except Unavailable:
            continue
    written += await write_rounds(successor, range(41, 90))
    await elapse(5 * QUICK.grace_s)
    assert orphan not in processes.objects.bodies
    zombie.store.go_on()
    await elapse(5 * QUICK.grace_s)
    for process in (zombie, successor, await processes.open()):
        assert [entry.id for entry in await all_of(process, "c", 90)] == [ids["c"] for ids in written]


@virtual
async def test_a_run_counts_in_its_epoch_alone(processes: Processes) -> None:
    """Its maker may own the log again, after another owner has taken the run for garbage."""
    owner = await processes.owner("a")
    await owner.wal.append("a", b"x")
    (section,) = owner.wal._state.names["a"].sections
    moved = section._replace(key=run_key(7, 0))
    await owner.wal._commit([Compacted(7, 0, [moved])])
    assert owner.wal._state.names["a"].sections == [section]
    await owner.wal._commit([Compacted(1, 0, [section._replace(key=run_key(1, 0))])])
    assert owner.wal._state.names["a"].sections[0].key == run_key(1, 0)


@virtual
async def test_a_run_that_is_damaged_or_gone_is_an_error(processes: Processes) -> None:
    owner = await processes.owner(*CHANNELS)
    await write_rounds(owner, range(40))
    await elapse(5)
    reader = await processes.open()
    for key in runs(processes):
        processes.objects.bodies[key] = processes.objects.bodies[key][:-1] + b"!"
    with pytest.raises(CorruptLog):
        await all_of(reader, "c", 40)
    for key in runs(processes):
        del processes.objects.bodies[key]
    with pytest.raises(CorruptLog):
        await all_of(reader, "c", 40)


def section_of(first: int, last: int) -> StoredSection:
    """A section with the entries of these numbers."""
    (row,) = encode_block(
        BlockHeader(BlockKind.DATA, b"l" * 16, b"w" * 16, 1, 0, first), {1: [StoredEntry(0, b"")] * (last - first + 1)}
    ).table
    return StoredSection("key", 1, 0, row, (Piece(0, first),))


def test_a_section_replaces_only_those_whose_entries_it_has() -> None:
    channel = StoredChannel(1, "a", ChannelPolicy(), encode_id(1, 0))
    sections = [section_of(1, 10), section_of(11, 20), section_of(21, 30)]
    for section in sections:
        channel.add(section)
    for first, last in ((1, 15), (5, 20), (12, 18), (31, 40)):
        channel.replace(section_of(first, last))
        assert channel.sections == sections
    channel.remove_before(encode_id(1, 13))
    channel.replace(section_of(1, 20))
    assert channel.sections == [section_of(1, 20), sections[2]]
    assert channel.first_id == encode_id(1, 13)


entries = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=9)), min_size=1, max_size=5)


@given(st.lists(st.tuples(entries, st.integers(0, 2)), min_size=1, max_size=5))
def test_joined_sections_have_the_entries_of_all(parts: list[tuple[list[tuple[int, bytes]], int]]) -> None:
    header = BlockHeader(BlockKind.RUN, b"l" * 16, b"w" * 16, 1, 0, 0)
    seq, sections, stored, wanted = 1, [], [], []
    for of_part, gap in parts:
        block = encode_block(
            BlockHeader(BlockKind.DATA, b"l" * 16, b"w" * 16, 1, 0, seq), {5: [StoredEntry(*each) for each in of_part]}
        )
        (row,) = block.table
        sections.append(BlockSection(row, block.section(row)))
        stored.append(StoredSection("key", 1, 0, row, (Piece(0, seq),)))
        wanted += [(encode_id(1, seq + at), *each) for at, each in enumerate(of_part)]
        seq += len(of_part) + gap
    run = join_block(header, [join_sections(sections)])
    (row,) = run.table
    check_section(run.section(row), row, "key")
    joined = StoredSection("run", 1, 0, row, _pieces(stored))
    assert all(first.at < second.at for first, second in pairwise(joined.pieces))
    found = [
        (joined.id(at), entry.timestamp, bytes(entry.payload))
        for at, entry in enumerate(decode_section(run.section(row), row))
    ]
    assert found == wanted
    assert (joined.first_id, joined.last_id) == (wanted[0][0], wanted[-1][0])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_removed_the_rest_is_there(seed: int) -> None:
    """Owners that append, truncate, hold and drop over a store with every fault, and are killed: at the end every
    process finds what a model has, and what lay in between was compacted and deleted."""
    rates = StoreRates(refused=0.03, cut=0.03, late=0.03, conflict=0.03, doubled=0.03, hidden=0.03, late_s=200)
    processes = Processes(rates, pace=QUICK)
    chance = random.Random(seed)

    async def main() -> None:
        follower = await processes.open(seed + 1000)
        kept: dict[str, list[bytes]] = {}
        for generation in range(3):
            owner = await processes.open(seed * 10 + generation)
            for _ in range(60):
                await until_done(owner, kept)
                await elapse(chance.choice((0, 0, 0.5, 3)))
            await elapse(chance.choice((0, 2 * QUICK.grace_s)))
            processes.kill(owner)
        for process in (follower, await processes.open(999)):
            process.store.rates = StoreRates()
            for channel, ids in kept.items():
                await process.wal.latest_id(channel)
                found = await all_of(process, channel, len(ids))
                assert [(entry.id, bytes(entry.payload)) for entry in found] == [(id, channel.encode()) for id in ids]
        assert runs(processes)
        await processes.close()

    async def step(owner: Process, kept: dict[str, list[bytes]]) -> None:
        channel = chance.choice(CHANNELS)
        if channel not in kept:
            await owner.wal.create_channel(channel, ChannelPolicy())
            kept[channel] = []
        draw = chance.random()
        ids = kept[channel]
        if draw < 0.04:
            await owner.wal.drop_channel(channel)
            del kept[channel]
        elif draw < 0.15 and ids:
            cut = chance.randrange(len(ids))
            await owner.wal.truncate(channel, ids[cut])
            del ids[:cut]
        else:
            ids += await owner.wal.append_many([Append(channel, channel.encode())] * chance.randrange(1, 5))

    async def until_done(owner: Process, kept: dict[str, list[bytes]]) -> None:
        """Try again until this process owns the log: nothing in the store takes so long that an outcome is unknown."""
        while True:
            try:
                return await step(owner, kept)
            except Unavailable as error:
                if error.outcome_unknown:
                    raise
                await elapse(1)

    run_virtual(main())
